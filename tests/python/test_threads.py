"""Calls run without the GIL, from many threads at once, and objects survive being shared."""

import sys
import threading

import numpy as np
import pytest

import ladon


def run_threads(*works):
    failures = []

    def guard(work):
        try:
            work()
        except BaseException as failure:  # noqa: BLE001
            failures.append(failure)

    threads = [threading.Thread(target=guard, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def call_lets_others_run(call):
    """Whether this thread runs while another is inside the call."""
    started, finished = threading.Event(), threading.Event()

    def work():
        started.set()
        call()
        finished.set()

    before = sys.getswitchinterval()
    sys.setswitchinterval(1000)  # no thread is interrupted: who has the GIL keeps it until it waits
    try:
        thread = threading.Thread(target=work)
        thread.start()
        started.wait()
        inside = not finished.is_set()
        thread.join()
    finally:
        sys.setswitchinterval(before)
    return inside


def test_other_threads_go_on(random):
    q = random(1, 1024, 8, 64)
    layer = ladon.MultiHeadAttention(embed_dim=512, num_heads=8)
    x = random(1, 512, 512)
    context = ladon.Context(num_threads=1)
    # A busy machine may not let this thread run in time, so there are several tries.
    for call in (lambda: ladon.attention(q, q, q, context=context), lambda: layer(x, context=context)):
        assert any(call_lets_others_run(call) for _ in range(5)), "the call kept the GIL to itself"
    # The test itself is right: a call that keeps the GIL is found out.
    assert not call_lets_others_run(lambda: sum(range(10**6)))


def test_results_do_not_depend_on_company(random):
    q, k, v = random(2, 64, 8, 32), random(2, 64, 2, 32), random(2, 64, 2, 32)
    alone = ladon.attention(q, k, v, causal=True)
    shared = ladon.Context(num_threads=2)

    def work():
        for _ in range(40):
            assert np.array_equal(ladon.attention(q, k, v, causal=True, context=shared), alone)

    run_threads(work, work, work)


def test_one_layer_many_threads(random):
    layer = ladon.MultiHeadAttention(embed_dim=32, num_heads=4, causal=True)
    x = random(2, 16, 32)
    wanted = layer(x)

    def forward():
        for _ in range(100):
            assert np.array_equal(layer(x), wanted)

    def backward():
        for _ in range(50):
            out, saved = layer.forward_training(x)
            layer.backward(out, saved)
            layer.zero_grad()

    run_threads(forward, forward, backward, backward)
    assert not any(g.any() for g in layer.gradients().values())


def test_one_cache_many_threads(random):
    layer = ladon.MultiHeadAttention(embed_dim=32, num_heads=4, num_kv_heads=2, causal=True)
    cache = ladon.KvCache.contiguous(**layer.cache_options(1))
    x = random(1, 1, 32)

    def append():
        for _ in range(200):
            layer(x, cache=cache)

    def look():
        q = random(1, 1, 4, 8)
        for _ in range(200):
            cache.fork()
            assert cache.bytes_used >= 0 and 0 <= cache.length() <= 400
            try:
                cache.attention(q)
            except ladon.Error:
                pass  # it was still empty
            assert "KvCache" in repr(cache)

    run_threads(append, append, look)
    assert cache.length() == 400


def test_pool_of_many_threads(random):
    pool = ladon.PagePool(num_kv_heads=2, head_dim=8, page_size=4, num_pages=64)
    k = random(1, 3, 2, 8)

    def work():
        for _ in range(60):
            cache = ladon.KvCache.paged(pool)
            for _ in range(4):
                cache.append(k, k)
            cache.fork().append(k, k)

    run_threads(work, work)
    assert pool.statistics()["used_pages"] == 0


def test_layers_and_optimisers_together(random):
    layers = [ladon.MultiHeadAttention(embed_dim=16, num_heads=2) for _ in range(2)]
    optimisers = [ladon.AdamW(layers), ladon.Sgd(list(reversed(layers)))]
    x = random(1, 4, 16)

    def train(optimiser):
        def work():
            for _ in range(40):
                for layer in layers:
                    out, saved = layer.forward_training(x)
                    try:
                        layer.backward(out, saved)
                    except ladon.InvalidArgumentError as error:
                        # The other thread's step came between the two.
                        assert "before the weights changed" in str(error)
                ladon.clip_gradients(layers, 1.0)
                optimiser.step()

        return work

    run_threads(*[train(optimiser) for optimiser in optimisers])
    assert optimisers[0].steps_taken == 40
    assert all(np.isfinite(p).all() for layer in layers for p in layer.parameters().values())


@pytest.mark.skipif(not hasattr(__import__("os"), "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_forked_children(random):
    import os

    q = random(1, 32, 4, 16)
    wanted = ladon.attention(q, q, q)
    child = os.fork()
    if child == 0:
        os._exit(0 if np.array_equal(ladon.attention(q, q, q), wanted) else 1)
    assert os.waitpid(child, 0)[1] == 0
