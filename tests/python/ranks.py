"""What tests over ranks do on each rank, whatever carries the messages: threads, mpi4py or torch.distributed.

Run as a program it checks the rank that it is:

    mpirun -n 3 python ranks.py mpi
    python ranks.py torch RANK SIZE FILE
"""

import os
import pathlib
import sys
import tempfile

import numpy as np

import ladon
import ladon.distributed as distributed

MULTI_HEAD = dict(embed_dim=24, num_heads=6, num_kv_heads=6, head_dim=8, causal=True, rope={}, qk_norm=True, sinks=True)
LATENT = dict(embed_dim=24, num_heads=6, kv_rank=10, nope_dim=8, rope_dim=4, query_rank=12, causal=True)


def normal(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def same(a, b):
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()


def context():
    return ladon.Context(num_threads=1)


def check_collectives(ranks):
    size, rank = ranks.size, ranks.rank
    own = np.full((2, 3), rank + 1, np.float32)
    all_ranks = np.stack([np.full((2, 3), other + 1, np.float32) for other in range(size)])
    assert same(ranks.all_gather(own), all_ranks)
    assert same(ranks.all_reduce(own), all_ranks.sum(0))
    table = np.arange(size * size, dtype=np.float64).reshape(size, size)
    assert same(ranks.all_to_all(table[rank].copy()), np.ascontiguousarray(table[:, rank]))
    assert ranks.reduce_scatter(table[rank].copy()) == table[:, rank].sum()
    assert ranks.all_gather(np.zeros((0, 2), np.float32)).shape == (size, 0, 2)
    ranks.barrier()
    part = ranks.split(rank % 2, -rank)  # in reverse
    assert part.size == (size + 1 - rank % 2) // 2
    assert part.all_gather(np.array([rank])).ravel().tolist() == sorted(range(rank % 2, size, 2), reverse=True)


def check_statistics(ranks):
    ranks.reset_statistics()
    ranks.all_gather(normal(0, 5, 7))
    numbers = ranks.statistics()
    assert numbers["bytes_sent"] == numbers["bytes_received"] == (ranks.size - 1) * 5 * 7 * 4
    assert numbers["messages_sent"] == ranks.size - 1
    assert (numbers["control_bytes_sent"] > 0) == (ranks.size > 1)


def check_context_parallel(ranks):
    q, k, v = normal(1, 1, 70, 6, 8), normal(2, 1, 70, 6, 8), normal(3, 1, 70, 6, 4)
    options = dict(causal=True, softcap=9.0, window_left=40, sinks=[0.5] * 6, dropout=0.2, dropout_seed=3)
    whole, lse = ladon.attention(q, k, v, return_lse=True, context=context(), **options)
    dout = normal(4, *whole.shape)
    grads = ladon.attention_backward(q, k, v, whole, lse, dout, context=context(), **options)
    for scheme in ("auto", "all_gather", "ulysses", "ring"):
        plan = distributed.plan_context(ranks.size, 70, 70, scheme=scheme, **options)
        assert len(plan.queries) == ranks.size and plan.scheme == scheme
        own, own_keys = plan.queries[ranks.rank], plan.keys[ranks.rank]
        parts = [distributed.take_tokens(q, own), distributed.take_tokens(k, own_keys), distributed.take_tokens(v, own_keys)]
        out, own_lse = distributed.context_parallel_attention(
            ranks, *parts, plan=plan, return_lse=True, context=context(), **options)
        expected = distributed.take_tokens(whole, own)
        exact = scheme != "ring"
        assert same(out, expected) if exact else np.allclose(out, expected, atol=1e-5)
        own_grads = distributed.context_parallel_attention_backward(
            ranks, *parts, out, own_lse, distributed.take_tokens(dout, own), plan=plan, context=context(), **options)
        expected = distributed.take_tokens(grads.dq, own)
        assert same(own_grads.dq, expected) if exact else np.allclose(own_grads.dq, expected, atol=1e-5)
        assert np.allclose(own_grads.dk, distributed.take_tokens(grads.dk, own_keys), atol=1e-5)
        assert np.allclose(own_grads.dv, distributed.take_tokens(grads.dv, own_keys), atol=1e-5)
        assert np.allclose(own_grads.dsinks, grads.dsinks, atol=1e-5) and own_grads.dbias is None


def check_context_parallel_latent(ranks):
    """A layer over shared tokens: bits of one process forward, and gradients that are the same on all ranks."""
    whole, layer = (ladon.LatentAttention(**LATENT, seed=5) for _ in range(2))
    x, grad_out = normal(14, 2, 40, 24), normal(15, 2, 40, 24)
    expected, saved = whole.forward_training(x, context=context())
    expected_dx, _, _ = whole.backward(grad_out, saved, context=context())
    plan = distributed.plan_context(ranks.size, 40, 40, causal=True)
    own = plan.queries[ranks.rank]
    ranks.reset_statistics()
    out = distributed.context_parallel_forward(ranks, layer, distributed.take_tokens(x, own), plan=plan, context=context())
    assert same(out, distributed.take_tokens(expected, own))
    # Each of the 10 + 4 elements of a latent goes at most once to every other rank.
    sent = ranks.statistics()["bytes_sent"]
    assert (sent > 0) == (ranks.size > 1) and sent <= 2 * len(out[0]) * 14 * 4 * (ranks.size - 1)
    out, saved = distributed.context_parallel_forward_training(
        ranks, layer, distributed.take_tokens(x, own), plan=plan, context=context())
    assert same(out, distributed.take_tokens(expected, own))
    dx, dkey, dvalue = distributed.context_parallel_backward(
        ranks, layer, distributed.take_tokens(grad_out, own), saved, context=context())
    assert np.allclose(dx, distributed.take_tokens(expected_dx, own), atol=1e-5) and dkey is None and dvalue is None
    for name, gradient in layer.gradients().items():
        assert np.allclose(gradient, whole.gradients()[name], atol=1e-4), name
        assert all(same(gradient, other) for other in ranks.all_gather(gradient)), name


def layers_over(ranks):
    for whole_class, class_over_ranks, options in (
            (ladon.MultiHeadAttention, distributed.TensorParallelAttention, MULTI_HEAD),
            (ladon.LatentAttention, distributed.TensorParallelLatentAttention, LATENT)):
        whole = whole_class(**options, seed=5)
        layer = class_over_ranks(ranks, **options)
        layer.set_whole_parameters(whole)
        yield whole, layer


def check_layers(ranks):
    x = normal(6, 2, 9, 24)
    for whole, layer in layers_over(ranks):
        expected = whole(x, context=context())
        assert same(layer(x, context=context()), expected)
        caches = [ladon.KvCache.contiguous(**one.cache_options(batch=2)) for one in (whole, layer)]
        for first, last in ((0, 5), (5, 6), (6, 9)):
            outs = [one(x[:, first:last], cache=cache, context=context()) for one, cache in zip((whole, layer), caches)]
            assert same(*outs)
        name = "out_proj.weight" if "out_proj.weight" in layer.parameters() else "o_proj.weight"
        begin, end = layer.slice_of(name)
        assert same(layer.parameters()[name], np.ascontiguousarray(whole.parameters()[name][begin:end]))
        assert same(layer.whole_parameter(name), np.ascontiguousarray(whole.parameters()[name]))
        layer.set_whole_parameter(name, 2 * whole.parameters()[name])
        assert same(layer(x, context=context()), 2 * expected)
        assert layer.options == whole.options
        assert layer.communicator.size == ranks.size


def check_training(ranks, folder):
    """Steps as in one process within rounding, and the same after a break."""
    x, target = normal(7, 2, 9, 24), normal(8, 2, 9, 24)

    def step(layer, optimiser):
        out, saved = layer.forward_training(x, context=context())
        layer.zero_grad()
        layer.backward(2 * (out - target) / out.size, saved, context=context())
        shared = isinstance(layer, distributed.TensorParallelLayer)
        layer.clip_gradients(0.5) if shared else ladon.clip_gradients(layer, 0.5)
        optimiser.step()
        return float(np.mean((out - target) ** 2))

    for whole, layer in layers_over(ranks):
        alone, together = ladon.AdamW(whole, learning_rate=0.01), ladon.AdamW(layer, learning_rate=0.01)
        losses = [(step(whole, alone), step(layer, together)) for _ in range(10)]
        assert all(abs(a - b) < 1e-4 * a for a, b in losses), losses
        assert losses[-1][1] < losses[0][1]
        path = pathlib.Path(folder, type(layer).__name__ + ".safetensors")
        distributed.save_training(path, layer, together)
        going_on = [step(layer, together) for _ in range(3)]
        again = type(layer)(ranks, **layer.options)
        optimiser = ladon.AdamW(again, learning_rate=0.01)
        distributed.load_training(path, again, optimiser)
        assert optimiser.steps_taken == 10
        assert [step(again, optimiser) for _ in range(3)] == going_on
        for name, value in layer.parameters().items():
            assert same(again.parameters()[name], value), name


def check_spread_cache(ranks):
    q, k, v = normal(9, 2, 1, 4, 8), normal(10, 2, 1300, 2, 8), normal(11, 2, 1300, 2, 8)
    new_k, new_v = normal(12, 2, 1, 2, 8), normal(13, 2, 1, 2, 8)
    cache = ladon.KvCache.contiguous(num_kv_heads=2, head_dim=8, batch=2)
    cache.append(np.concatenate([k, new_k], 1), np.concatenate([v, new_v], 1))
    expected, expected_lse = cache.attention(q, causal=True, return_lse=True, context=context())
    pool = ladon.PagePool(num_kv_heads=2, head_dim=8, page_size=32, num_pages=100)
    for spread in (distributed.SpreadKvCache.contiguous(ranks, num_kv_heads=2, head_dim=8, batch=2),
                   distributed.SpreadKvCache.paged(ranks, pool, batch=2)):
        spread.append(k, v)
        assert spread.length() == 1300 and spread.batch == 2
        assert sum(ranks.all_gather(np.array([spread.local_length(1)])).ravel()) == 1300
        out = spread.append_and_attend(q, new_k, new_v, causal=True, reproducible=True, context=context())
        assert same(out, expected)
        out, lse = spread.attention(q, causal=True, return_lse=True, context=context())
        assert np.allclose(out, expected, atol=1e-6) and np.allclose(lse, expected_lse, atol=1e-6)
        spread.truncate(1, 600)
        assert (spread.length(0), spread.length(1)) == (1301, 600)
        spread.reset()
        assert spread.length() == 0 and spread.bytes_used == 0


def check_spread_latents(ranks):
    """A layer whose heads and latents ranks share: the bits of one process, and a part of the latents on each rank."""
    whole = ladon.LatentAttention(**LATENT, seed=5)
    layer = distributed.TensorParallelLatentAttention(ranks, **LATENT)
    layer.set_whole_parameters(whole)
    cache = ladon.KvCache.contiguous(**whole.cache_options(batch=2))
    pool = ladon.PagePool(**layer.cache_options(), page_size=32, num_pages=100)
    for spread in (distributed.SpreadKvCache.contiguous(ranks, **layer.cache_options(batch=2)),
                   distributed.SpreadKvCache.paged(ranks, pool, batch=2)):
        cache.reset()
        for i, tokens in enumerate((1100, 1, 1)):
            x = normal(20 + i, 2, tokens, 24)
            expected = whole(x, cache=cache, context=context())
            out = layer(x, cache=spread, reproducible=True, context=context())
            assert same(out, expected), i
        assert spread.length(1) == 1102
        assert sum(ranks.all_gather(np.array([spread.local_length(1)])).ravel()) == 1102
        x, given = normal(23, 1, 24), np.empty((1, 24), np.float32)
        expected = whole(x, cache=cache, new_lengths=[0, 1], context=context())
        assert layer.forward(x, cache=spread, new_lengths=[0, 1], out=given, context=context()) is given
        assert np.allclose(given, expected, atol=1e-5)


def check_disagreement(ranks):
    """One rank's bad argument is an error on all, and the communicator can still be used."""
    if ranks.size == 1:
        return
    try:
        ranks.all_gather(np.zeros((2, 3 + (ranks.rank == 1)), np.float32))
        raise AssertionError("no error")
    except ladon.CommunicationError as error:
        assert "ranks disagree: part: f32 [2, 3] on rank 0, f32 [2, 4] on rank 1" in str(error), error
    assert ranks.broken == ""
    ranks.barrier()


def check_all(ranks, folder):
    check_collectives(ranks)
    check_statistics(ranks)
    check_context_parallel(ranks)
    check_context_parallel_latent(ranks)
    check_layers(ranks)
    check_training(ranks, folder)
    check_spread_cache(ranks)
    check_spread_latents(ranks)
    check_disagreement(ranks)


def check_silence(ranks):
    """Rank 1 makes no call: the others raise within the deadline, and from then on at once."""
    if ranks.rank == 1 or ranks.size == 1:
        return
    try:
        ranks.barrier()
        raise AssertionError("no error")
    except ladon.CommunicationError as error:
        assert "sent or took nothing within" in str(error) or "failed: " in str(error), error
    assert ranks.broken
    try:
        ranks.barrier()
        raise AssertionError("no error")
    except ladon.CommunicationError as error:
        assert "broken by an earlier failure" in str(error)


def check_death(ranks):
    """Rank 1 ends without a word: the others raise."""
    ranks.barrier()
    if ranks.rank == 1:
        os._exit(3)
    try:
        for _ in range(3):
            ranks.all_gather(np.zeros(4, np.float32))
        raise AssertionError("no error")
    except ladon.CommunicationError:
        assert ranks.broken


def main(kind, *arguments):
    if kind == "mpi":
        from mpi4py import MPI

        world = MPI.COMM_WORLD
        folder = world.bcast(tempfile.mkdtemp() if world.rank == 0 else None)
        check_all(distributed.Communicator(world), folder)
        check_silence(distributed.Communicator(world, deadline=0.5))
        world.Barrier()
        print(f"rank {world.rank} of {world.size}: as one process", flush=True)
        return
    import torch.distributed as dist

    rank, size, store = int(arguments[0]), int(arguments[1]), pathlib.Path(arguments[2])
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    if kind == "torch_death":
        check_death(distributed.Communicator(dist.group.WORLD, deadline=20))
        print(f"rank {rank}: found it", flush=True)
        os._exit(0)  # PyTorch would wait for the dead rank
    check_all(distributed.Communicator(dist.group.WORLD), str(store.parent))
    check_silence(distributed.Communicator(dist.group.WORLD, deadline=0.5))
    dist.barrier()
    print(f"rank {rank} of {size}: as one process", flush=True)
    os._exit(0)  # gloo may abort where it is destroyed with receives that were given up


if __name__ == "__main__":
    main(*sys.argv[1:])
