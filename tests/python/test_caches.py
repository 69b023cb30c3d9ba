"""KvCache and PagePool."""

import gc

import numpy as np
import pytest

import ladon

HEADS = {"num_kv_heads": 2, "head_dim": 8}


@pytest.fixture
def kv(random):
    return random(2, 11, 2, 8), random(2, 11, 2, 8)


def paged(batch=2, **options):
    return ladon.KvCache.paged(ladon.PagePool(page_size=4, num_pages=32, **HEADS, **options), batch)


def filled(cache, k, v):
    cache.append(k[:, :6], v[:, :6])
    cache.append(k[:, 6:], v[:, 6:])
    return cache


def test_kinds_agree(kv, random):
    q = random(2, 3, 6, 8)
    wanted = ladon.attention(q, *kv, causal=True)
    contiguous = filled(ladon.KvCache.contiguous(batch=2, **HEADS), *kv)
    # The pool is held by the cache alone.
    pages = filled(paged(), *kv)
    gc.collect()
    for cache, kind in ((contiguous, "contiguous"), (pages, "paged")):
        assert cache.kind == kind and cache.batch == 2 and cache.length(1) == cache.held(1) == 11
        np.testing.assert_allclose(cache.attention(q, causal=True), wanted, atol=1e-6)
    out, lse = contiguous.attention(q, causal=True, return_lse=True)
    given = np.empty_like(out)
    assert pages.attention(q, causal=True, out=given) is given
    assert np.array_equal(given, out) and lse.shape == (2, 6, 3)


def test_window(kv, random):
    q = random(2, 1, 2, 8)
    cache = filled(ladon.KvCache.window(batch=2, window_left=4, spare=1, **HEADS), *kv)
    assert cache.window_left == 4 and cache.length() == 11 and cache.held() <= 6
    wanted = ladon.attention(q, *kv, causal=True, window_left=4)
    np.testing.assert_allclose(cache.attention(q, causal=True, window_left=4), wanted, atol=1e-6)


def test_truncate_reset_reorder_fork(kv, random):
    k, v = kv
    for cache in (ladon.KvCache.contiguous(batch=2, **HEADS), paged()):
        filled(cache, k, v)
        fork = cache.fork()
        cache.truncate(0, 5)
        assert [cache.length(0), cache.length(1)] == [5, 11] and fork.length(0) == 11
        cache.append(k[:, :2], v[:, :2], new_lengths=[2, 1])
        assert [cache.length(0), cache.length(1)] == [7, 12]
        cache.reorder([1, 1, 0])
        assert cache.batch == 3 and [cache.length(b) for b in range(3)] == [12, 12, 7]
        cache.reset(1)
        assert cache.length(1) == 0
        cache.reset()
        assert cache.bytes_used == 0
        q = random(2, 1, 2, 8)
        np.testing.assert_allclose(fork.attention(q), ladon.attention(q, k, v), atol=1e-6)


def test_accounts(kv):
    cache = ladon.KvCache.contiguous(batch=2, num_heads=8, dtype="bf16", **HEADS)
    filled(cache, *kv)
    assert cache.elements_used == 2 * 11 * 2 * 16
    assert cache.bytes_used == 2 * cache.elements_used
    assert cache.mha_bytes == 4 * cache.bytes_used and cache.mha_elements == 4 * cache.elements_used
    assert cache.reduction == 0.75
    assert cache.bytes_reserved >= cache.bytes_used
    assert cache.options["dtype"] == "bf16" and "bf16" in repr(cache)


def test_save_and_load(kv, tmp_path, random):
    cache = filled(ladon.KvCache.contiguous(batch=2, **HEADS), *kv)
    path = tmp_path / "cache.ladon"
    cache.save(path)
    other = paged()
    other.load(str(path))
    q = random(2, 1, 2, 8)
    assert np.array_equal(other.attention(q), cache.attention(q))
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(ladon.FileError, match="load"):
        other.load(path)
    assert np.array_equal(other.attention(q), cache.attention(q))
    with pytest.raises(ladon.Error):
        ladon.KvCache.contiguous(batch=2, num_kv_heads=1, head_dim=8).load(path)


def test_prefixes(kv):
    k, v = kv
    pool = ladon.PagePool(page_size=4, num_pages=32, **HEADS)
    first = ladon.KvCache.paged(pool)
    first.append(k[:1], v[:1])
    first.publish_prefix(0, list(range(11)))
    second = ladon.KvCache.paged(pool)
    assert second.adopt_prefix(0, np.arange(11)) == 8
    assert second.length() == 8
    numbers = pool.statistics()
    assert numbers["shared_pages"] == 2 and numbers["prefix_tokens_found"] == 8
    del first, second
    assert pool.statistics()["kept_pages"] == 2
    pool.forget_prefixes()
    assert pool.statistics()["free_pages"] == 32
    assert pool.page_size == 4 and pool.num_pages == 32 and pool.options["head_dim"] == 8


def test_failures_change_nothing(kv, random):
    k, v = kv
    cache = ladon.KvCache.contiguous(batch=2, capacity=12, **HEADS)
    cache.append(k, v)
    for bad in (
        lambda: cache.append(k, v),
        lambda: cache.append(k[:1], v),
        lambda: cache.append(k, None),
        lambda: cache.append(k.astype(np.int32), v),
        lambda: cache.truncate(0, 12),
        lambda: cache.truncate(2, 1),
        lambda: cache.reorder([0, 5]),
        lambda: cache.length(-1),
        lambda: cache.reset(7),
        lambda: cache.publish_prefix(0, [1]),
        lambda: cache.reserve(-1),
        lambda: cache.attention(random(2, 1, 2, 8), kv_lengths=[1, 1]),
        lambda: cache.attention(random(3, 1, 2, 8)),
    ):
        with pytest.raises(ladon.Error):
            bad()
    for bad in (
        lambda: cache.append("a", v),
        lambda: cache.truncate(0.5, 1),
        lambda: cache.reorder(3),
        lambda: cache.save(3),
        lambda: cache.attention(None),
    ):
        with pytest.raises(TypeError):
            bad()
    assert [cache.length(b) for b in range(2)] == [11, 11]


def test_reading_back(kv):
    k, v = kv
    for cache in (filled(ladon.KvCache.contiguous(batch=2, **HEADS), k, v), filled(paged(), k, v)):
        for sequence in range(2):
            assert np.array_equal(cache.keys(sequence), k[sequence])
            assert np.array_equal(cache.values(sequence), v[sequence])
        assert cache.keys(0, dtype="f64").dtype == np.float64
    window = filled(ladon.KvCache.window(batch=2, window_left=4, **HEADS), k, v)
    assert np.array_equal(window.keys(1), k[1, 11 - window.held(1) :])
    with pytest.raises(ladon.InvalidArgumentError, match="KvCache.values: sequence: got 2"):
        window.values(2)
    with pytest.raises(ladon.InvalidArgumentError, match="KvCache.keys: dtype: got i32"):
        window.keys(0, dtype="i32")


def test_pages_of_an_engine(kv, random):
    k, v = kv
    q = random(2, 2, 6, 8)
    lengths = [11, 7]
    tables = [[5, 0, 3], np.array([1, 4])]
    key_pages, value_pages = random(6, 4, 2, 8), random(6, 4, 2, 8)
    for b, length in enumerate(lengths):
        for token in range(length):
            page = tables[b][token // 4]
            key_pages[page, token % 4] = k[b, token]
            value_pages[page, token % 4] = v[b, token]
    wanted = ladon.attention(q, k, v, causal=True, kv_lengths=lengths)
    out, lse = ladon.paged_attention(q, key_pages, value_pages, tables, lengths, causal=True, return_lse=True)
    np.testing.assert_allclose(out, wanted, atol=1e-6)
    assert lse.shape == (2, 6, 2)
    # Keys and values of one array of pages.
    both = np.stack([key_pages, value_pages], axis=3)
    strided = ladon.paged_attention(q, both[:, :, :, 0], both[:, :, :, 1], tables, lengths, causal=True)
    assert np.array_equal(strided, out)
    # int8 with scales.
    scale = np.abs(key_pages).max(axis=-1) / 127
    quantised = np.round(key_pages / scale[..., None]).astype(np.int8)
    value_scale = np.abs(value_pages).max(axis=-1) / 127
    values = np.round(value_pages / value_scale[..., None]).astype(np.int8)
    small = ladon.paged_attention(
        q, quantised, values, tables, lengths, causal=True, k_scales=scale, v_scales=value_scale
    )
    np.testing.assert_allclose(small, wanted, atol=0.1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"page_tables": [[5, 0, 9], [1, 4]]}, "got page 9"),
        ({"lengths": [11]}, "lengths: got 1 lengths, expected 2"),
        ({"lengths": [11, 9]}, "lengths: got 9 tokens of sequence 1, expected 0 to 8"),
        ({"v": np.zeros((6, 3, 2, 8), np.float32)}, "v: got .6, 3, 2, 8. of f32, expected pages like k's"),
        ({"k": np.zeros((12, 4, 2, 8), np.float32)[::2]}, "k: got pages with a gap behind them"),
        ({"k": np.zeros((6, 8), np.float32)}, "k: got .6, 8., expected .num_pages, page_size"),
        ({"k_scales": np.zeros((6, 4, 2), np.float32)}, "v_scales: expected an f32 array"),
    ],
)
def test_pages_that_do_not_fit(random, change, message):
    arguments = {
        "q": random(2, 1, 6, 8),
        "k": random(6, 4, 2, 8),
        "v": random(6, 4, 2, 8),
        "page_tables": [[5, 0, 3], [1, 4]],
        "lengths": [11, 7],
    }
    with pytest.raises(ladon.InvalidArgumentError, match=message):
        ladon.paged_attention(**{**arguments, **change})


def test_the_account_of_multi_head_attention(random):
    layer = ladon.LatentAttention(
        embed_dim=32, num_heads=4, kv_rank=8, nope_dim=4, rope_dim=4, value_dim=8, causal=True
    )
    by_default = ladon.KvCache.contiguous(**layer.cache_options())
    with_rope = ladon.KvCache.contiguous(**{**layer.cache_options(), "mha_dim": 2 * layer.head_dim})
    for cache in (by_default, with_rope):
        layer(random(10, 32), cache=cache)
    assert (by_default.mha_elements, by_default.reduction) == (480, 0.75)
    assert (with_rope.mha_elements, with_rope.reduction) == (640, 0.8125)
