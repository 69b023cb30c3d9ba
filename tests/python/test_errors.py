"""Bad arguments: the right exception with the library's message, and nothing is changed."""

import numpy as np
import pytest

import ladon

Q = np.ones((1, 3, 2, 4), np.float32)


def test_hierarchy():
    assert issubclass(ladon.InvalidArgumentError, (ladon.Error, ValueError))
    for child, parent in (
        (ladon.InvalidArgumentError, ValueError),
        (ladon.UnsupportedError, NotImplementedError),
        (ladon.OutOfMemoryError, MemoryError),
        (ladon.FileError, OSError),
    ):
        assert issubclass(child, ladon.Error) and issubclass(child, parent)


WRONG_TYPES = [
    ({"causal": 1}, "attention: causal: got int, expected a bool"),
    ({"scale": "x"}, "attention: scale: got str, expected a number"),
    ({"scale": True}, "attention: scale: got bool, expected a number"),
    ({"window_left": 1.5}, "attention: window_left: got float, expected an integer"),
    ({"kv_lengths": ["a"]}, "attention: kv_lengths: got str, expected an integer"),
    ({"kv_lengths": "3"}, "attention: kv_lengths: got str, expected a sequence"),
    ({"kv_lengths": np.ones(1)}, "attention: kv_lengths: got ndarray, expected a sequence"),
    ({"mask": 3}, "attention: mask: got int, expected an array"),
    ({"sinks": ["a", "b"]}, "attention: sinks: got list, expected an array or a sequence of numbers"),
    ({"alignment": 3}, "attention: alignment: got int, expected a str"),
    ({"context": 3}, "attention: context: got int, expected a ladon.Context"),
    ({"out": []}, "attention: out: got list, expected an array"),
    ({"colour": 3}, "attention: got an unexpected keyword argument 'colour'"),
]

WRONG_VALUES = [
    ({"alignment": "middle"}, "attention: alignment: got 'middle', expected one of 'bottom_right', 'top_left'"),
    ({"scale": float("nan")}, "attention: scale"),
    ({"softcap": -1.0}, "attention: softcap"),
    ({"window_left": 2**70}, "attention: window_left: got an integer that does not fit 64 bits"),
    ({"dropout_seed": -1}, "attention: dropout_seed: got an integer outside"),
    ({"dropout": 1.5}, "attention: dropout"),
    ({"kv_lengths": [1, 2]}, "attention: kv_lengths"),
    ({"mask": np.ones((3, 3), np.float32)}, "attention: mask"),
    ({"mask": np.ones((2, 3), bool)}, "attention: mask"),
    ({"sinks": [1.0]}, "attention: sinks"),
    ({"scale": 10**400}, "attention: scale: got an integer that no double can hold"),
]


@pytest.mark.parametrize("options, message", WRONG_TYPES)
def test_wrong_types(options, message):
    with pytest.raises(TypeError) as caught:
        ladon.attention(Q, Q, Q, **options)
    assert message in str(caught.value)


@pytest.mark.parametrize("options, message", WRONG_VALUES)
def test_wrong_values(options, message):
    with pytest.raises(ladon.InvalidArgumentError) as caught:
        ladon.attention(Q, Q, Q, **options)
    assert message in str(caught.value)


def test_missing_and_surplus_arguments():
    with pytest.raises(TypeError):
        ladon.attention(Q, Q)
    with pytest.raises(TypeError):
        ladon.attention(Q, Q, Q, Q)
    with pytest.raises(TypeError):
        ladon.attention(Q, Q, Q, q=Q)


def test_shapes_are_named():
    with pytest.raises(ladon.InvalidArgumentError, match=r"attention: k: "):
        ladon.attention(Q, Q[..., :3].copy(), Q)
    with pytest.raises(ladon.InvalidArgumentError, match=r"attention: q: "):
        ladon.attention(Q[0], Q, Q)


def test_layers():
    with pytest.raises(ladon.InvalidArgumentError, match="MultiHeadAttention: "):
        ladon.MultiHeadAttention(embed_dim=8, num_heads=3)
    with pytest.raises(TypeError, match="unexpected keyword argument 'heads'"):
        ladon.MultiHeadAttention(embed_dim=8, num_heads=2, heads=3)
    with pytest.raises(TypeError, match="MultiHeadAttention: rope: got bool, expected a dict"):
        ladon.MultiHeadAttention(embed_dim=8, num_heads=2, rope=True)
    with pytest.raises(ladon.InvalidArgumentError, match="layout: got 'x'"):
        ladon.MultiHeadAttention(embed_dim=8, num_heads=2, rope={"layout": "x"})
    with pytest.raises(ladon.InvalidArgumentError, match="dtype: got 'f8'"):
        ladon.MultiHeadAttention(embed_dim=8, num_heads=2, dtype="f8")
    layer = ladon.MultiHeadAttention(embed_dim=8, num_heads=2)
    x = np.zeros((1, 3, 8), np.float32)
    with pytest.raises(TypeError, match="forward: cache: got int"):
        layer(x, cache=3)
    with pytest.raises(ladon.InvalidArgumentError, match="forward: new_lengths: got it without a cache"):
        layer(x, new_lengths=[3])
    with pytest.raises(ladon.InvalidArgumentError, match="expected"):
        layer(x.astype(np.float64))
    with pytest.raises(ladon.Error, match="nothing"):
        layer.set_parameter("nothing", x)
    with pytest.raises(TypeError, match="backward: saved: got NoneType"):
        layer.backward(x, None)
    other = ladon.MultiHeadAttention(embed_dim=8, num_heads=2)
    out, saved = other.forward_training(x)
    with pytest.raises(ladon.InvalidArgumentError, match="saved"):
        layer.backward(out, saved)
    with pytest.raises(ladon.InvalidArgumentError, match="framework: got 'jax'"):
        layer.parameters("jax")


def test_messages_name_keywords():
    with pytest.raises(ladon.InvalidArgumentError, match="^attention: dropout: got 2, "):
        ladon.attention(Q, Q, Q, dropout=2)
    with pytest.raises(ladon.InvalidArgumentError, match="^attention: dropout_first_key: got -1, "):
        ladon.attention(Q, Q, Q, dropout=0.1, dropout_first_key=-1)


def test_messages_name_keywords_of_caches_and_rope():
    options = dict(num_kv_heads=1, head_dim=4)
    with pytest.raises(ladon.InvalidArgumentError, match="^KvCache.contiguous: dtype: got i32, "):
        ladon.KvCache.contiguous(**options, dtype="i32")
    with pytest.raises(ladon.InvalidArgumentError, match="^KvCache.reorder: from_: got 4 "):
        ladon.KvCache.contiguous(**options).reorder([4])
    with pytest.raises(ladon.InvalidArgumentError, match="^rope: sin: got none, "):
        ladon.rope(Q, cos=np.ones((3, 2), np.float32))


def test_objects_that_were_never_made():
    for kind in (ladon.KvCache, ladon.SavedForward):
        with pytest.raises(TypeError):
            kind()
    with pytest.raises(TypeError, match=r"^KvCache: use KvCache.contiguous\(\), "):
        ladon.KvCache(num_kv_heads=2, head_dim=8)
    for kind in (ladon.MultiHeadAttention, ladon.Context, ladon.PagePool):
        empty = kind.__new__(kind)
        with pytest.raises((TypeError, RuntimeError)):
            ladon.attention(Q, Q, Q, context=empty)
        with pytest.raises((TypeError, RuntimeError)):
            ladon.attention_tensors(empty, "llama", 0)


def test_operations_have_their_python_names(tmp_path):
    layer = ladon.MultiHeadAttention(embed_dim=8, num_heads=2)
    with pytest.raises(ladon.InvalidArgumentError, match=r"^MultiHeadAttention\.forward: "):
        layer(np.zeros((1, 2, 3), np.float32))
    with pytest.raises(ladon.FileError, match="^save_safetensors: "):
        ladon.save_safetensors(tmp_path / "no" / "folder", {"a": Q})


def test_files(tmp_path):
    with pytest.raises(ladon.FileError, match="config.json"):
        ladon.load_attention(tmp_path, 0)
    (tmp_path / "bad.safetensors").write_bytes(b"\xff" * 40)
    with pytest.raises(ladon.FileError, match="bad.safetensors"):
        ladon.load_safetensors(tmp_path / "bad.safetensors")
    with pytest.raises(TypeError):
        ladon.load_safetensors(3)
    with pytest.raises(ladon.FileError):
        ladon.save_safetensors(tmp_path / "no" / "such" / "folder", {"a": Q})


def test_impossible_sizes():
    with pytest.raises(ladon.Error):
        ladon.KvCache.contiguous(num_kv_heads=2**30, head_dim=2**30, capacity=2**30)
    with pytest.raises(ladon.Error):
        ladon.plan(length=2**62, num_heads=2**62, head_dim=3)
