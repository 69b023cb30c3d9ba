// The cache calculator. figures.js, written by `ladon plan --json`, has the bytes of one token for each
// model, kind and dtype; everything else follows from the windows of the layers.
"use strict";
(() => {
  const figures = window.ladonFigures;
  const root = document.getElementById("calculator");
  const form = root.querySelector("form");
  const most = 2 ** 50; // contexts and batches past this are not searched, as in `ladon plan`

  const addOptions = (name, values) => {
    for (const [value, text] of values) {
      const option = document.createElement("option");
      option.value = value;
      option.textContent = text;
      form.elements[name].append(option);
    }
  };
  addOptions("model", figures.models.map((model) => [model.name, model.title]));
  addOptions("dtype", figures.dtypes.map((dtype) => [dtype, dtype]));
  form.elements.dtype.value = "bf16";

  // "8192", "8k" or "1m": a whole number from 1 on, or NaN.
  const readCount = (text) => {
    const match = /^([0-9]+)([km]?)$/i.exec(text.trim());
    if (!match) return NaN;
    const value = Number(match[1]) * { "": 1, k: 1024, m: 1048576 }[match[2].toLowerCase()];
    return value >= 1 && value <= most ? value : NaN;
  };
  // GiB as bytes; undefined where nothing was typed.
  const readGiB = (text) => {
    if (text.trim() === "") return undefined;
    const value = Number(text);
    return value >= 0 && Number.isFinite(value) ? Math.floor(value * 2 ** 30) : NaN;
  };

  // Tokens held by all layers together: a layer with a window holds no more than that.
  const heldTokens = (model, own, context) => {
    let tokens = 0;
    for (const [window, layers] of model.windows) {
      tokens += layers * (own && window > 0 ? Math.min(window, context) : context);
    }
    return tokens;
  };
  const cacheBytes = (model, cache, dtype, context, batch) =>
    batch * heldTokens(model, cache.own, context) * cache.layerBytes[dtype];

  const largest = (fits) => {
    if (fits(most)) return undefined;
    let good = 0;
    let bad = most;
    while (bad - good > 1) {
      const middle = good + Math.floor((bad - good) / 2);
      if (fits(middle)) good = middle;
      else bad = middle;
    }
    return good;
  };

  const showBytes = (bytes) => {
    const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    let unit = 0;
    while (bytes >= 1024 && unit < units.length - 1) {
      bytes /= 1024;
      unit += 1;
    }
    return `${unit === 0 || bytes >= 100 ? bytes.toFixed(0) : bytes.toPrecision(3)} ${units[unit]}`;
  };
  const showCount = (count) => (count === undefined ? "any" : count.toLocaleString("en"));

  const show = () => {
    const model = figures.models.find((candidate) => candidate.name === form.elements.model.value);
    const dtype = form.elements.dtype.value;
    const context = readCount(form.elements.context.value);
    const batch = readCount(form.elements.batch.value);
    const memory = readGiB(form.elements.memory.value);
    const weights = readGiB(form.elements.weights.value) ?? model.weightBytes;
    const body = root.querySelector("tbody");
    const notes = [];
    body.replaceChildren();
    document.getElementById("calculator-model").textContent =
      `${model.title}: ${model.kind}, ${model.numLayers} layers, ${model.numHeads} heads of ${model.headDim}; ` +
      `weights ${showBytes(model.weightBytes)}`;
    if (Number.isNaN(context)) notes.push("Context: expected a whole number such as 8192, 8k or 1m.");
    if (Number.isNaN(batch)) notes.push("Batch: expected a whole number from 1 on.");
    if (Number.isNaN(memory) || Number.isNaN(weights)) notes.push("Memory and weights: expected GiB, such as 80.");
    for (const cell of root.querySelectorAll("th.memory")) cell.hidden = memory === undefined;
    if (notes.length === 0) {
      const left = memory === undefined ? 0 : memory - weights;
      const mha = cacheBytes(model, model.caches[0], dtype, context, batch);
      for (const cache of model.caches) {
        const bytes = cacheBytes(model, cache, dtype, context, batch);
        const row = document.createElement("tr");
        row.dataset.kind = cache.kind;
        row.dataset.bytes = bytes;
        if (cache.own) row.style.fontWeight = "bold";
        const texts = [cache.kind, cache.details, showBytes(cache.layerBytes[dtype] * model.numLayers),
          showBytes(bytes), bytes === mha ? "" : `${(100 * (1 - bytes / mha)).toFixed(1)} %`];
        if (memory !== undefined) {
          const longest = largest((n) => cacheBytes(model, cache, dtype, n, batch) <= left);
          const widest = largest((n) => cacheBytes(model, cache, dtype, context, n) <= left);
          row.dataset.mostContext = longest ?? "";
          row.dataset.mostBatch = widest ?? "";
          texts.push(showCount(longest), showCount(widest));
        }
        for (const text of texts) {
          const cell = document.createElement("td");
          cell.textContent = text;
          row.append(cell);
        }
        body.append(row);
      }
      if (memory !== undefined && left < 0) notes.push("The weights alone do not fit.");
      if (context > model.maxContext) notes.push(`The model supports ${model.maxContext.toLocaleString("en")} tokens.`);
    }
    document.getElementById("calculator-notes").textContent = notes.join(" ");
  };

  // #model=deepseek-v3&context=128k&batch=8 selects, so that a result can be linked to.
  const readFragment = () => {
    for (const [name, value] of new URLSearchParams(location.hash.slice(1))) {
      if (form.elements[name]) form.elements[name].value = value;
    }
    show();
  };
  form.addEventListener("input", () => {
    const chosen = new URLSearchParams(new FormData(form));
    for (const [name, value] of [...chosen]) if (value === "") chosen.delete(name);
    history.replaceState(null, "", `#${chosen}`);
    show();
  });
  form.addEventListener("submit", (event) => event.preventDefault());
  window.addEventListener("hashchange", readFragment);
  readFragment();
})();
