"""The package itself: its names, stubs and documentation."""

import ast
import importlib
import importlib.util
import inspect
import json
import os
import pathlib
import pickle
import re
import subprocess
import sys
import typing

import numpy as np
import pytest

import ladon
import ladon.convert
import ladon.distributed
from conftest import ROOT
from ladon import _ladon, _types

PACKAGE = pathlib.Path(ladon.__file__).parent


def stub():
    return ast.parse((PACKAGE / "_ladon.pyi").read_text())


def test_names():
    for name in ladon.__all__:
        assert hasattr(ladon, name), name
    public = {name for name in vars(_ladon) if not name.startswith("_")}
    known = set(ladon.__all__) | set(ladon.convert.__all__) | set(ladon.distributed.__all__)
    assert public <= known, public - known
    assert ladon.__version__ == ladon.version()
    version = re.search(r"project\(ladon VERSION ([0-9.]+)", (ROOT / "CMakeLists.txt").read_text())
    assert ladon.__version__ == version.group(1)


def test_versions_agree():
    assert f"version: {ladon.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert json.loads((ROOT / "packaging/vcpkg/ladon/vcpkg.json").read_text())["version-semver"] == ladon.__version__
    released = re.search(r"^## \[([0-9.]+)\] - [0-9]{4}-[0-9]{2}-[0-9]{2}$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert released.group(1) == ladon.__version__


def test_everything_is_documented():
    for name in ladon.__all__:
        assert getattr(ladon, name).__doc__, name
    for module in (ladon.convert, ladon.distributed):
        for name in module.__all__:
            assert getattr(module, name).__doc__, name
    for kind in (ladon.AttentionLayer, ladon.KvCache, ladon.MultiHeadAttention, ladon.LatentAttention,
                 ladon.distributed.Communicator, ladon.distributed.Engine, ladon.distributed.SpreadKvCache,
                 ladon.distributed.TensorParallelLayer):
        for name, member in vars(kind).items():
            if callable(member) and not name.startswith("_"):
                assert member.__doc__, f"{kind.__name__}.{name}"


def sections(text):
    """The parts of a NumPy-style docstring by their titles."""
    parts = re.split(r"^ *(\w+)\n *-{3,}\n", inspect.cleandoc(text) + "\n", flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2]))


def documented_parameters(text):
    """Names in the section Parameters, and those of a function to which the text refers."""
    named = set(re.findall(r"\w+", " ".join(re.findall(r"^(\w[\w, ]*?)(?: :.*)?$", sections(text)["Parameters"], re.M))))
    for other in (ladon.attention, ladon.rope, ladon.AttentionLayer.forward):
        if f"{other.__name__}()" in text:
            named |= set(inspect.signature(other).parameters)
    return named


def callables_of(module):
    for name in module.__all__:
        value = getattr(module, name)
        if isinstance(value, type):
            if issubclass(value, (Exception, dict, tuple)):
                continue
            yield name, value
            yield from ((f"{name}.{member}", function) for member, function in vars(value).items()
                        if not member.startswith("_") and (callable(function) or isinstance(function, staticmethod)))
        elif callable(value):
            yield name, value


@pytest.mark.parametrize("module", ["ladon", "ladon.convert", "ladon.distributed", "ladon.onnx", "ladon.torch"])
def test_docstrings_are_numpys(module):
    """Whatever takes more than one argument has a section that names each, and one of what it returns."""
    if module in ("ladon.onnx", "ladon.torch"):
        pytest.importorskip(module.removeprefix("ladon."))
    seen = 0
    for name, value in callables_of(importlib.import_module(module)):
        value = getattr(value, "__func__", value)
        try:
            signature = inspect.signature(value)
        except ValueError:
            continue  # made by other functions
        names = [n for n, p in signature.parameters.items() if n not in ("self", "cls") and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        if len([n for n in names if n != "context"]) < 2:
            continue
        seen += 1
        text = value.__doc__ or ""
        assert "Parameters" in sections(text), f"{name}: {text}"
        missing = set(names) - documented_parameters(text)
        assert not missing, f"{name}: {missing}"
        nothing = isinstance(value, type) or signature.return_annotation in (inspect.Signature.empty, None, "None")
        assert nothing or "Returns" in sections(text), name
    assert seen > 2


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
        if node.name == "load_tensor_parallel_attention":
            required[1] = "/nowhere"
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


def test_the_description_of_the_wheel_stands_alone():
    """A package index shows it without the files of the sources: links must be whole addresses."""
    readme = re.search(r'^readme = "(.*?)"', (ROOT / "pyproject.toml").read_text(), flags=re.MULTILINE)[1]
    text = (ROOT / readme).read_text()
    links = re.findall(r"\]\(([^)]*)\)", text) + re.findall(r"^\[.*?\]:\s*(\S+)", text, flags=re.MULTILINE)
    assert [link for link in links if not link.startswith(("https://", "#"))] == []


def test_the_wheel_names_the_repository_that_builds_it():
    settings = (ROOT / "pyproject.toml").read_text()
    provider = re.search(r'^provider = "(\w+)"\nprovider-path = "(.*?)"', settings, flags=re.MULTILINE)
    path = ROOT / provider[2] / f"{provider[1]}.py"
    specification = importlib.util.spec_from_file_location(provider[1], path)
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)

    assert module.project_urls({}) == {}
    assert module.project_urls({"GITHUB_SERVER_URL": "https://example.org"}) == {}
    urls = module.project_urls({"GITHUB_SERVER_URL": "https://example.org", "GITHUB_REPOSITORY": "a/b", "GITHUB_SHA": "c0ffee"})
    assert urls["Homepage"] == "https://example.org/a/b"
    files = [url.removeprefix("https://example.org/a/b/blob/c0ffee/") for url in urls.values() if "/blob/" in url]
    assert len(files) == 2 and all((ROOT / name).is_file() for name in files)
    with pytest.raises(RuntimeError, match="'readme'"):
        module.dynamic_metadata("readme", {})


def python_blocks(path):
    if path.suffix == ".ipynb":
        cells = json.loads(path.read_text())["cells"]
        return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    return re.findall(r"^```python\n(.*?)^```", path.read_text(), flags=re.MULTILINE | re.DOTALL)


EXAMPLES = ["README.md", "python/README.md", "docs/python.md", "docs/porting.md", "examples/tour.ipynb"]


def examples_in(path):
    """The examples of a page that can run here, and the packages that others lack."""
    blocks = python_blocks(ROOT / path)
    assert blocks
    absent = [name for name in ("torch", "ml_dtypes") if importlib.util.find_spec(name) is None]
    kept = [block for block in blocks if not any(name in block for name in absent)]
    return kept, absent if len(kept) < len(blocks) else []


@pytest.mark.parametrize("path", EXAMPLES)
def test_examples_run(path, tmp_path, monkeypatch):
    """The examples of a page, one after the other, as a reader would type them."""
    monkeypatch.chdir(tmp_path)
    blocks, absent = examples_in(path)
    names = {"__name__": "example"}
    for block in blocks:
        exec(compile(block, path, "exec"), names)
    if absent:
        pytest.skip(f"some examples in {path} need {' and '.join(absent)}")


def test_examples_pass_mypy(tmp_path):
    """The stubs say what the examples do: all of them by mypy --strict."""
    pytest.importorskip("mypy")
    files = []
    for path in EXAMPLES:
        files.append(tmp_path / (re.sub(r"\W", "_", path.lower()) + "_examples.py"))
        files[-1].write_text("\n".join(examples_in(path)[0]))
    wrong = tmp_path / "wrong_examples.py"
    wrong.write_text("import ladon\nladon.Context(isa='sse9')\nladon.attention(1, 2, 3, alignment='left')\n")
    # Later examples use the names of earlier ones for other things.
    command = [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", "--allow-redefinition"]
    command += ["--cache-dir", str(tmp_path / "cache")]
    environment = {**os.environ, "MYPYPATH": str(PACKAGE.parent)}
    run = subprocess.run([*command, *files], capture_output=True, text=True, env=environment, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    run = subprocess.run([*command, wrong], capture_output=True, text=True, env=environment, check=False)
    assert run.stdout.count("error: ") == 2 and "Literal" in run.stdout, run.stdout + run.stderr


@pytest.mark.parametrize(
    "literal, call",
    [
        ("Alignment", lambda x, name: ladon.attention(x, x, x, alignment=name)),
        ("ScoreStage", lambda x, name: ladon.attention_weights(x, x, stage=name)),
        ("RopeLayout", lambda x, name: ladon.rope(x, layout=name)),
        ("RopeScalingKind", lambda x, name: ladon.rope(x, scaling={"kind": name})),
        ("QkNormSpan", lambda x, name: ladon.MultiHeadAttention(embed_dim=8, num_heads=2, qk_norm_span=name)),
        ("LatentForm", lambda x, name: ladon.LatentAttention(
            embed_dim=8, num_heads=2, kv_rank=4, nope_dim=4, rope_dim=2, form=name)),
        ("HeadMerge", lambda x, name: ladon.convert.to_gqa(
            ladon.MultiHeadAttention(embed_dim=8, num_heads=2), 1, merge=name)),
        ("HeadGrouping", lambda x, name: ladon.convert.to_gqa(
            ladon.MultiHeadAttention(embed_dim=8, num_heads=2), 1, grouping=name)),
        ("ContextScheme", lambda x, name: ladon.distributed.plan_context(2, 4, 4, scheme=name)),
        ("RopeChoice", lambda x, name: ladon.convert.to_mla(
            ladon.MultiHeadAttention(embed_dim=8, num_heads=2), choice=name)),
    ],
)
def test_literals_are_what_is_taken(literal, call):
    """The choices in a signature are those that the error of a wrong one lists."""
    x = np.zeros((1, 2, 2, 4), np.float32)
    with pytest.raises(ValueError, match="expected one of") as caught:
        call(x, "nonsense")
    listed = str(caught.value).rsplit("expected one of ", 1)[1]
    assert set(re.findall(r"[a-z0-9_]+", listed)) == set(typing.get_args(getattr(_types, literal)))


def test_isa_literal():
    assert {row["name"] for row in ladon.list_isas()} == set(typing.get_args(_types.IsaName))


def test_signatures_can_be_inspected():
    none = ("version", "list_isas", "list_devices", "model_families", "Engine")
    # Made by functions, or not at all; RopeOptions and RopeScaling are dicts.
    not_called = ("AttentionLayer", "DeviceArray", "KvCache", "SavedForward", "SpreadKvCache", "TensorParallelLayer",
                  "RopeOptions", "RopeScaling")
    for module in (ladon, ladon.convert, ladon.distributed):
        for name in module.__all__:
            value = getattr(module, name)
            if not callable(value) or (isinstance(value, type) and issubclass(value, Exception)):
                continue
            if name not in not_called:
                assert inspect.signature(value).parameters or name in none, name
            if isinstance(value, type) and value.__module__ == "ladon._ladon":
                for part in dir(value):
                    if not part.startswith("_") and callable(getattr(value, part)):
                        inspect.signature(getattr(value, part))
    assert list(inspect.signature(ladon.KvCache.append).parameters) == ["self", "k", "v", "new_lengths"]
    layer = ladon.MultiHeadAttention(embed_dim=8, num_heads=2)
    assert list(inspect.signature(ladon.MultiHeadAttention).parameters)[:2] == ["embed_dim", "num_heads"]
    assert list(inspect.signature(layer).parameters)[:3] == ["x", "key", "value"]
    assert inspect.signature(layer.train).parameters["training"].default is True

    class Derived(ladon.MultiHeadAttention):
        def __init__(self, width):
            super().__init__(embed_dim=width, num_heads=1)

    assert list(inspect.signature(Derived).parameters) == ["width"]
    assert Derived(8).embed_dim == 8
    parameters = inspect.signature(ladon.attention).parameters
    assert list(parameters)[:3] == ["q", "k", "v"]
    assert parameters["causal"].default is False and parameters["causal"].kind is inspect.Parameter.KEYWORD_ONLY
    assert ladon.attention.__doc__.startswith("Attention: ")
    assert pickle.loads(pickle.dumps(ladon.attention)) is ladon.attention
