#!/usr/bin/env python3
"""Fails on a function of the C++ and CUDA sources with 8 or more parameters: they become a struct, which
calls fill by name.

Usage: check_parameters.py; it looks at the checkout that it is in.
"""

import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
# Not python/src, whose functions have the parameters of the Python functions that they are.
FOLDERS = ("include", "src", "cli", "bench", "examples")
SUFFIXES = {".h", ".inl", ".cpp", ".cu", ".cuh"}
MOST = 7
# Each in these files alone. Public functions whose parameters are those of attention() and a few more, and
# attend(), which is attention() without its checks.
EXEMPT = {
    "append_and_attend": ("include/ladon/spread_cache.h", "src/parallel/spread_attention.cpp"),
    "attend": ("src/attention/attend.h", "src/attention/attention.cpp"),
    "context_parallel_attention": ("include/ladon/context_parallel.h", "src/parallel/context_parallel.cpp"),
    "context_parallel_attention_backward": ("include/ladon/context_parallel.h", "src/parallel/context_parallel.cpp"),
    # Of a kernel for GPUs, which changes only where a GPU can run it.
    "load_one": ("src/cuda/kernels/backward_mma.cuh",),
}

NOT_CODE = re.compile(
    r'//[^\n]*|/\*.*?\*/|R"(?P<mark>\w*)\(.*?\)(?P=mark)"|"(?:\\.|[^"\\\n])*"'
    r"|(?<![0-9a-fA-F])'(?:\\.|[^'\\\n])+'",
    re.DOTALL)
# A type, then a name or a reference to an array; calls have no such arguments. By clang-format's rules
# `A& b` is a declaration and `a & b` is not.
DECLARATION = re.compile(r"[\w>][&*]*(?:\s+const)?\s+\w+(?:\[\w*\])*$|[\w>&*]\s+\([&*]\w+\)(?:\[.*\])*$")
OPERATOR = re.compile(r"\s(?:[-+*/%<>?&|^=]|[<>=!]=|<<|>>|&&|\|\|)\s")


def without_comments(text):
    """The code alone, with its lines."""
    return NOT_CODE.sub(lambda match: '""' + "\n" * match[0].count("\n"), text)


def arguments_at(code, start):
    """What the commas divide from `start`, behind a parenthesis, to the one that closes it."""
    parts, depth, angles, first = [], 0, 0, start
    for i in range(start, len(code)):
        char = code[i]
        if char in "([{":
            depth += 1
        elif char in ")]}":
            if depth == 0:
                parts.append(code[first:i])
                return parts
            depth -= 1
        elif char in "<>":
            # Of templates; an operator has spaces around it.
            if char == "<" and code[i - 1] not in " <":
                angles += 1
            elif char == ">" and code[i - 1] not in "-= " and angles > 0:
                angles -= 1
        elif char == "," and depth == 0 and angles == 0:
            parts.append(code[first:i])
            first = i + 1
    return parts


def is_parameter(part):
    part = " ".join(re.split(r"(?<![=!<>])=(?!=)", part, maxsplit=1)[0].split())
    return bool(DECLARATION.search(part)) and not OPERATOR.search(part)


def long_lists(text):
    """(line, name, count) of every function with too many parameters; a lambda is called `]`."""
    code = without_comments(text)
    for match in re.finditer(r"(\w+|\]|operator\s*\S+)\s*\(", code):
        parts = arguments_at(code, match.end())
        # Some parameters may have no name.
        if len(parts) > MOST and 2 * sum(map(is_parameter, parts)) > len(parts):
            yield code.count("\n", 0, match.start()) + 1, match[1], len(parts)


def check_itself():
    eight = "int a, const B& b, C<D, E> c, F (&d)[2], std::int64_t e = f(1, 2), G* g, H&& h, I i"
    found = [f"void f({eight});", f"  auto f = [&]({eight}) {{}};", f"template <class B>\nT::T({eight}) : a_(a) {{}}"]
    ignored = [
        "void f(int a, C<D, E> b, C<D, E, F, G> c, int d, int e, int f, int g);",
        "f(a, b & c, d * e, {1, 2}, \"x, int y\", g, static_cast<int>(h), i < j, k > l);",
        f"// void f({eight});",
    ]
    wrong = [text for text in found if not list(long_lists(text))]
    wrong += [text for text in ignored if list(long_lists(text))]
    assert not wrong, wrong


def main():
    check_itself()
    files = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*")) if path.suffix in SUFFIXES]
    failures, used = [], set()
    for path in files:
        place = str(path.relative_to(ROOT))
        for line, name, count in long_lists(path.read_text(encoding="utf-8")):
            used.add((name, place))
            if place not in EXEMPT.get(name, ()):
                failures.append(f"error: {place}:{line}: {name} has {count} parameters, at most {MOST} are allowed")
    allowed = {(name, place) for name, places in EXEMPT.items() for place in places}
    failures += [f"error: {place} has no {name}() with more than {MOST} parameters: remove it from EXEMPT"
                 for name, place in sorted(allowed - used)]
    for failure in failures:
        print(failure)
    print(f"{len(files)} files, {len(failures)} errors; at most {MOST} parameters, but for {len(EXEMPT)} functions")
    return 1 if failures or not files else 0


if __name__ == "__main__":
    sys.exit(main())
