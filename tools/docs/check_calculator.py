#!/usr/bin/env python3
"""Compares the cache calculator, in headless Chromium, with `ladon plan`.

    check_calculator.py --ladon PROGRAM docs/calculator.md    every model, in a page made of it
    check_calculator.py --ladon PROGRAM calculator.html       one model, in the site's own page

Exits with 77 where there is no Chromium.
"""

import argparse
import html
import itertools
import json
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

import write_figures

STATIC = pathlib.Path(__file__).resolve().parents[2] / "docs" / "site"
# Fields of the form; an empty one is left out of the command too.
SETTINGS = [
    {"context": "8k", "batch": "1", "dtype": "bf16", "memory": "", "weights": ""},
    {"context": "131072", "batch": "8", "dtype": "i8", "memory": "80", "weights": ""},
    {"context": "100", "batch": "3", "dtype": "f32", "memory": "640", "weights": "5"},
]
# Shows each case in turn and writes what the table then holds.
DRIVER = """<pre id="shown"></pre><script>
const form = document.querySelector("#calculator form");
document.getElementById("shown").textContent = JSON.stringify(CASES.map((fields) => {
  for (const [name, value] of Object.entries(fields)) form.elements[name].value = value;
  form.dispatchEvent(new Event("input"));
  return { rows: [...document.querySelectorAll("#calculator tbody tr")].map((row) => ({ ...row.dataset })),
           notes: document.getElementById("calculator-notes").textContent };
}));
</script>"""


def dump_dom(page, fragment=""):
    with tempfile.TemporaryDirectory() as profile:
        command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=4000",
                   f"--user-data-dir={profile}", "--dump-dom", f"file://{page.resolve()}{fragment}"]
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout


def expected_rows(ladon, fields):
    command = [ladon, "plan", "--model", fields["model"], "--json"]
    for name in ("context", "batch", "dtype"):
        command += [f"--{name}", fields[name]]
    if fields["memory"]:
        command += ["--memory", f"{fields['memory']}GiB"]
        if fields["weights"]:
            command += ["--weights", f"{fields['weights']}GiB"]
    run = subprocess.run(command, check=True, capture_output=True, text=True)
    rows = []
    for cache in json.loads(run.stdout)["models"][0]["caches"]:
        row = {"kind": cache["kind"], "bytes": str(cache["bytes"])}
        if fields["memory"]:
            for name, key in (("mostContext", "most_context"), ("mostBatch", "most_batch")):
                row[name] = "" if cache.get(key) is None else str(cache[key])
        rows.append(row)
    return rows


def check_markdown(ladon, path):
    block = re.search(r"```\{raw\} html\n(.*?)```", path.read_text(), flags=re.DOTALL).group(1)
    names = [model["name"] for model in write_figures.figures(ladon)["models"]]
    cases = [{"model": name, **fields} for name, fields in itertools.product(names, SETTINGS)]
    wrong = {"model": names[0], **SETTINGS[0], "context": "8q"}
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        (folder / "_static").mkdir()
        shutil.copy(STATIC / "calculator.js", folder / "_static")
        write_figures.write(ladon, folder / "_static" / "figures.js")
        driver = DRIVER.replace("CASES", json.dumps([*cases, wrong]))
        (folder / "page.html").write_text(f'<!doctype html><meta charset="utf-8">{block}{driver}')
        dom = dump_dom(folder / "page.html")
    shown = json.loads(html.unescape(re.search(r'<pre id="shown">(.*?)</pre>', dom, flags=re.DOTALL).group(1)))
    assert len(shown) == len(cases) + 1
    for fields, seen in zip(cases, shown):
        assert seen["rows"] == expected_rows(ladon, fields), f"{fields}: the page shows {seen['rows']}"
    assert shown[-1]["rows"] == [] and "expected a whole number" in shown[-1]["notes"], shown[-1]
    return len(cases)


def check_page(ladon, path):
    fields = {"model": "gemma-2-9b", **SETTINGS[1]}
    fragment = "#" + "&".join(f"{name}={value}" for name, value in fields.items() if value)
    dom = dump_dom(path, fragment)
    seen = [dict(re.findall(r'data-([a-z-]+)="([^"]*)"', row)) for row in re.findall(r"<tr (data-[^>]*)>", dom)]
    names = {"kind": "kind", "bytes": "bytes", "most-context": "mostContext", "most-batch": "mostBatch"}
    seen = [{names[key]: value for key, value in row.items()} for row in seen]
    assert seen == expected_rows(ladon, fields), f"the page shows {seen}"
    return 1


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ladon", required=True)
    parser.add_argument("page", type=pathlib.Path)
    arguments = parser.parse_args()
    if shutil.which("chromium") is None:
        print("skipped: no Chromium here, in which the calculator is tested")
        return 77
    check = check_markdown if arguments.page.suffix == ".md" else check_page
    print(f"{check(arguments.ladon, arguments.page)} plans in the calculator are those of ladon plan")
    return 0


if __name__ == "__main__":
    sys.exit(main())
