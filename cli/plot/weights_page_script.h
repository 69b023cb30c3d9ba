// The fixed parts of the page that `ladon run --weights page.html` writes. Between them stands the
// data, as JSON.
#pragma once

#include <string_view>

namespace ladon::cli {

inline constexpr std::string_view kWeightsPageBegin = R"page(<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Attention weights</title>
<style>
body { margin: 0; font: 14px/1.4 system-ui, "DejaVu Sans", sans-serif; color: #1b1f24; }
header { padding: 14px 20px 8px; }
h1 { font-size: 18px; margin: 0; }
header p { margin: 2px 0 0; color: #57606a; }
main { display: grid; gap: 20px; padding: 0 20px 20px; align-items: start; justify-content: start;
  grid-template-columns: auto auto minmax(240px, 360px); }
#center { width: min-content; min-width: 480px; }
#heads { display: grid; grid-template-columns: repeat(auto-fill, 88px); gap: 8px; width: 396px;
  max-height: 86vh; overflow-y: auto; }
@media (max-width: 1400px) { #heads { width: 204px; } }
@media (max-width: 1180px) { main { grid-template-columns: auto auto; } #side { grid-column: 1 / -1; } }
#heads button { border: 2px solid transparent; border-radius: 4px; background: none; padding: 2px;
  font: inherit; font-size: 11px; color: #57606a; cursor: pointer; text-align: left; }
#heads button[aria-pressed=true] { border-color: #1e5ca0; color: #1b1f24; font-weight: 600; }
#heads button:focus-visible { outline: 2px solid #1e5ca0; }
#heads canvas { width: 80px; height: 80px; display: block; image-rendering: pixelated; }
#enlarged { position: relative; }
#enlarged canvas { display: block; image-rendering: pixelated; border: 1px solid #d8dee4; }
#marks { position: absolute; left: 0; top: 0; pointer-events: none; border-color: transparent; }
#map { cursor: crosshair; touch-action: none; }
#side h2 { font-size: 13px; margin: 14px 0 4px; }
#side h2:first-child { margin-top: 0; }
table { border-collapse: collapse; width: 100%; }
td { padding: 1px 6px 1px 0; font-size: 13px; white-space: nowrap; }
td.text { max-width: 150px; overflow: hidden; text-overflow: ellipsis; }
td.bar { width: 50%; }
td.bar div { height: 10px; background: #3d7cc9; border-radius: 1px; }
td.number { text-align: right; font-variant-numeric: tabular-nums; color: #57606a; }
td.none { color: #57606a; }
#tokens { display: flex; flex-wrap: wrap; gap: 2px; max-height: 30vh; overflow-y: auto; }
#tokens span { padding: 1px 3px; border: 1px solid transparent; border-radius: 3px; font-size: 12px;
  min-width: 1ch; min-height: 1.4em; max-width: 12em; overflow: hidden; white-space: pre; cursor: crosshair; }
#tokens span.chosen { border-color: #d9480f; }
#scale { display: flex; align-items: center; gap: 8px; margin-top: 8px; font-size: 12px;
  color: #57606a; }
#scale canvas { width: 160px; height: 10px; border: 1px solid #d8dee4; }
#scale i { width: 12px; height: 12px; display: inline-block; border: 1px solid #d8dee4; }
</style>
</head>
<body>
<header><h1 id="title"></h1><p id="subtitle"></p></header>
<main>
<div id="heads"></div>
<div id="center">
<div id="enlarged"><canvas id="map"></canvas><canvas id="marks"></canvas></div>
<div id="scale"><span>0</span><canvas id="ramp" width="160" height="1"></canvas><span id="most">
</span><i id="masked"></i><span>masked</span></div>
<p id="hint">Rows are queries, columns are keys. Point at a cell, or at a token below, which is shaded
by how much the chosen token looks at it; click to keep it.</p>
<div id="tokens"></div>
</div>
<div id="side">
<h2 id="row-title"></h2><table id="row"></table>
<h2 id="column-title"></h2><table id="column"></table>
</div>
</main>
)page";

inline constexpr std::string_view kWeightsPageEnd = R"page(<script>
"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);
const { rows, columns, causal, window: width, largest, heads } = data;
const kMasked = [236, 232, 224];
const kStops = [[255, 255, 255], [189, 212, 235], [98, 160, 208], [30, 92, 160], [10, 30, 66]];
const shades = Array.from({ length: 256 }, (_, byte) => {
  const position = byte / 255 * (kStops.length - 1);
  const below = Math.min(Math.floor(position), kStops.length - 2);
  return kStops[below].map((v, i) => v + (position - below) * (kStops[below + 1][i] - v));
});
const first = (i) => (width > 0 ? Math.max(0, i - width + 1) : 0);
const end = (i) => (causal ? Math.min(columns, i + 1) : columns);
const starts = new Array(rows + 1).fill(0);
for (let i = 0; i < rows; ++i) starts[i + 1] = starts[i] + Math.max(0, end(i) - first(i));

const decoded = new Map();
function cells(head) {  // the bytes of one head, decoded when they are first wanted
  if (!decoded.has(head)) {
    const text = atob(data.maps[head]);
    const bytes = new Uint8Array(text.length);
    for (let i = 0; i < text.length; ++i) bytes[i] = text.charCodeAt(i);
    decoded.set(head, bytes);
  }
  return decoded.get(head);
}
const isMasked = (i, j) => j < first(i) || j >= end(i);
const byteAt = (bytes, i, j) => (isMasked(i, j) ? 0 : bytes[starts[i] + j - first(i)]);
const weightOf = (byte) => (byte / 255) ** 2 * largest;
const nameOf = (i) => (data.tokens.length > i ? data.tokens[i] : "");
const numberOf = (w) => (w >= 0.0995 ? w.toFixed(2) : w >= 0.00095 ? w.toFixed(3) : w === 0 ? "0" : "<0.001");

function paint(canvas, head, most) {  // cells of several tokens show their largest weight
  const bytes = cells(head);
  const step = Math.max(1, Math.ceil(Math.max(rows, columns) / most));
  canvas.width = Math.ceil(columns / step);
  canvas.height = Math.ceil(rows / step);
  const peaks = new Int16Array(canvas.width * canvas.height).fill(-1);
  for (let i = 0; i < rows; ++i) {
    const line = Math.floor(i / step) * canvas.width;
    let from = starts[i];
    for (let j = first(i); j < end(i); ++j, ++from) {
      const cell = line + Math.floor(j / step);
      if (bytes[from] > peaks[cell]) peaks[cell] = bytes[from];
    }
  }
  const context = canvas.getContext("2d");
  const image = context.createImageData(canvas.width, canvas.height);
  for (let cell = 0; cell < peaks.length; ++cell) {
    const [r, g, b] = peaks[cell] < 0 ? kMasked : shades[peaks[cell]];
    image.data.set([r, g, b, 255], 4 * cell);
  }
  context.putImageData(image, 0, 0);
}

const state = { head: 0, row: Math.max(0, rows - 1), column: Math.max(0, rows - 1), kept: false };
const map = byId("map"), marks = byId("marks");
const zoom = Math.max(1, Math.floor(640 / Math.max(rows, columns, 1)));

function showHead(head) {
  state.head = head;
  paint(map, head, 4096);
  for (const canvas of [map, marks]) {
    canvas.style.width = `${columns * zoom}px`;
    canvas.style.height = `${rows * zoom}px`;
  }
  document.querySelectorAll("#heads button").forEach((button, i) => {
    button.setAttribute("aria-pressed", String(i === head));
  });
  showToken();
}

function fill(table, entries) {
  entries.sort((a, b) => b.byte - a.byte);
  const shown = entries.slice(0, 10).filter((entry) => entry.byte > 0);
  if (shown.length === 0) {
    table.innerHTML = '<tr><td class="none">nothing: every weight is masked or almost 0</td></tr>';
    return;
  }
  table.replaceChildren(...shown.map((entry) => {
    const line = document.createElement("tr");
    const cell = (name, text) => {
      const made = line.appendChild(document.createElement("td"));
      made.className = name;
      made.textContent = text;
      return made;
    };
    cell("number", String(entry.index));
    cell("text", nameOf(entry.index)).title = nameOf(entry.index);
    const bar = cell("bar", "").appendChild(document.createElement("div"));
    bar.style.width = `${100 * weightOf(entry.byte) / largest}%`;
    cell("number", numberOf(weightOf(entry.byte)));
    return line;
  }));
}

function showToken() {
  const bytes = cells(state.head);
  const { row, column } = state;
  const shown = (i) => `${i}${nameOf(i) ? ` “${nameOf(i)}”` : ""}`;
  byId("row-title").textContent = `Token ${shown(row)} looks at`;
  byId("column-title").textContent = `Token ${shown(column)} is looked at by`;
  fill(byId("row"), Array.from({ length: columns }, (_, j) => ({ index: j, byte: byteAt(bytes, row, j) })));
  fill(byId("column"), Array.from({ length: rows }, (_, i) => ({ index: i, byte: byteAt(bytes, i, column) })));
  for (const [i, span] of tokens.entries()) {
    const byte = byteAt(bytes, row, i);
    span.style.background = isMasked(row, i) ? "" : `rgb(${shades[byte].map(Math.round).join(",")})`;
    span.style.color = byte > 140 ? "#fff" : "";
    span.className = i === row || i === column ? "chosen" : "";
  }
  marks.width = columns * zoom;
  marks.height = rows * zoom;
  const context = marks.getContext("2d");
  context.strokeStyle = "#d9480f";
  context.strokeRect(0.5, row * zoom + 0.5, columns * zoom - 1, Math.max(1, zoom - 1));
  context.strokeRect(column * zoom + 0.5, 0.5, Math.max(1, zoom - 1), rows * zoom - 1);
}

function point(event) {
  if (state.kept && event.type !== "click") return;
  const box = map.getBoundingClientRect();
  const at = (part, count) => Math.min(count - 1, Math.max(0, Math.floor(part * count)));
  state.row = at((event.clientY - box.top) / box.height, rows);
  state.column = at((event.clientX - box.left) / box.width, columns);
  if (event.type === "click") state.kept = !state.kept;
  showToken();
}

// The tokens one after the other: pointing at one shows its row and its column.
const tokens = Array.from({ length: rows === columns ? rows : 0 }, (_, i) => {
  const span = byId("tokens").appendChild(document.createElement("span"));
  span.textContent = nameOf(i) || String(i);
  span.title = `token ${i}`;
  span.dataset.token = String(i);
  return span;
});
function pointAtToken(event) {
  const token = event.target.dataset.token;
  if (token === undefined || (state.kept && event.type !== "click")) return;
  state.row = state.column = Number(token);
  if (event.type === "click") state.kept = !state.kept;
  showToken();
}

function makeThumbnails() {
  heads.forEach((name, head) => {
    const button = byId("heads").appendChild(document.createElement("button"));
    const canvas = button.appendChild(document.createElement("canvas"));
    button.append(`head ${name}`);
    button.onclick = () => showHead(head);
    // Drawn when they come into sight, so that the page is there at once.
    new IntersectionObserver((entries, observer) => {
      if (!entries.some((entry) => entry.isIntersecting)) return;
      observer.disconnect();
      paint(canvas, head, Math.round(80 * devicePixelRatio));
      canvas.dataset.drawn = "yes";
    }).observe(canvas);
  });
}

byId("title").textContent = document.title = data.title;
byId("subtitle").textContent = data.subtitle;
byId("most").textContent = numberOf(largest);
byId("masked").style.background = `rgb(${kMasked.join(",")})`;
const ramp = byId("ramp").getContext("2d");
for (let x = 0; x < 160; ++x) {
  ramp.fillStyle = `rgb(${shades[Math.round(x / 159 * 255)].join(",")})`;
  ramp.fillRect(x, 0, 1, 1);
}
map.addEventListener("pointermove", point);
map.addEventListener("click", point);
for (const type of ["pointerover", "click"]) byId("tokens").addEventListener(type, pointAtToken);
document.addEventListener("keydown", (event) => {
  const steps = { ArrowLeft: -1, ArrowRight: 1 };
  if (event.key in steps) showHead((state.head + steps[event.key] + heads.length) % heads.length);
});
// #head=3&row=7&column=2 shows that head and those tokens.
const wanted = new URLSearchParams(location.hash.slice(1));
for (const [name, count] of [["row", rows], ["column", columns]]) {
  if (wanted.has(name)) state[name] = Math.min(count - 1, Math.max(0, Number(wanted.get(name)) || 0));
}
makeThumbnails();
showHead(Math.max(0, heads.indexOf(Number(wanted.get("head") ?? heads[0]))));
</script>
</body>
</html>
)page";

}  // namespace ladon::cli
