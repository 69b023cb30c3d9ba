"""Ctrl-C ends a long call, and leaves everything as it was."""

import contextlib
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

import ladon
import ladon.convert

# Long work: attention over many tokens in f64 on one thread and the slowest kernels or the reference, wide projections, or a
# large calibration.
PREPARATION = """
import numpy as np, os
import ladon, ladon.convert

context = ladon.Context(isa="baseline", num_threads=1)
reference = ladon.Context(isa="reference", num_threads=1)
layer = ladon.MultiHeadAttention(embed_dim=64, num_heads=1, causal=True, dtype="f64")
x = np.random.default_rng(0).standard_normal((1, 131072, 64))
token = x[:, :1]
"""
# What comes before the call, the call, and whether all is as it was.
WORKS = {
    "attention": (
        "q = x[:, :, None]",
        "ladon.attention(q, q, q, context=context)",
        "True",
    ),
    "attention of the reference": (
        "q = x[:, :, None]",
        "ladon.attention(q, q, q, context=reference)",
        "True",
    ),
    "projections of the reference": (
        "wide = ladon.MultiHeadAttention(embed_dim=4096, num_heads=32, num_kv_heads=1, dtype='f32')\n"
        "rows = np.ones((1, 4096, 4096), np.float32)",
        "wide(rows, context=reference)",
        "True",
    ),
    "cached forward": (
        "cache = ladon.KvCache.contiguous(**layer.cache_options())\n"
        "layer(x[:, :7], cache=cache)\n"
        "expected = layer(token, cache=cache.fork())",
        "layer(x, cache=cache, context=context)",
        "cache.length() == 7 and np.array_equal(layer(token, cache=cache), expected)",
    ),
    "backward": (
        "x = x[:, :32768]\n"
        "y, saved = layer.forward_training(x[:, :9])\n"
        "layer.backward(y, saved)\n"
        "y, saved = layer.forward_training(x)\n"
        "before = {name: value.copy() for name, value in layer.gradients().items()}",
        "layer.backward(y, saved, context=context)",
        "all(np.array_equal(before[name], value) for name, value in layer.gradients().items())",
    ),
    "calibration": (
        "os.environ['LADON_ISA'] = 'baseline'\n"
        "calibration = ladon.convert.Calibration(4096)\n"
        "wide = np.broadcast_to(np.ones((1, 1, 4096), np.float32), (1, 1 << 17, 4096))",
        "calibration.add(wide)",
        "calibration.tokens == 0",
    ),
}


@pytest.mark.parametrize("work", WORKS)
def test_ctrl_c_ends_a_long_call(work):
    prepare, call, unchanged = WORKS[work]
    code = f"""{PREPARATION}
{prepare}
try:
    print("ready", flush=True)
    {call}
    print("the call ended by itself")
except KeyboardInterrupt:
    print("KeyboardInterrupt", {unchanged})
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "ready\n"
        time.sleep(1)
        process.send_signal(signal.SIGINT)
        # The bound is generous: a piece of the work takes a tenth of a second.
        assert process.communicate(timeout=120)[0] == "KeyboardInterrupt True\n"
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def alarms(handler):
    """Calls the handler ten times a second."""
    before = signal.signal(signal.SIGALRM, lambda number, frame: handler())
    signal.setitimer(signal.ITIMER_REAL, 0.1, 0.1)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture
def slow():
    """A layer, an input and a Context, whose call takes about half a second."""
    layer = ladon.MultiHeadAttention(embed_dim=64, num_heads=1, causal=True, dtype="f64")
    x = np.random.default_rng(0).standard_normal((1, 8192, 64))
    return layer, x, ladon.Context(isa="baseline", num_threads=1)


def test_handlers_run_during_a_call(slow):
    layer, x, context = slow
    expected = layer(x, context=context)
    seen = []
    with alarms(lambda: seen.append(layer.num_heads)):
        y = layer(x, context=context)
        during = len(seen)
    assert during > 0
    assert np.array_equal(y, expected)


def test_what_a_handler_raises_ends_the_call(slow):
    layer, x, context = slow
    cache = ladon.KvCache.contiguous(**layer.cache_options())

    def give_up():
        raise LookupError("from the handler")

    with pytest.raises(LookupError, match="from the handler"), alarms(give_up):
        layer(x, cache=cache, context=context)
    assert cache.length() == 0


def test_a_handler_cannot_wait_for_its_own_call(slow):
    layer, x, context = slow
    cache = ladon.KvCache.contiguous(**layer.cache_options())
    with pytest.raises(RuntimeError, match="signal handler used a ladon object"), alarms(cache.length):
        layer(x, cache=cache, context=context)
    assert cache.length() == 0


def test_other_threads_are_not_interrupted(slow):
    layer, x, context = slow
    seen = []
    results = []
    expected = layer(x, context=context)
    thread = threading.Thread(target=lambda: results.append(layer(x, context=context)))
    with alarms(lambda: seen.append(threading.current_thread())):
        thread.start()
        thread.join()
    assert np.array_equal(results[0], expected)
    assert set(seen) <= {threading.main_thread()}
