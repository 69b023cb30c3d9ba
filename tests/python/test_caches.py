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
