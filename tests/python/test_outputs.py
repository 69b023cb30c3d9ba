"""Calls of layers that write to the caller's arrays: out= of forward, forward_training and backward."""

import importlib.util
import inspect

import numpy as np
import pytest

import ladon
import ladon.distributed


def multi_head(**options):
    return ladon.MultiHeadAttention(embed_dim=24, num_heads=6, num_kv_heads=2, rope={}, seed=1, **options)


def latent(**options):
    return ladon.LatentAttention(embed_dim=24, num_heads=4, kv_rank=10, nope_dim=8, rope_dim=4, seed=1, **options)


@pytest.fixture(params=[multi_head, latent], ids=["multi_head", "latent"])
def make(request):
    return request.param


def with_gaps(shape, dtype=np.float32):
    """An array whose rows and sequences are apart, full of NaN."""
    whole = np.full([size + 2 for size in shape], np.nan, dtype)
    return whole[tuple(slice(1, 1 + size) for size in shape)]


@pytest.mark.parametrize("shape", [(2, 5, 24), (5, 24), (2, 1, 24)])
def test_results_have_the_bits_of_what_is_returned(make, random, shape):
    returning, writing = make(), make()
    x, grad_out = random(*shape), random(*shape)
    expected, expected_saved = returning.forward_training(x)
    for array in (np.empty_like(x), with_gaps(shape)):
        assert writing(x, out=array) is array
        assert np.array_equal(array, returning(x))
    out = with_gaps(shape)
    given, saved = writing.forward_training(x, out=out)
    assert given is out and np.array_equal(out, expected)
    dx, dkey, dvalue = returning.backward(grad_out, expected_saved)
    mine = with_gaps(shape)
    assert [a is b for a, b in zip(writing.backward(grad_out, saved, out=(mine, None, None)), (mine, None, None))]
    assert np.array_equal(mine, dx) and dkey is None and dvalue is None
    for name, gradient in returning.gradients().items():
        assert np.array_equal(writing.gradients()[name], gradient), name
    alone = np.empty_like(x)
    assert writing.backward(grad_out, saved, out=alone)[0] is alone and np.array_equal(alone, dx)
    out, weights = writing(x, out=alone, return_weights=True)
    assert out is alone and weights.shape[-1] == shape[-2]


def test_gradients_that_are_not_given_are_new_arrays(make, random):
    layer = make()
    x, key = random(2, 5, 24), random(2, 7, 24)
    out, saved = layer.forward_training(x, key)
    expected = layer.backward(out, saved)
    dkey = np.empty_like(key)
    got = layer.backward(out, saved, out=(None, dkey, None))
    assert got[1] is dkey and got[2] is None
    for a, b in zip(got[:2], expected[:2]):
        assert np.array_equal(a, b)
    got = layer.backward(out, saved, out=(None, None, None))
    assert np.array_equal(got[1], dkey) and got[1] is not dkey


def test_what_is_refused_changes_nothing(make, random):
    layer = make()
    x, key = random(2, 5, 24), random(2, 7, 24)
    out, saved = layer.forward_training(x, key)
    name = type(layer).__name__

    def refused(message, call, *, error=ladon.InvalidArgumentError):
        with pytest.raises(error) as caught:
            call()
        assert str(caught.value) == message
        assert not any(gradient.any() for gradient in layer.gradients().values())

    for array, message in (
        (np.zeros((2, 5, 25), "f4"), "got [2, 5, 25], expected [2, 5, 24]"),
        (np.zeros((2, 5, 24), "f8"), "got dtype f64, expected f32"),
        (np.zeros((10, 24), "f4"), "got [10, 24], expected 3 dimensions"),
        (np.zeros((2, 5, 48), "f4")[..., ::2], "got a last stride of 2, expected 1"),
        (x, "got memory that overlaps x, expected separate memory"),
        (key[:, :5], "got memory that overlaps key, expected separate memory"),
    ):
        before = array.copy()
        refused(f"{name}.forward: out: {message}", lambda array=array: layer(x, key, out=array))
        refused(f"{name}.forward: out: {message}", lambda array=array: layer.forward_training(x, key, out=array))
        assert np.array_equal(array, before)
    dx, dkey = np.zeros_like(x), np.zeros_like(key)
    for gradients, message in (
        ((dkey, None, None), "out[0]: got [2, 7, 24], expected [2, 5, 24]"),
        ((dx, dx, None), "out[1]: got [2, 5, 24], expected [2, 7, 24]"),
        ((dx, dkey, dkey), "out[2]: got [2, 7, 24], expected none because the call had no value"),
        ((dx.astype("f8"), None, None), "out[0]: got dtype f64, expected f32"),
        ((out, None, None), "out[0]: got memory that overlaps grad_out, expected separate memory"),
        ((dkey[:, :5], dkey, None), "out[1]: got memory that overlaps out[0], expected separate memory"),
    ):
        refused(f"{name}.backward: {message}", lambda given=gradients: layer.backward(out, saved, out=given))
        assert not dx.any() and not dkey.any()
    refused("backward: out: got a tuple of 2, expected one of three: the gradients of x, key and value",
            lambda: layer.backward(out, saved, out=(dx, dkey)))
    read_only = np.zeros_like(x)
    read_only.flags.writeable = False
    for call in (lambda: layer.forward_training(x, out=read_only),
                 lambda: layer.backward(out, saved, out=(read_only, None, None))):
        with pytest.raises(ladon.InvalidArgumentError, match=r"out(\[0\])?: got .*read-only"):
            call()
    for wrong in ("out", 3, (dx, "dkey", None), [dx, None, None]):
        with pytest.raises(TypeError, match=r"^backward: out(\[1\])?: got (str|int|list), expected "):
            layer.backward(out, saved, out=wrong)


def test_ranks(random):
    x, grad_out = random(2, 6, 24), random(2, 6, 24)
    (ranks,) = ladon.distributed.make_thread_communicators(1)
    whole = multi_head()
    options = {name: value for name, value in whole.options.items() if name != "seed"}
    layer = ladon.distributed.TensorParallelAttention(ranks, **options)
    layer.set_whole_parameters(whole)
    out, dx = with_gaps(x.shape), with_gaps(x.shape)
    given, saved = layer.forward_training(x, out=out)
    assert given is out and np.array_equal(out, whole(x))
    assert layer.backward(grad_out, saved, out=(dx, None, None))[0] is dx
    assert np.array_equal(dx, layer.backward(grad_out, saved)[0])

    mla = latent()
    plan = ladon.distributed.plan_context(1, 6, 6)
    d = ladon.distributed
    assert d.context_parallel_forward(ranks, mla, x, plan=plan, out=out) is out
    assert np.array_equal(out, mla(x))
    given, saved = d.context_parallel_forward_training(ranks, mla, x, plan=plan, out=out)
    assert given is out and np.array_equal(out, mla(x))
    assert d.context_parallel_backward(ranks, mla, grad_out, saved, out=dx)[0] is dx
    assert np.array_equal(dx, d.context_parallel_backward(ranks, mla, grad_out, saved)[0])
    with pytest.raises(ladon.InvalidArgumentError, match=r"^context_parallel_backward: out\[0\]: got \[6, 24\]"):
        d.context_parallel_backward(ranks, mla, grad_out, saved, out=np.zeros((6, 24), "f4"))
    with pytest.raises(ladon.InvalidArgumentError, match="^context_parallel_forward: x: "):
        d.context_parallel_forward(ranks, mla, x[..., :3], plan=plan)


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
def test_torch_tensors(make, random):
    import torch

    layer = make()
    x = torch.from_numpy(random(2, 5, 24))
    out, dx = torch.empty_like(x), torch.empty_like(x)
    given, saved = layer.forward_training(x, out=out)
    assert given is out and torch.equal(out, layer(x))
    assert layer.backward(x, saved, out=(dx, None, None))[0] is dx
    assert torch.equal(dx, layer.backward(x, saved)[0])


def test_signatures_and_docstrings_say_so():
    for function in (ladon.AttentionLayer.forward, ladon.AttentionLayer.forward_training, ladon.AttentionLayer.backward,
                     ladon.distributed.context_parallel_forward, ladon.distributed.context_parallel_forward_training,
                     ladon.distributed.context_parallel_backward):
        assert "out" in inspect.signature(function).parameters, function
        assert "out" in function.__doc__, function
