"""Arrays in and out: nothing is copied, everything is kept alive, and what is not an array is refused."""

import array
import gc
import weakref

import numpy as np
import pytest

import ladon
from ladon._ladon import _describe_array


def address(value):
    return value.__array_interface__["data"][0]


@pytest.mark.parametrize("dtype", ["f8", "f4", "f2", "?", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8"])
def test_numpy_arrays_are_read_where_they_lie(dtype):
    values = np.ones((4, 6, 3), dtype)
    names = {"f8": "f64", "f4": "f32", "f2": "f16", "?": "bool"}
    expected = names.get(dtype, f"{dtype[0]}{8 * int(dtype[1]) if dtype[1:] else ''}")
    assert _describe_array(values) == (address(values), expected, (4, 6, 3), (18, 3, 1))
    part = values[1::2, ::-1]
    assert _describe_array(part) == (address(part), expected, (2, 6, 3), (36, -3, 1))


def test_read_only_and_broadcast_arrays_are_read():
    values = np.ones((2, 3), np.float32)
    values.flags.writeable = False
    assert _describe_array(values)[0] == address(values)
    wide = np.broadcast_to(values, (5, 2, 3))
    assert _describe_array(wide)[3] == (0, 3, 1)


def test_bfloat16_of_ml_dtypes():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    values = np.ones((2, 4, 2, 8), ml_dtypes.bfloat16)
    assert _describe_array(values)[:2] == (address(values.view(np.uint16)), "bf16")
    out = ladon.attention(values, values, values)
    assert out.dtype == ml_dtypes.bfloat16
    again = np.empty_like(out)
    assert ladon.attention(values, values, values, out=again) is again
    assert again.tobytes() == out.tobytes()


def test_buffer_protocol():
    values = array.array("f", range(6))
    view = memoryview(values)
    described = _describe_array(view)
    assert described[1:] == ("f32", (6,), (1,)) and described[0] == values.buffer_info()[0]
    assert _describe_array(values)[0] == values.buffer_info()[0]


def test_dlpack_objects_and_capsules():
    values = np.ones((3, 2), np.float32)

    class Foreign:
        def __dlpack__(self, **kwargs):
            return values.__dlpack__(**kwargs)

        def __dlpack_device__(self):
            return values.__dlpack_device__()

    assert _describe_array(Foreign())[0] == address(values)
    assert _describe_array(values.__dlpack__())[0] == address(values)


def test_results_own_their_memory(random):
    q = random(1, 3, 2, 4)
    out = ladon.attention(q, q, q)
    assert out.flags.writeable and out.flags.c_contiguous and address(out) % 64 == 0
    kept = out.copy()
    view = out[0]
    del out
    gc.collect()
    for _ in range(20):
        ladon.attention(q + 1, q, q)
    assert np.array_equal(view, kept[0])


def test_out_is_written_in_place(random):
    q = random(2, 3, 4, 8)
    big = np.full((2, 3, 4, 16), np.nan, np.float32)
    part = big[..., :8]
    assert ladon.attention(q, q, q, out=part) is part
    assert np.array_equal(part, ladon.attention(q, q, q))
    assert np.isnan(big[..., 8:]).all()
    rotated = q.copy()
    assert ladon.rope(rotated, out=rotated) is rotated
    assert np.array_equal(rotated, ladon.rope(q))


def test_out_that_cannot_be_written(random):
    q = random(1, 3, 2, 4)
    out = np.zeros_like(q)
    out.flags.writeable = False
    with pytest.raises(ladon.InvalidArgumentError, match="attention: out: got a read-only array"):
        ladon.attention(q, q, q, out=out)
    with pytest.raises(ladon.InvalidArgumentError, match="attention: out"):
        ladon.attention(q, q, q, out=q)
    with pytest.raises(ladon.InvalidArgumentError, match="attention: out"):
        ladon.attention(q, q, q, out=np.zeros((1, 3, 2, 5), np.float32))


def test_transposed_views(random):
    heads_first = random(2, 4, 5, 8)
    q = heads_first.transpose(0, 2, 1, 3)
    assert np.array_equal(ladon.attention(q, q, q), ladon.attention(*[np.ascontiguousarray(q)] * 3))


def test_parameters_share_memory_and_keep_the_layer():
    layer = ladon.MultiHeadAttention(embed_dim=8, num_heads=2)
    first, second = layer.parameters(), layer.parameters()
    weight = first["q_proj.weight"]
    assert address(weight) == address(second["q_proj.weight"])
    x = np.ones((1, 2, 8), np.float32)
    before = layer(x)
    for value in first.values():
        value *= 2
    assert np.allclose(layer(x), 4 * before, rtol=1e-5)
    gone = weakref.ref(weight)
    expected = weight.copy()
    del layer, first, second, value
    gc.collect()
    assert np.array_equal(weight, expected)
    del weight
    assert gone() is None


def test_gradients_share_memory():
    layer = ladon.MultiHeadAttention(embed_dim=8, num_heads=2)
    gradients = layer.gradients()
    assert not any(value.any() for value in gradients.values())
    out, saved = layer.forward_training(np.ones((1, 2, 8), np.float32))
    layer.backward(out, saved)
    assert gradients["out_proj.weight"].any()
    for name, value in layer.gradients().items():
        assert address(value) == address(gradients[name])
    layer.zero_grad()
    assert not any(value.any() for value in gradients.values())


def test_empty_arrays():
    for shape in ((0, 3, 2, 4), (2, 0, 2, 4)):
        q = np.zeros(shape, np.float32)
        assert ladon.attention(q, q, q).shape == shape
    q = np.zeros((2, 3, 2, 4), np.float32)
    none = np.zeros((2, 0, 2, 4), np.float32)
    assert not ladon.attention(q, none, none).any()


@pytest.mark.parametrize(
    "value, message",
    [
        ("text", "got str, expected an array"),
        (None, "got NoneType, expected an array"),
        (3.0, "got float, expected an array"),
        ([[1.0]], "got list, expected an array"),
        (np.float32, "got type, expected an array"),
        (np.zeros(3, complex), "its dtype is complex128"),
        (np.zeros(3, object), "its dtype is object"),
        (np.zeros(3, ">f4"), "byte order"),
        (np.zeros(3, "f4,i4"), "got ndarray, expected an array of floats"),
        (np.array(["a"]), "got ndarray, expected an array of floats"),
    ],
)
def test_what_is_no_array(value, message, random):
    q = random(1, 3, 2, 4)
    with pytest.raises(TypeError, match=f"attention: k: .*{message}"):
        ladon.attention(q, value, q)


def test_arrays_that_no_view_describes(random):
    q = random(1, 3, 2, 4)
    with pytest.raises(ladon.InvalidArgumentError, match="attention: q: got 9 dimensions, expected at most 8"):
        ladon.attention(np.zeros((1,) * 9, np.float32), q, q)
    crooked = np.frombuffer(b"\0" * 97, np.uint8)[1:].view(np.float32).reshape(1, 3, 2, 4)
    with pytest.raises(ladon.InvalidArgumentError, match="attention: q: got memory that is not aligned"):
        ladon.attention(crooked, q, q)
    with pytest.raises(ladon.InvalidArgumentError, match="attention: q: got .*i32"):
        ladon.attention(q.astype(np.int32), q, q)


def test_broken_dlpack(random):
    q = random(1, 3, 2, 4)

    class Broken:
        def __dlpack__(self, **kwargs):
            raise RuntimeError("no")

    with pytest.raises(TypeError, match="attention: v: got Broken"):
        ladon.attention(q, q, Broken())
