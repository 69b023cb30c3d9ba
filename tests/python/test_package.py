"""The package itself: its names, stubs and documentation."""

import ast
import importlib.util
import json
import pathlib
import re
import subprocess
import sys

import pytest

import ladon
import ladon.convert
from conftest import ROOT
from ladon import _ladon

PACKAGE = pathlib.Path(ladon.__file__).parent


def stub():
    return ast.parse((PACKAGE / "_ladon.pyi").read_text())


def test_names():
    for name in ladon.__all__:
        assert hasattr(ladon, name), name
    public = {name for name in vars(_ladon) if not name.startswith("_")}
    known = set(ladon.__all__) | set(ladon.convert.__all__)
    assert public <= known, public - known
    assert ladon.__version__ == ladon.version()
    version = re.search(r"project\(ladon VERSION ([0-9.]+)", (ROOT / "CMakeLists.txt").read_text())
    assert ladon.__version__ == version.group(1)


def test_everything_is_documented():
    for name in ladon.__all__:
        assert getattr(ladon, name).__doc__, name
    for name in ladon.convert.__all__:
        assert getattr(ladon.convert, name).__doc__, name
    for kind in (ladon.AttentionLayer, ladon.KvCache, ladon.MultiHeadAttention, ladon.LatentAttention):
        for name, member in vars(kind).items():
            if callable(member) and not name.startswith("_"):
                assert member.__doc__, f"{kind.__name__}.{name}"


def test_stubs_name_everything():
    assert (PACKAGE / "py.typed").exists()
    names = {node.name for node in stub().body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    assert {name for name in vars(_ladon) if not name.startswith("_")} <= names


def test_stub_types_exist():
    """Every name in an annotation is imported, defined or built in."""
    tree = stub()
    known = set(dir(__builtins__)) | set(__builtins__ if isinstance(__builtins__, dict) else ())
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            known.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            known.update((alias.asname or alias.name).split(".")[0] for alias in node.names)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            annotations = [argument.annotation for argument in node.args.args + node.args.kwonlyargs]
            for annotation in filter(None, annotations + [node.returns]):
                for part in ast.walk(annotation):
                    if isinstance(part, ast.Name):
                        assert part.id in known, f"{node.name}: {part.id}"


def test_keywords_in_stubs_are_taken():
    """Each keyword of a signature is one that the function knows."""
    for node in stub().body:
        if not isinstance(node, ast.FunctionDef) or not node.args.kwonlyargs:
            continue
        function = getattr(_ladon, node.name)
        required = [object() for _ in node.args.args]
        if node.name in ("describe_model", "load_attention", "load_torch_attention"):
            required[0] = "/nowhere"
        for argument in node.args.kwonlyargs:
            with pytest.raises(Exception) as caught:
                function(*required, **{argument.arg: object()})
            assert "unexpected keyword" not in str(caught.value), f"{node.name}: {argument.arg}"


@pytest.mark.parametrize("name", ["torch", "onnx"])
def test_absent_packages_are_named(name):
    code = f"import sys; sys.modules[{name!r}] = None; import ladon; import ladon.{name}"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 1
    assert f"pip install {name}" in run.stderr.splitlines()[-1]


def python_blocks(path):
    if path.suffix == ".ipynb":
        cells = json.loads(path.read_text())["cells"]
        return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    return re.findall(r"^```python\n(.*?)^```", path.read_text(), flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("path", ["README.md", "docs/python.md", "docs/porting.md", "examples/tour.ipynb"])
def test_examples_run(path, tmp_path, monkeypatch):
    """The examples of a page, one after the other, as a reader would type them."""
    monkeypatch.chdir(tmp_path)
    blocks = python_blocks(ROOT / path)
    assert blocks
    names = {"__name__": "example"}
    absent = [name for name in ("torch", "ml_dtypes") if importlib.util.find_spec(name) is None]
    left_out = [block for block in blocks if any(name in block for name in absent)]
    for block in blocks:
        if block not in left_out:
            exec(compile(block, path, "exec"), names)
    if left_out:
        pytest.skip(f"{len(left_out)} of {len(blocks)} examples in {path} need {' and '.join(absent)}")
