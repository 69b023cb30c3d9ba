"""attention() and its kin against plain NumPy, and their options."""

import numpy as np
import pytest

import ladon


def plain(q, k, v, shown=None, bias=0.0, scale=None):
    """Softmax attention in double."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    group = q.shape[2] // k.shape[2]
    k, v = (np.repeat(x, group, axis=2) for x in (k, v))
    scores = np.einsum("bqhd,bkhd->bhqk", q, k) * (scale or q.shape[-1] ** -0.5) + bias
    if shown is not None:
        scores = np.where(shown, scores, -np.inf)
    top = np.max(scores, axis=-1, keepdims=True, initial=-1e300)
    weights = np.exp(scores - top)
    total = weights.sum(-1, keepdims=True)
    with np.errstate(divide="ignore"):
        lse = np.log(total[..., 0]) + top[..., 0]
    weights = weights / np.where(total == 0, 1, total)
    return np.einsum("bhqk,bkhd->bqhd", weights, v), lse, weights


@pytest.fixture
def qkv(random):
    return random(2, 7, 6, 8), random(2, 9, 2, 8), random(2, 9, 2, 5)


def test_plain(qkv):
    out, lse = ladon.attention(*qkv, return_lse=True)
    wanted, wanted_lse, weights = plain(*qkv)
    np.testing.assert_allclose(out, wanted, atol=1e-5)
    np.testing.assert_allclose(lse, wanted_lse, atol=1e-5)
    np.testing.assert_allclose(ladon.attention_weights(*qkv[:2]), weights, atol=1e-5)
    assert out.dtype == lse.dtype == np.float32


@pytest.mark.parametrize("alignment, offset", [("bottom_right", 2), ("top_left", 0)])
def test_causal_and_window(qkv, alignment, offset):
    position = np.arange(7)[:, None] + offset
    key = np.arange(9)
    out = ladon.attention(*qkv, causal=True, alignment=alignment)
    np.testing.assert_allclose(out, plain(*qkv, shown=key <= position)[0], atol=1e-5)
    out = ladon.attention(*qkv, window_left=2, window_right=1, alignment=alignment)
    shown = (key >= position - 2) & (key <= position + 1)
    np.testing.assert_allclose(out, plain(*qkv, shown=shown)[0], atol=1e-5)


@pytest.mark.parametrize("shape", [(7, 9), (6, 7, 9), (2, 1, 1, 9), (1, 6, 7, 1)])
def test_mask_and_bias_broadcast(qkv, random, shape):
    mask = random(*shape) > 0
    out = ladon.attention(*qkv, mask=mask)
    np.testing.assert_allclose(out, plain(*qkv, shown=mask)[0], atol=1e-5)
    bias = random(*shape)
    out = ladon.attention(*qkv, bias=bias)
    np.testing.assert_allclose(out, plain(*qkv, bias=bias)[0], atol=1e-5)


def test_gradient_of_a_broadcast_bias(qkv, random):
    bias = random(7, 9)
    out, lse = ladon.attention(*qkv, bias=bias, return_lse=True)
    whole = np.ascontiguousarray(np.broadcast_to(bias, (2, 6, 7, 9)))
    one = ladon.attention_backward(*qkv, out, lse, out, bias=bias)
    all_ = ladon.attention_backward(*qkv, out, lse, out, bias=whole)
    assert one.dbias.shape == (7, 9) and all_.dbias.shape == (2, 6, 7, 9)
    np.testing.assert_allclose(one.dbias, all_.dbias.sum((0, 1)), atol=1e-4)
    assert one.dsinks is None


def test_wanted_gradients(qkv):
    out, lse = ladon.attention(*qkv, return_lse=True)
    some = ladon.attention_backward(*qkv, out, lse, out, wanted=["dv"])
    assert some.dq is None and some.dk is None and some.dv.shape == qkv[2].shape
    with pytest.raises(ladon.InvalidArgumentError, match="wanted: got 'dx'"):
        ladon.attention_backward(*qkv, out, lse, out, wanted=["dx"])


def test_lengths(qkv):
    shown = np.arange(9)[None, :] < np.array([4, 9])[:, None]
    wanted = plain(*qkv, shown=shown[:, None, None, :])[0]
    for lengths in ([4, 9], (4, 9), np.array([4, 9]), np.array([4, 9], np.int32)):
        np.testing.assert_allclose(ladon.attention(*qkv, kv_lengths=lengths), wanted, atol=1e-5)


def test_packed(random):
    q, k, v = random(1, 8, 2, 4), random(1, 10, 2, 4), random(1, 10, 2, 4)
    out = ladon.attention(q, k, v, query_offsets=[0, 3, 8], kv_offsets=[0, 6, 10], causal=True)
    first = ladon.attention(q[:, :3], k[:, :6], v[:, :6], causal=True)
    second = ladon.attention(q[:, 3:], k[:, 6:], v[:, 6:], causal=True)
    assert np.array_equal(out, np.concatenate([first, second], 1))


def test_rows_that_see_nothing(qkv):
    out, lse = ladon.attention(*qkv, mask=np.zeros((7, 9), bool), return_lse=True)
    assert not out.any() and np.isneginf(lse).all()


def test_slopes_and_sinks(qkv):
    slopes = ladon.alibi_slopes(6)
    distance = np.abs(np.arange(9) - (np.arange(7)[:, None] + 2))
    bias = -np.array(slopes)[:, None, None] * distance
    out = ladon.attention(*qkv, alibi_slopes=slopes)
    np.testing.assert_allclose(out, plain(*qkv, bias=bias)[0], atol=1e-5)
    sinks = [0.5, -1, 2, 0, 1, 3]
    out, lse = ladon.attention(*qkv, sinks=sinks, return_lse=True)
    wanted, wanted_lse, _ = plain(*qkv)
    share = 1 / (1 + np.exp(np.array(sinks)[:, None] - wanted_lse))
    np.testing.assert_allclose(out, wanted * share.transpose(0, 2, 1)[..., None], atol=1e-5)


def test_dropout_is_repeatable(qkv):
    once = ladon.attention(*qkv, dropout=0.5, dropout_seed=3)
    assert np.array_equal(once, ladon.attention(*qkv, dropout=0.5, dropout_seed=3))
    assert not np.array_equal(once, ladon.attention(*qkv, dropout=0.5, dropout_seed=4))
    second = [x[1:] for x in qkv]
    alone = ladon.attention(*second, dropout=0.5, dropout_seed=3, dropout_first_sequence=1)
    assert np.array_equal(once[1:], alone)
    q, k, v = qkv
    rows = ladon.attention(q[:, 2:], k, v, dropout=0.5, dropout_seed=3, dropout_first_query=2)
    np.testing.assert_allclose(rows, once[:, 2:], atol=1e-6)


def test_a_shard_of_the_keys(qkv):
    q, k, v = qkv
    offset = k.shape[1] - q.shape[1]
    parts = [
        ladon.attention(q, k[:, a:b], v[:, a:b], causal=True, position_offset=offset - a, return_lse=True)
        for a, b in [(0, 3), (3, k.shape[1])]
    ]
    merged = ladon.merge_attention([out for out, _ in parts], [lse for _, lse in parts])
    np.testing.assert_allclose(merged, ladon.attention(q, k, v, causal=True), atol=1e-6)


def test_stages(qkv):
    q, k, _ = qkv
    scaled = ladon.attention_weights(q, k, stage="scaled", dtype="f64", softcap=1)
    capped = ladon.attention_weights(q, k, stage="softcapped", dtype=np.float64, softcap=1)
    np.testing.assert_allclose(capped, np.tanh(scaled), atol=1e-6)
    masked = ladon.attention_weights(q, k, stage="masked", causal=True)
    assert np.isneginf(masked[0, 0, 0, 3:]).all()


def test_merge(qkv):
    q, k, v = qkv
    parts = [ladon.attention(q, k[:, a:b], v[:, a:b], return_lse=True) for a, b in ((0, 4), (4, 9))]
    out, lse = ladon.merge_attention([p[0] for p in parts], [p[1] for p in parts], return_lse=True)
    wanted, wanted_lse, _ = plain(*qkv)
    np.testing.assert_allclose(out, wanted, atol=1e-5)
    np.testing.assert_allclose(lse, wanted_lse, atol=1e-5)


def test_rope(random):
    x = random(2, 5, 3, 8)
    positions = np.array([[0, 1, 2, 3, 4], [7, 7, 2, 1, 0]])
    rotated = ladon.rope(x, positions=positions)
    angles = positions[..., None] * 10000.0 ** (-np.arange(4) / 4)
    cos, sin = (f(angles)[:, :, None, :] for f in (np.cos, np.sin))
    a, b = x[..., :4], x[..., 4:]
    np.testing.assert_allclose(rotated, np.concatenate([a * cos - b * sin, a * sin + b * cos], -1), atol=1e-5)
    np.testing.assert_allclose(ladon.rope_backward(rotated, positions=positions), x, atol=1e-5)
    table = ladon.make_rope_table(10, 8)
    by_table = ladon.rope(x, cos=table[0], sin=table[1], positions=positions)
    np.testing.assert_allclose(by_table, rotated, atol=1e-6)
    frequencies = 10000.0 ** (-np.arange(4) / 4)
    assert np.array_equal(ladon.rope(x, frequencies=frequencies, positions=positions), rotated)
    doubled = ladon.rope(x, frequencies=list(frequencies), magnitude=2, positions=positions)
    np.testing.assert_allclose(doubled, 2 * rotated, atol=1e-5)
    assert np.array_equal(ladon.make_rope_table(10, 8, frequencies=frequencies)[0], table[0])
    with pytest.raises(ladon.InvalidArgumentError, match="frequencies: got 3 of them, expected 4"):
        ladon.rope(x, frequencies=[1.0, 2.0, 3.0])


def test_plan():
    rows = {row["kind"]: row for row in ladon.plan(length=4096, num_layers=32, num_heads=32, head_dim=128, num_kv_heads=8)}
    assert rows["MHA"]["bytes"] == 2 * 4096 * 32 * 32 * 128 * 2
    assert rows["GQA"]["reduction"] == 0.75


def test_contexts():
    names = [row["name"] for row in ladon.list_isas() if row["runnable"]]
    assert "reference" in names
    assert ladon.Context(num_threads=3).num_threads == 3
    q = np.ones((1, 4, 2, 8), np.float32)
    for name in names:
        context = ladon.Context(isa=name, num_threads=1)
        assert context.isa == name and name in repr(context)
        np.testing.assert_allclose(ladon.attention(q, q, q, context=context), q, rtol=1e-6)


def test_masks_and_biases_of_any_rank(random):
    q, k, v = random(2, 3, 4, 8), random(2, 5, 2, 8), random(2, 5, 2, 8)
    mask = np.array([True, False, True, True, False])
    wanted = ladon.attention(q, k, v, mask=mask[None, None, None])
    for given in (mask, mask[None], mask[None, None], mask.astype(np.uint8), mask.astype(np.uint8)[None] * 255):
        assert np.array_equal(ladon.attention(q, k, v, mask=given), wanted)
    bias = random(5)
    out, lse = ladon.attention(q, k, v, bias=bias[None, None, None], return_lse=True)
    assert np.array_equal(ladon.attention(q, k, v, bias=bias), out)
    wide = ladon.attention_backward(q, k, v, out, lse, out, bias=bias[None, None, None]).dbias
    flat = ladon.attention_backward(q, k, v, out, lse, out, bias=bias).dbias
    assert flat.shape == (5,) and np.array_equal(flat, wide.reshape(5))
