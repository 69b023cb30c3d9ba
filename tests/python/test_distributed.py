"""ladon.distributed: over threads always, over mpi4py and torch.distributed where they are installed."""

import copy
import importlib.util
import os
import pathlib
import pickle
import shutil
import subprocess
import sys
import threading

import numpy as np
import pytest

import ladon
import ladon.distributed as distributed
import ranks as rank_checks
from test_models import folder  # noqa: F401


def run_ends(ends, work):
    """Calls work(communicator) on a thread for each end; what each raised, or None."""
    raised = [None] * len(ends)

    def run(end):
        try:
            work(end)
        except BaseException as error:  # noqa: BLE001
            raised[end.rank] = error

    threads = [threading.Thread(target=run, args=(end,)) for end in ends]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return raised


def run_ranks(count, work, deadline=60.0):
    return run_ends(distributed.make_thread_communicators(count, deadline), work)


def expect_all_return(raised):
    for error in raised:
        if error is not None:
            raise error


@pytest.mark.parametrize("count", [1, 2, 3])
def test_threads(count, tmp_path):
    expect_all_return(run_ranks(count, lambda ranks: rank_checks.check_all(ranks, tmp_path)))
    expect_all_return(run_ranks(count, rank_checks.check_silence, deadline=0.2))


class QueueEngine(distributed.Engine):
    """An engine of Python alone: what a user may bring."""

    def __init__(self, rank, boxes):
        self.rank, self.size, self.boxes = rank, len(boxes), boxes
        self.waiting = []
        self.aborted = None

    def start(self, sends, receives):
        for peer, data in sends:
            self.boxes[peer][self.rank].append(bytes(data))
        self.waiting = list(receives)

    def poll(self):
        rest = []
        for peer, buffer in self.waiting:
            if self.boxes[self.rank][peer]:
                buffer[:] = self.boxes[self.rank][peer].pop(0)
            else:
                rest.append((peer, buffer))
        self.waiting = rest
        return not rest

    def silent_ranks(self):
        return [peer for peer, _ in self.waiting]

    def abort(self, reason):
        self.aborted = reason


def new_boxes(count):
    return {to: {by: [] for by in range(count)} for to in range(count)}


def queue_ends(count, deadline=60.0, kind=QueueEngine):
    boxes = new_boxes(count)
    return [distributed.Communicator(kind(rank, boxes), deadline) for rank in range(count)]


def test_an_engine_in_python():
    ends = queue_ends(3)
    assert "rank 1 of 3, QueueEngine" in repr(ends[1])

    def work(ranks):
        rank_checks.check_statistics(ranks)
        rank_checks.check_context_parallel(ranks)
        rank_checks.check_layers(ranks)
        rank_checks.check_spread_cache(ranks)
        rank_checks.check_disagreement(ranks)

    expect_all_return(run_ends(ends, work))


class FailingEngine(QueueEngine):
    def poll(self):
        if self.rank == 1:
            raise OSError("the cable is out")
        return super().poll()


def test_errors_of_an_engine():
    ends = queue_ends(2, 0.3, FailingEngine)
    raised = run_ends(ends, lambda ranks: ranks.barrier())
    assert isinstance(raised[1], ladon.CommunicationError)
    assert str(raised[1]) == "barrier: call 1 of rank 1: OSError: the cable is out"
    assert "rank 1 sent or took nothing within 0.3 s" in str(raised[0])
    assert all(end.broken for end in ends)
    raised = run_ends(ends, lambda ranks: ranks.barrier())
    assert all("broken by an earlier failure" in str(error) for error in raised)


INTERRUPTED = """
import os, signal, threading
import ladon, ladon.distributed

class SilentEngine(ladon.distributed.Engine):
    rank, size = 0, 2
    def start(self, sends, receives): pass
    def poll(self): return False
    def silent_ranks(self): return [1]
    def abort(self, reason): print("aborted:", reason)

ranks = ladon.distributed.Communicator(SilentEngine(), deadline=300)
threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
try:
    ranks.barrier()
except ladon.CommunicationError:
    for _ in range(1000): pass
"""


def test_an_interrupt_ends_a_wait():
    run = subprocess.run([sys.executable, "-c", INTERRUPTED], capture_output=True, text=True, env=environment(),
                         timeout=200, check=False)
    assert "aborted: barrier: call 1 of rank 0: KeyboardInterrupt" in run.stdout, run.stdout + run.stderr
    assert run.stderr.rstrip().endswith("KeyboardInterrupt") and run.returncode != 0, run.stderr


def test_a_rank_that_fails_tells_the_others():
    def work(ranks):
        if ranks.rank == 1:
            layer = distributed.TensorParallelAttention(ranks, embed_dim=16, num_heads=2)
            layer(np.zeros((1, 2, 15), np.float32))
        else:
            layer = distributed.TensorParallelAttention(ranks, embed_dim=16, num_heads=2)
            layer(np.zeros((1, 2, 16), np.float32))

    raised = run_ranks(2, work)
    assert isinstance(raised[1], ladon.InvalidArgumentError)
    assert isinstance(raised[0], ladon.CommunicationError) and isinstance(raised[0], RuntimeError)
    assert "rank 1 refused the call" in str(raised[0]) and "15" in str(raised[0])


def test_waits_let_other_threads_run():
    """A rank that waits has given up the GIL, with locks of its layer held."""
    ends = distributed.make_thread_communicators(2, deadline=30)
    layers = [distributed.TensorParallelAttention(end, embed_dim=16, num_heads=2) for end in ends]
    x = np.zeros((1, 2, 16), np.float32)
    first = threading.Thread(target=lambda: layers[0](x))
    first.start()
    assert layers[0].options["embed_dim"] == 16  # not blocked by the call that waits
    layers[1](x)
    first.join(30)
    assert not first.is_alive()


def test_checkpoints(folder, tmp_path):  # noqa: F811
    whole = ladon.load_attention(folder, 1)
    x = rank_checks.normal(0, 1, 7, whole.embed_dim)
    expected = whole(x, context=rank_checks.context())
    path = tmp_path / "written.safetensors"

    def work(ranks):
        layer = distributed.load_tensor_parallel_attention(ranks, folder, 1)
        assert isinstance(layer, distributed.TensorParallelAttention) and not layer.training
        assert rank_checks.same(layer(x, context=rank_checks.context()), expected)
        distributed.write_tensor_parallel_attention(path, layer, "llama", 1)

    expect_all_return(run_ranks(2, work))
    written = ladon.load_safetensors(path)
    for name, value in ladon.attention_tensors(whole, "llama", 1).items():
        assert rank_checks.same(written.pop(name), value), name
    assert not written

    raised = run_ranks(2, lambda ranks: distributed.load_tensor_parallel_attention(
        ranks, folder if ranks.rank == 0 else tmp_path / "nowhere", 1))
    assert isinstance(raised[0], ladon.CommunicationError) and isinstance(raised[1], FileNotFoundError)


def test_bad_arguments():
    (end,) = distributed.make_thread_communicators(1)
    with pytest.raises(TypeError, match="got int, expected an mpi4py.MPI.Comm, a torch.distributed.ProcessGroup"):
        distributed.Communicator(3)
    with pytest.raises(ladon.InvalidArgumentError, match="deadline: got 0, expected seconds"):
        distributed.make_thread_communicators(2, deadline=0)
    with pytest.raises(ladon.InvalidArgumentError, match="count: got 0, expected 1 to"):
        distributed.make_thread_communicators(0)
    with pytest.raises(TypeError, match="communicator: got str, expected a ladon.distributed.Communicator"):
        distributed.TensorParallelAttention("ranks", embed_dim=8, num_heads=2)
    with pytest.raises(TypeError, match="unexpected keyword argument 'sed'"):
        distributed.TensorParallelAttention(end, embed_dim=8, num_heads=2, sed=1)
    q = np.zeros((1, 4, 2, 8), np.float32)
    with pytest.raises(TypeError, match="plan: got int, expected a ladon.distributed.ContextPlan"):
        distributed.context_parallel_attention(end, q, q, q, plan=3)
    plan = distributed.plan_context(1, 4, 4)
    with pytest.raises(TypeError, match="plan: got list, expected lists of"):
        distributed.context_parallel_attention(end, q, q, q, plan=plan._replace(queries=[3]))
    with pytest.raises(ladon.InvalidArgumentError, match="scheme: got 'best', expected one of 'auto'"):
        distributed.context_parallel_attention(end, q, q, q, plan=plan._replace(scheme="best"))
    with pytest.raises(ladon.InvalidArgumentError):
        distributed.context_parallel_attention(end, q, q, q, plan=plan._replace(queries=[[(0, 3)]]))
    with pytest.raises(ladon.InvalidArgumentError, match="ranks: got 0"):
        distributed.plan_context(0, 4, 4)
    latent = ladon.LatentAttention(**rank_checks.LATENT)
    x = np.zeros((1, 4, 24), np.float32)
    whole = distributed.plan_context(1, 4, 4)
    with pytest.raises(TypeError, match="layer: got MultiHeadAttention, expected a ladon.LatentAttention"):
        distributed.context_parallel_forward(end, ladon.MultiHeadAttention(embed_dim=24, num_heads=2), x, plan=whole)
    with pytest.raises(TypeError, match="plan: got NoneType, expected a ladon.distributed.ContextPlan"):
        distributed.context_parallel_forward(end, latent, x)
    with pytest.raises(ladon.Error, match="plan.scheme: got"):
        distributed.context_parallel_forward_training(end, latent, x, plan=whole._replace(scheme="ring"))
    with pytest.raises(TypeError, match="saved: got"):
        distributed.context_parallel_backward(end, latent, x, None)
    shared = distributed.TensorParallelLatentAttention(end, **rank_checks.LATENT)
    spread = distributed.SpreadKvCache.contiguous(end, **shared.cache_options())
    with pytest.raises(ladon.InvalidArgumentError, match="key: got it together with a cache"):
        shared(x, x, cache=spread)
    with pytest.raises(TypeError, match="reproducible"):
        shared(x, cache=ladon.KvCache.contiguous(**shared.cache_options()), reproducible=True)
    with pytest.raises(TypeError, match="cache: got SpreadKvCache, expected a ladon.KvCache"):
        distributed.TensorParallelAttention(end, embed_dim=24, num_heads=2)(x, cache=spread)
    layer = distributed.TensorParallelAttention(end, embed_dim=8, num_heads=2)
    with pytest.raises(ladon.InvalidArgumentError, match="ranks share"):
        ladon.clip_gradients(layer, 1.0)
    with pytest.raises(ladon.UnsupportedError, match="ranks share this layer"):
        copy.deepcopy(layer)
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(layer)
    with pytest.raises(ladon.InvalidArgumentError, match="rank: got 1, expected one of 1 ranks"):
        layer.slice_of("q_proj.weight", 1)
    with pytest.raises(ladon.InvalidArgumentError, match="optimiser: got one of other layers"):
        distributed.save_training("/nowhere", layer, ladon.AdamW(ladon.MultiHeadAttention(embed_dim=8, num_heads=2)))


def test_layers_keep_their_communicator():
    layer = distributed.TensorParallelAttention(distributed.make_thread_communicators(1)[0], embed_dim=8, num_heads=2)
    cache = distributed.SpreadKvCache.contiguous(distributed.make_thread_communicators(1)[0], num_kv_heads=1, head_dim=4)
    assert layer(np.zeros((1, 2, 8), np.float32)).shape == (1, 2, 8)
    cache.append(np.zeros((1, 2, 1, 4), np.float32), np.zeros((1, 2, 1, 4), np.float32))
    assert cache.communicator.size == 1 and "rank 0 of 1" in repr(cache)


def environment():
    """Of a child: one thread of every other library, so that ranks do not crowd each other out."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}


@pytest.mark.parametrize("count", [1, 2, 3])
def test_mpi(count):
    if importlib.util.find_spec("mpi4py") is None:
        pytest.skip("no mpi4py")
    mpirun = shutil.which("mpirun")
    if mpirun is None:
        pytest.skip("no mpirun")
    version = subprocess.run([mpirun, "--version"], capture_output=True, text=True, check=False).stdout
    options = ["--oversubscribe", "--allow-run-as-root", "--bind-to", "none"] if "Open MPI" in version else []
    command = [mpirun, *options, "-n", str(count), sys.executable, str(pathlib.Path(rank_checks.__file__)), "mpi"]
    run = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=600, check=False)
    if "cannot load MPI library" in run.stderr:
        pytest.skip("mpi4py finds no MPI library")
    assert run.returncode == 0, run.stdout + run.stderr
    for rank in range(count):
        assert f"rank {rank} of {count}: as one process" in run.stdout


def run_torch(kind, count, tmp_path):
    """The exit status and the text of each rank."""
    torch = pytest.importorskip("torch", reason="no torch")
    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        pytest.skip("this torch has no gloo")
    runs = [subprocess.Popen([sys.executable, rank_checks.__file__, kind, str(rank), str(count), str(tmp_path / "store")],
                             stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment())
            for rank in range(count)]
    return [(run.communicate(timeout=600)[0], run.returncode)[::-1] for run in runs]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_torch(count, tmp_path):
    for rank, (status, text) in enumerate(run_torch("torch", count, tmp_path)):
        assert status == 0 and f"rank {rank} of {count}: as one process" in text, text


def test_torch_finds_a_dead_rank(tmp_path):
    for rank, (status, text) in enumerate(run_torch("torch_death", 3, tmp_path)):
        assert (status == 3) if rank == 1 else (status == 0 and f"rank {rank}: found it" in text), text
