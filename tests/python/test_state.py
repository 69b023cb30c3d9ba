"""Layers and caches as values: pickles, copies, state dicts; errors as OSErrors; what objects print."""

import copy
import errno
import pickle
import subprocess
import sys

import numpy as np
import pytest

import ladon


def layers():
    yield ladon.MultiHeadAttention(embed_dim=16, num_heads=4, num_kv_heads=2, causal=True, rope={},
                                   qk_norm=True, sinks=True, query_bias=True, seed=3)
    yield ladon.MultiHeadAttention(embed_dim=16, num_heads=4, dtype="f64", seed=4,
                                   rope={"scaling": {"kind": "longrope", "factor": 4.0,
                                                     "original_context": 64.0,
                                                     "short_factors": [1.0, 1.5],
                                                     "long_factors": [2.0, 3.0]}})
    yield ladon.LatentAttention(embed_dim=16, num_heads=2, kv_rank=8, nope_dim=6, rope_dim=4, seed=5)


@pytest.mark.parametrize("layer", list(layers()), ids=lambda layer: f"{layer.embed_dim} {layer.dtype}")
def test_layers_pickle_and_deep_copy(layer):
    x = np.random.default_rng(1).normal(size=(2, 5, 16)).astype({"f64": "f8"}.get(layer.dtype, "f4"))
    layer.eval()
    for again in (pickle.loads(pickle.dumps(layer)), copy.deepcopy(layer), copy.copy(layer)):
        assert type(again) is type(layer)
        assert again.options == layer.options
        assert not again.training
        np.testing.assert_array_equal(again(x), layer(x))
        name = next(iter(again.parameters()))
        again.parameters()[name][...] = 0  # a separate layer
        assert np.any(layer.parameters()[name] != 0)


class Derived(ladon.MultiHeadAttention):
    """A user's layer, with another constructor and an attribute."""

    def __init__(self, width):
        super().__init__(embed_dim=width, num_heads=2, seed=6)
        self.notes = ["mine"]


def test_derived_layers_keep_their_class_and_attributes():
    layer = Derived(8)
    x = np.random.default_rng(1).normal(size=(1, 3, 8)).astype("f4")
    for again in (pickle.loads(pickle.dumps(layer)), copy.deepcopy(layer)):
        assert type(again) is Derived and again.notes == ["mine"] and again.notes is not layer.notes
        np.testing.assert_array_equal(again(x), layer(x))


def filled(cache):
    rng = np.random.default_rng(2)
    cache.append(rng.normal(size=(2, 9, 2, 4)).astype("f4"), rng.normal(size=(2, 9, 2, 4)).astype("f4"))
    return cache


OPTIONS = dict(num_kv_heads=2, head_dim=4, batch=2)


@pytest.mark.parametrize("make", [
    lambda: ladon.KvCache.contiguous(**OPTIONS),
    lambda: ladon.KvCache.contiguous(**OPTIONS, capacity=32),
    lambda: ladon.KvCache.window(**OPTIONS, window_left=4, spare=2),
], ids=["contiguous", "capacity", "window"])
def test_caches_pickle_and_deep_copy(make):
    cache = filled(make())
    q = np.random.default_rng(3).normal(size=(2, 1, 4, 4)).astype("f4")
    window = {"window_left": 4} if cache.kind == "window" else {}
    expected = cache.attention(q, **window)
    for again in (pickle.loads(pickle.dumps(cache)), copy.deepcopy(cache)):
        assert (again.kind, again.options, again.spare, again.capacity) == (
            cache.kind, cache.options, cache.spare, cache.capacity)
        assert again.length(1) == 9
        np.testing.assert_array_equal(again.attention(q, **window), expected)
        again.reset()
        assert cache.length(1) == 9


def test_a_paged_cache_copies_and_says_why_it_does_not_pickle():
    pool = ladon.PagePool(**OPTIONS, page_size=4, num_pages=16)
    cache = filled(ladon.KvCache.paged(pool, 2))
    assert copy.deepcopy(cache).length(0) == 9
    with pytest.raises(TypeError, match="its pages belong to a PagePool"):
        pickle.dumps(cache)


def test_state_dicts():
    layer = next(layers())
    state = layer.state_dict()
    assert list(state) == list(layer.parameters())
    assert np.shares_memory(state["q_proj.weight"], layer.parameters()["q_proj.weight"])
    other = ladon.MultiHeadAttention(**layer.options, seed=9)
    other.load_state_dict(state)
    for name, value in other.state_dict().items():
        np.testing.assert_array_equal(value, state[name])
    with pytest.raises(ladon.InvalidArgumentError, match=r"missing \['sinks'\], unexpected \['more'\]"):
        other.load_state_dict({**{n: v for n, v in state.items() if n != "sinks"}, "more": state["sinks"]})
    before = {name: np.array(value) for name, value in other.state_dict().items()}
    with pytest.raises(ladon.InvalidArgumentError, match=r"k_proj.weight: got shape \(1, 2\), expected \(8, 16\)"):
        other.load_state_dict({"q_proj.weight": np.zeros((16, 16)), "k_proj.weight": np.zeros((1, 2))},
                              strict=False)
    for name, value in other.state_dict().items():
        np.testing.assert_array_equal(value, before[name])
    other.load_state_dict({"sinks": np.full(4, 7.0)}, strict=False)
    np.testing.assert_array_equal(other.state_dict()["sinks"], np.full(4, 7.0, "f4"))


def test_file_errors_are_oserrors_with_their_number(tmp_path):
    with pytest.raises(FileNotFoundError) as missing:
        ladon.load_safetensors(tmp_path / "none.safetensors")
    assert isinstance(missing.value, ladon.FileError) and isinstance(missing.value, OSError)
    assert missing.value.errno == errno.ENOENT
    assert "none.safetensors" in str(missing.value) and "[Errno" not in str(missing.value)
    with pytest.raises(ladon.FileError) as full:
        ladon.save_safetensors("/dev/full", {"a": np.zeros(5000)})
    assert full.value.errno == errno.ENOSPC
    with pytest.raises(IsADirectoryError):
        ladon.save_safetensors(tmp_path, {"a": np.zeros(3)})
    with pytest.raises(IsADirectoryError, match="^load_safetensors: "):
        ladon.load_safetensors(tmp_path)
    (tmp_path / "bad.safetensors").write_bytes(b"not one")
    with pytest.raises(ladon.FileError) as bad:
        ladon.load_safetensors(tmp_path / "bad.safetensors")
    assert bad.value.errno is None
    for error in (missing.value, full.value, bad.value):
        again = pickle.loads(pickle.dumps(error))  # as processes hand them on
        assert (type(again), str(again), again.errno) == (type(error), str(error), error.errno)
        assert (type(error).__module__, type(error).__name__) == ("ladon", "FileError")


def test_outputs_follow_links(tmp_path):
    (tmp_path / "link").symlink_to("file")
    ladon.save_safetensors(tmp_path / "link", {"a": np.arange(3.0)})
    assert (tmp_path / "link").is_symlink()
    np.testing.assert_array_equal(ladon.load_safetensors(tmp_path / "file")["a"], np.arange(3.0))


def test_every_object_prints_something_useful():
    layer = next(layers())
    out, saved = layer.forward_training(np.zeros((1, 2, 16), "f4"))
    context = ladon.Context()
    pool = ladon.PagePool(**OPTIONS, page_size=4, num_pages=16)
    objects = [layer, saved, context, pool, ladon.KvCache.paged(pool), ladon.Graph(context),
               ladon.Sgd(layer), ladon.AdamW(layer, learning_rate=0.5)]
    for each in objects:
        text = repr(each)
        assert text.lstrip("<").startswith("ladon.") and " at 0x" not in text, text
    assert "learning_rate 0.5" in repr(objects[-1])
    assert "16 pages of 4 tokens, 16 free" in repr(pool)


def test_no_leak_is_reported_at_exit():
    code = """
import ctypes
import numpy as np
import ladon
context = ladon.Context()
graph = ladon.Graph(context)
layer = ladon.MultiHeadAttention(embed_dim=8, num_heads=2)
optimiser = ladon.Sgd(layer)
def step():
    return graph, layer, optimiser
graph.run(step)
kept = [step, graph]
kept.append(kept)
ctypes.pythonapi.Py_IncRef(ctypes.py_object(graph))  # as another extension that never lets go
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_results_and_gradients_go_where_they_are_wanted():
    layer = next(layers())
    x = np.random.default_rng(4).normal(size=(2, 5, 16)).astype("f4")
    out = np.empty_like(x)
    assert layer(x, out=out) is out
    np.testing.assert_array_equal(out, layer(x))
    with pytest.raises(ValueError):
        layer(x, out=np.empty((2, 5, 3), "f4"))
    rng = np.random.default_rng(5)
    q, k, v, dout = (rng.normal(size=(1, 6, 2, 4)).astype("f4") for _ in range(4))
    bias = rng.normal(size=(6, 6)).astype("f4")
    out, lse = ladon.attention(q, k, v, bias=bias, return_lse=True)
    expected = ladon.attention_backward(q, k, v, out, lse, dout, bias=bias)
    mine = {name: np.empty_like(of) for name, of in [("dq", q), ("dv", v), ("dbias", bias)]}
    got = ladon.attention_backward(q, k, v, out, lse, dout, bias=bias, wanted=["dk"], **mine)
    for name in ("dq", "dk", "dv", "dbias"):
        np.testing.assert_array_equal(getattr(got, name), getattr(expected, name))
        assert name == "dk" or getattr(got, name) is mine[name]
    with pytest.raises(ValueError, match="dbias: got it for an input that is absent"):
        ladon.attention_backward(q, k, v, out, lse, dout, dbias=mine["dbias"])
