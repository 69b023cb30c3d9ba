#!/usr/bin/env python3
"""Draws the pictures of docs/attention_kinds.md.

    draw_kinds.py --ladon PROGRAM FOLDER    writes heads.svg, latent.svg and cache.svg there

The bytes in cache.svg are what `ladon plan` prints.
"""

import argparse
import json
import pathlib
import subprocess

INK, QUIET, LINE = "#1f2933", "#52606d", "#9aa5b1"
QUERY, KEY, VALUE, LATENT = "#f4a261", "#457b9d", "#2a9d8f", "#7b5ea7"
FONT = 'font-family="system-ui, -apple-system, Segoe UI, Roboto, DejaVu Sans, sans-serif"'


class Picture:
    def __init__(self, width, height, title):
        self.width, self.height = width, height
        self.parts = [f'<rect width="{width}" height="{height}" rx="10" fill="#ffffff"/>']
        self.title = title

    def box(self, x, y, width, height, color, label="", size=13, ink="#ffffff"):
        self.parts.append(f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="4" fill="{color}"/>')
        if label:
            self.text(x + width / 2, y + height / 2 + size * 0.36, label, size, ink)

    def text(self, x, y, words, size=13, color=INK, anchor="middle", weight="normal"):
        words = words.replace("&", "&amp;").replace("<", "&lt;")
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{color}" text-anchor="{anchor}" '
            f'font-weight="{weight}" {FONT}>{words}</text>'
        )

    def line(self, x1, y1, x2, y2, color=LINE, width=1.5, arrow=False):
        end = ' marker-end="url(#arrow)"' if arrow else ""
        self.parts.append(
            f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="{color}" stroke-width="{width}"{end}/>'
        )

    def frame(self, x, y, width, height, color):
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="8" fill="none" '
            f'stroke="{color}" stroke-width="1.5" stroke-dasharray="5 4"/>'
        )

    def write(self, path):
        marker = (
            f'<defs><marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
            f'orient="auto"><path d="M0 0L8 4L0 8z" fill="{LINE}"/></marker></defs>'
        )
        body = "\n".join(self.parts)
        path.write_text(
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" '
            f'width="{self.width}" height="{self.height}" role="img">\n<title>{self.title}</title>\n{marker}\n{body}\n</svg>\n'
        )


def draw_heads(path):
    """Which query heads read which keys and values."""
    picture = Picture(900, 300, "MHA, GQA and MQA: query heads and the KV heads that they share")
    heads, cell, gap = 8, 24, 8
    panel = 280
    kinds = [("MHA", 8, "a KV head for each query head"), ("GQA", 2, "a KV head for each group"),
             ("MQA", 1, "one KV head for all")]
    for index, (name, kv_heads, words) in enumerate(kinds):
        left = 20 + index * (panel + 10)
        picture.text(left + panel / 2, 32, name, 18, INK, weight="bold")
        picture.text(left + panel / 2, 52, words, 13, QUIET)
        span = heads * cell + (heads - 1) * gap
        start = left + (panel - span) / 2
        group = heads // kv_heads
        for h in range(heads):
            x = start + h * (cell + gap)
            picture.box(x, 76, cell, 30, QUERY, f"q{h}", 11, INK)
        for g in range(kv_heads):
            first = start + g * group * (cell + gap)
            middle = first + (group * (cell + gap) - gap) / 2
            for h in range(g * group, (g + 1) * group):
                picture.line(start + h * (cell + gap) + cell / 2, 108, middle, 168, arrow=True)
            picture.box(middle - cell / 2, 172, cell, 30, KEY, f"k{g}", 11)
            picture.box(middle - cell / 2, 206, cell, 30, VALUE, f"v{g}", 11)
        picture.frame(left + 8, 164, panel - 16, 80, LINE)
        picture.text(left + panel / 2, 268, f"cached: {kv_heads} key{'s' if kv_heads > 1 else ''} and "
                     f"{kv_heads} value{'s' if kv_heads > 1 else ''} per token", 13, QUIET)
    picture.write(path)


def draw_latent(path):
    """What MLA caches, and the two ways to attend over it."""
    picture = Picture(900, 330, "MLA: a cached latent, expanded or absorbed")
    picture.text(230, 24, "Expanded: prefill and training", 16, INK, weight="bold")
    picture.text(230, 44, "keys and values for each head: multi-head", 13, QUIET)
    picture.text(670, 24, "Absorbed: decoding", 16, INK, weight="bold")
    picture.text(670, 44, "every head reads the latent itself: multi-query", 13, QUIET)
    for left in (20, 460):
        picture.frame(left + 60, 240, 300, 52, LINE)
        picture.box(left + 80, 250, 180, 32, LATENT, "latent c (kv_rank)")
        picture.box(left + 270, 250, 70, 32, KEY, "rope key")
        picture.text(left + 210, 314, "cached, once for all heads", 13, QUIET)
    for h in range(4):
        x = 60 + h * 90
        picture.box(x + 12, 58, 56, 28, QUERY, f"q{h}", 12, INK)
        picture.line(x + 40, 88, x + 40, 122, arrow=True)
        picture.box(x + 4, 126, 34, 28, KEY, f"k{h}", 12)
        picture.box(x + 42, 126, 34, 28, VALUE, f"v{h}", 12)
        picture.line(190, 248, x + 40, 160, arrow=True)
    picture.text(330, 222, "times W_uk and W_uv", 12, QUIET, anchor="start")
    for h in range(4):
        x = 500 + h * 90
        picture.box(x + 12, 58, 56, 28, QUERY, f"q{h}", 12, INK)
        picture.line(x + 40, 88, x + 40, 110, arrow=True)
        picture.box(x + 2, 114, 76, 28, QUERY, f"q{h} W_uk", 12, INK)
        picture.line(x + 40, 144, 630, 244, arrow=True)
    picture.write(path)


def draw_cache(path, ladon):
    """Bytes of one token in one layer, at the size of Llama 3 8B."""
    command = [ladon, "plan", "--model", "llama-3-8b", "--dtype", "bf16", "--json"]
    model = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)["models"][0]
    rows = [(row["kind"], row["details"], row["bytes_per_token"] // model["num_layers"]) for row in model["caches"]]
    picture = Picture(900, 60 + 46 * len(rows), "Cache bytes of one token in one layer")
    picture.text(20, 32, f"Cache of one token in one layer: {model['num_heads']} heads of {model['head_dim']}, bf16",
                 15, INK, anchor="start", weight="bold")
    largest = max(size for _, _, size in rows)
    for index, (kind, details, size) in enumerate(rows):
        y = 52 + 46 * index
        color = LATENT if kind == "MLA" else KEY
        picture.text(20, y + 22, kind, 14, INK, anchor="start", weight="bold")
        picture.text(68, y + 22, details or f"{model['num_heads']} KV heads", 12, QUIET, anchor="start")
        width = max(3, 520 * size / largest)
        picture.box(210, y + 4, width, 28, color)
        share = "" if size == largest else f", 1/{largest / size:.3g} of MHA"
        picture.text(210 + width + 10, y + 23, f"{size:,} bytes{share}", 13, INK, anchor="start")
    picture.write(path)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ladon", required=True, help="the command, whose figures are drawn")
    parser.add_argument("folder", type=pathlib.Path)
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    draw_heads(arguments.folder / "heads.svg")
    draw_latent(arguments.folder / "latent.svg")
    draw_cache(arguments.folder / "cache.svg", arguments.ladon)


if __name__ == "__main__":
    main()
