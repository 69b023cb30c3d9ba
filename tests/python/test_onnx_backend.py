"""ONNX's own backend runner over every Attention and RotaryEmbedding case that it has."""

import re
import unittest

import numpy as np
import pytest

pytest.importorskip("onnx", reason="the package onnx is not installed")
pytest.importorskip("ml_dtypes", reason="the package ml_dtypes is not installed")

import onnx.backend.test  # noqa: E402

import ladon.onnx  # noqa: E402

_runner = onnx.backend.test.BackendTest(ladon.onnx.LadonBackend, __name__)


def _cases():
    """The names. `_expanded` are the same cases in elementary operators, which are not Ladon's business."""
    names = unittest.defaultTestLoader.getTestCaseNames(_runner.test_cases["OnnxBackendNodeModelTest"])
    wanted = re.compile("test_(attention|rotary_embedding)_?.*_cpu$")
    return [name for name in names if wanted.match(name) and "_expanded" not in name]


# Older versions of ONNX (1.19 for one) exchange the modes 1 and 2 of qk_matmul_output. Ladon follows the newer text.
_mode_1 = onnx.defs.get_schema("Attention", 23).attributes["qk_matmul_output_mode"].description.split("`1`")[1]
_old_modes = "softcap" not in _mode_1.split("`2`")[0]


@pytest.mark.parametrize("name", _cases())
def test_onnx_case(name):
    if _old_modes and re.search("qk_matmul_(bias|softcap)", name):
        pytest.skip(f"onnx {onnx.__version__} numbers qk_matmul_output_mode in the old order")
    case = _runner.test_cases["OnnxBackendNodeModelTest"](name)
    result = unittest.TestResult()
    case.run(result)
    for _, trace in result.failures + result.errors:
        pytest.fail(trace)
    if result.skipped:
        pytest.skip(result.skipped[0][1])


def test_there_are_cases():
    # onnx 1.23 has 101, earlier versions fewer.
    assert len(_cases()) >= 60


def test_other_operators_are_refused():
    node = onnx.helper.make_node("Relu", ["x"], ["y"])
    value = onnx.helper.make_tensor_value_info
    graph = onnx.helper.make_graph(
        [node], "g", [value("x", onnx.TensorProto.FLOAT, [2])], [value("y", onnx.TensorProto.FLOAT, [2])]
    )
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 23)])
    assert not ladon.onnx.is_compatible(model)
    with pytest.raises(ladon.UnsupportedError, match="Relu"):
        ladon.onnx.prepare(model)


def attention_model(outputs=("y",), **attributes):
    node = onnx.helper.make_node("Attention", ["q", "k", "v"], list(outputs), **attributes)
    value = onnx.helper.make_tensor_value_info
    graph = onnx.helper.make_graph(
        [node],
        "g",
        [value(name, onnx.TensorProto.FLOAT, [1, 2, 3, 4]) for name in "qkv"],
        [value(name, onnx.TensorProto.FLOAT, ["a", "b", "c", "d"]) for name in outputs if name],
    )
    return onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 23)])


@pytest.mark.parametrize("mode", [-1, 4])
def test_modes_that_there_are_not(mode, random):
    model = ladon.onnx.prepare(attention_model(("y", "", "", "w"), qk_matmul_output_mode=mode))
    with pytest.raises(ladon.InvalidArgumentError, match=f"qk_matmul_output_mode: got {mode}, expected 0 to 3"):
        model.run([random(1, 2, 3, 4)] * 3)


def test_inputs_that_are_missing_or_unknown(random):
    model = ladon.onnx.prepare(attention_model())
    x = random(1, 2, 3, 4)
    with pytest.raises(ladon.InvalidArgumentError, match="inputs: got no 'v', expected q, k, v"):
        model.run([x, x])
    with pytest.raises(ladon.InvalidArgumentError, match="inputs: got no 'q', expected q, k, v"):
        model.run({"k": x, "v": x})
    with pytest.raises(ladon.InvalidArgumentError, match="inputs: got 'w', expected q, k, v"):
        model.run({"q": x, "k": x, "v": x, "w": x})
    with pytest.raises(ladon.InvalidArgumentError, match="inputs: got 4, expected at most 3"):
        model.run([x] * 4)


def test_random_models_run_or_are_refused(random):
    """Attributes, shapes and inputs at random: results, or a clean exception."""
    generator = np.random.default_rng(7)
    clean = (ladon.Error, TypeError, ValueError, onnx.checker.ValidationError)
    numbers = [-(2**31), -2, -1, 0, 1, 2, 3, 4, 7, 2**31, 2**62]
    names = ["is_causal", "q_num_heads", "kv_num_heads", "qk_matmul_output_mode", "left_window_size", "softcap"]
    ran = 0
    for _ in range(500):
        attributes = {name: int(generator.choice(numbers)) for name in names if generator.random() < 0.3}
        if "softcap" in attributes:
            attributes["softcap"] = float(attributes["softcap"])
        shapes = [tuple(generator.integers(0, 4, size=generator.integers(1, 6))) for _ in range(3)]
        if generator.random() < 0.5:
            shapes = [(1, 2, 3, 4)] * 3
        arrays = [random(*shape) for shape in shapes][: generator.integers(0, 5)]
        try:
            outputs = ("y", "", "", "w") if generator.random() < 0.5 else ("y",)
            ladon.onnx.prepare(attention_model(outputs, **attributes)).run(arrays)
            ran += 1
        except clean:
            pass
    assert ran > 20
