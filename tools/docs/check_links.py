#!/usr/bin/env python3
"""Finds dead links between documents, without network.

    check_links.py           the Markdown files of the checkout that it is in, and that the C++ blocks of
                             docs/embedding.md are lines of the example that they explain
    check_links.py FOLDER    the HTML pages of a built site
"""

import html.parser
import pathlib
import re
import sys
import urllib.parse

ROOT = pathlib.Path(__file__).resolve().parents[2]


def without_code(text):
    """Markdown without fenced blocks and code spans, in which links are only text."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"`[^`\n]*`", "code", text)


def anchor_of(heading):
    """The anchor that code hosts and MyST give a heading."""
    words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").strip().lower()
    return re.sub(r"[^\w\- ]", "", words).replace(" ", "-")


def anchors_in(path):
    text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    return {anchor_of(heading) for heading in re.findall(r"^#+ +(.*)$", text, flags=re.MULTILINE)}


def dead_links_in_markdown(path):
    for target in re.findall(r"\]\(([^)\s]+)\)", without_code(path.read_text())):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        file = path if not name else (path.parent / name).resolve()
        if not file.exists():
            yield f"{path.relative_to(ROOT)}: {target}: no such file"
        elif anchor and file.suffix == ".md" and anchor not in anchors_in(file):
            yield f"{path.relative_to(ROOT)}: {target}: no such heading"


class Page(html.parser.HTMLParser):
    def __init__(self, path):
        super().__init__()
        self.links, self.ids = set(), set()
        self.feed(path.read_text(errors="replace"))

    def handle_starttag(self, tag, attrs):
        for name, value in attrs:
            if value and name in ("href", "src"):
                self.links.add(value)
            elif value and (name == "id" or (tag == "a" and name == "name")):
                self.ids.add(value)


def dead_links_in_site(folder):
    pages = {path: Page(path) for path in sorted(folder.rglob("*.html"))}
    if not pages:
        yield f"{folder}: no pages"
    for path, page in pages.items():
        for link in sorted(page.links):
            parts = urllib.parse.urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            file = path if not parts.path else (path.parent / urllib.parse.unquote(parts.path)).resolve()
            if not file.exists():
                yield f"{path.relative_to(folder)}: {link}: no such file"
            elif parts.fragment and file in pages and urllib.parse.unquote(parts.fragment) not in pages[file].ids:
                yield f"{path.relative_to(folder)}: {link}: no such anchor"


def strange_lines_in_embedding():
    """Lines of the guide's C++ blocks that the tested example does not have."""
    example = {line.strip() for line in (ROOT / "examples/embedding.cpp").read_text().splitlines()}
    guide = (ROOT / "docs/embedding.md").read_text()
    for block in re.findall(r"^```cpp\n(.*?)^```", guide, flags=re.MULTILINE | re.DOTALL):
        for line in block.splitlines():
            if line.strip() not in example and line.strip() != "...":
                yield f"docs/embedding.md: '{line.strip()}' is not in examples/embedding.cpp"


def main():
    if len(sys.argv) > 1:
        dead = list(dead_links_in_site(pathlib.Path(sys.argv[1]).resolve()))
    else:
        documents = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]
        dead = [fault for path in sorted(documents) for fault in dead_links_in_markdown(path)]
        dead += strange_lines_in_embedding()
    for fault in dead:
        print(fault)
    if not dead:
        print("no dead links")
    return 1 if dead else 0


if __name__ == "__main__":
    sys.exit(main())
