"""Devices: what is there, what is refused, and arrays on a GPU where there is one."""

import subprocess
import sys

import numpy as np
import pytest

import ladon

GPUS = ladon.list_devices()
needs_gpu = pytest.mark.skipif(not GPUS["devices"], reason="no CUDA device: " + GPUS["reason"])


def layer_of(**options):
    return ladon.MultiHeadAttention(embed_dim=16, num_heads=4, num_kv_heads=2, causal=True, rope={}, **options)


def test_the_list_has_devices_or_a_reason():
    assert bool(GPUS["devices"]) == (GPUS["reason"] == "")
    for index, gpu in enumerate(GPUS["devices"]):
        assert gpu["device"] == f"cuda:{index}"
        assert gpu["memory_bytes"] >= gpu["free_bytes"] > 0


def test_the_cpu_by_name():
    context = ladon.Context(device="cpu", num_threads=1)
    assert context.device == "cpu" and context.num_threads == 1
    context.synchronize()
    layer = layer_of(device="cpu")
    assert layer.device == "cpu" and "device" not in layer.options
    assert "device" not in layer.cache_options()
    cache = ladon.KvCache.contiguous(**layer.cache_options(), device="cpu")
    assert cache.device == "cpu"
    moved = layer.to("cpu")
    x = np.ones((1, 3, 16), np.float32)
    assert moved is not layer and np.array_equal(moved(x), layer(x))


@pytest.mark.parametrize("device", ["tpu", "cuda:", "cuda:x", "cuda:-1", "cuda:123456", "CUDA"])
def test_devices_that_are_none(device):
    for make in (ladon.Context, layer_of):
        with pytest.raises(ladon.InvalidArgumentError, match="device: got .*, expected 'cpu', 'cuda' or 'cuda:N'"):
            make(device=device)


def test_wrong_types():
    with pytest.raises(TypeError, match="Context: device: got int, expected a device such as"):
        ladon.Context(device=0)
    with pytest.raises(ladon.InvalidArgumentError, match="Context: stream: got one for the CPU"):
        ladon.Context(stream=7)


@pytest.mark.skipif(bool(GPUS["devices"]), reason="there is a GPU")
def test_without_a_gpu_everything_says_why():
    reason = "got cuda, expected cpu: " + GPUS["reason"]
    options = layer_of().cache_options()
    pool = dict(options, page_size=4, num_pages=4)
    pool.pop("batch")
    for call in (
        lambda: ladon.Context(device="cuda:0"),
        lambda: layer_of(device="cuda"),
        lambda: layer_of().to("cuda:1"),
        lambda: ladon.KvCache.contiguous(**options, device="cuda"),
        lambda: ladon.KvCache.window(**options, window_left=3, device="cuda"),
        lambda: ladon.PagePool(**pool, device="cuda"),
    ):
        with pytest.raises(ladon.UnsupportedError) as caught:
            call()
        assert reason in str(caught.value)


# ---- with a GPU -----------------------------------------------------------------------------------


@pytest.fixture
def torch():
    module = pytest.importorskip("torch")
    if not module.cuda.is_available():
        pytest.skip("this PyTorch has no CUDA")
    return module


def qkv(torch, device="cuda", dtype=None, length=33):
    generator = torch.Generator().manual_seed(1)
    return [
        torch.randn(2, length, heads, 32, generator=generator).to(device=device, dtype=dtype or torch.float32)
        for heads in (4, 2, 2)
    ]


@needs_gpu
def test_torch_tensors_are_read_where_they_lie_and_given_back(torch):
    q, k, v = qkv(torch)
    out = ladon.attention(q, k, v, causal=True)
    assert out.device == q.device and out.shape == q.shape
    expected = ladon.attention(q.cpu(), k.cpu(), v.cpu(), causal=True)
    torch.testing.assert_close(out.cpu(), expected, rtol=1e-5, atol=1e-5)
    given = torch.empty_like(out)
    assert ladon.attention(q, k, v, causal=True, out=given) is given
    assert torch.equal(given, out)
    with_lists = ladon.attention(q, k, v, sinks=[0.0] * 4, kv_lengths=[33, 7])
    assert with_lists.device == q.device


@needs_gpu
def test_work_is_in_the_order_of_torchs_streams(torch):
    q, k, v = qkv(torch, length=64)
    expected = ladon.attention(2 * q, k, v)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    for context in (None, ladon.Context(device="cuda"), ladon.Context(device="cuda", stream=stream)):
        for _ in range(20):
            with torch.cuda.stream(stream):
                slow = torch.zeros(4096, 4096, device="cuda")
                for _ in range(4):
                    slow = slow @ slow
                doubled = q * 2 + slow[0, 0]
                out = ladon.attention(doubled, k, v, context=context) + 0.0
                del doubled, slow
            torch.cuda.current_stream().wait_stream(stream)
            assert torch.equal(out, expected)


@needs_gpu
def test_dlpack_without_torch(torch):
    class Foreign:
        """An array of another library, by DLPack alone."""

        def __init__(self, tensor):
            self.tensor, self.streams = tensor, []

        def __dlpack_device__(self):
            return self.tensor.__dlpack_device__()

        def __dlpack__(self, *, stream=None, **kwargs):
            self.streams.append(stream)
            return self.tensor.__dlpack__(stream=stream)

    q, k, v = (Foreign(tensor) for tensor in qkv(torch))
    context = ladon.Context(device="cuda")
    out = ladon.attention(q, k, v, context=context)
    assert q.streams == [1]  # CUDA's default stream
    assert isinstance(out, ladon.DeviceArray) and out.device == "cuda:0" and out.dtype == "f32"
    assert out.__dlpack_device__() == (2, 0)
    expected = ladon.attention(*(each.tensor for each in (q, k, v)))
    assert torch.equal(torch.from_dlpack(out), expected)
    assert np.array_equal(out.numpy(), expected.cpu().numpy())


@needs_gpu
def test_mixed_devices_are_refused(torch):
    q, k, v = qkv(torch)
    with pytest.raises(ladon.InvalidArgumentError, match="attention: k: got memory of cpu, expected memory of cuda:0"):
        ladon.attention(q, k.cpu(), v)
    with pytest.raises(ladon.InvalidArgumentError, match="attention: q: got memory of cuda:0, expected memory of cpu"):
        ladon.attention(q, k, v, context=ladon.Context())
    layer = layer_of(device="cuda")
    with pytest.raises(ladon.InvalidArgumentError, match="got memory of cuda:0, expected memory of cpu"):
        layer(np.ones((1, 3, 16), np.float32))


@needs_gpu
def test_layers_caches_and_optimisers_on_the_gpu(torch):
    here, there = layer_of(seed=3), layer_of(seed=3, device="cuda")
    assert there.device == "cuda:0" and there.cache_options()["device"] == "cuda:0"
    x = torch.randn(2, 7, 16)
    torch.testing.assert_close(there(x.cuda()).cpu(), here(x), rtol=1e-5, atol=1e-5)
    cache = ladon.KvCache.contiguous(**there.cache_options(batch=2))
    parts = [there(x[:, t : t + 1].cuda(), cache=cache) for t in range(7)]
    torch.testing.assert_close(torch.cat(parts, 1).cpu(), here(x), rtol=1e-5, atol=1e-5)
    for layer, data in ((here, x), (there, x.cuda())):
        optimiser = ladon.AdamW(layer, learning_rate=1e-2)
        for _ in range(3):
            out, saved = layer.forward_training(data)
            layer.zero_grad()
            layer.backward(out - data, saved)
            optimiser.step()
    for name, weight in there.parameters("torch").items():
        torch.testing.assert_close(weight.cpu(), here.parameters("torch")[name], rtol=1e-3, atol=1e-4)
    assert there.to("cpu").device == "cpu"


@needs_gpu
def test_ladon_torch_on_the_gpu(torch):
    import ladon.torch

    inputs = [tensor.requires_grad_() for tensor in qkv(torch)]
    ladon.torch.attention(*inputs, causal=True).square().sum().backward()
    others = [tensor.detach().cpu().requires_grad_() for tensor in inputs]
    ladon.torch.attention(*others, causal=True).square().sum().backward()
    for one, other in zip(inputs, others):
        torch.testing.assert_close(one.grad.cpu(), other.grad, rtol=1e-4, atol=1e-4)
    module = ladon.torch.MultiHeadAttention(embed_dim=16, num_heads=4, num_kv_heads=2, causal=True, seed=3)
    x = torch.randn(2, 7, 16)
    before = module(x).detach()
    module.to("cuda")
    assert module.layer.device == "cuda:0"
    own = module.layer.parameters("torch")
    assert all(p.data_ptr() == own[name].data_ptr() for name, p in module.named_parameters())
    after = module(x.cuda())
    torch.testing.assert_close(after.detach().cpu(), before, rtol=1e-5, atol=1e-5)
    after.square().mean().backward()
    torch.optim.AdamW(module.parameters()).step()
    assert module.cpu().layer.device == "cpu"


def test_a_graph_on_the_cpu_calls_the_step():
    graph = ladon.Graph(ladon.Context())
    q = np.ones((1, 3, 2, 8), np.float32)
    assert np.array_equal(graph.run(lambda: ladon.attention(q, q, q)), q)
    assert graph.statistics() == {"num_nodes": 0, "num_changed": 0, "num_built": 0}
    with pytest.raises(ZeroDivisionError):
        graph.run(lambda: 1 // 0)


@needs_gpu
def test_a_graph_decodes_as_plain_calls_do(torch):
    context = ladon.Context(device="cuda")
    layer = layer_of(device="cuda")
    caches = [ladon.KvCache.contiguous(**layer.cache_options(batch=2)) for _ in range(2)]
    graph = ladon.Graph(context)
    for _ in range(20):
        x = torch.randn(2, 1, 16, device="cuda")
        expected = layer(x, cache=caches[0], context=context)
        out = graph.run(lambda: layer(x, cache=caches[1], context=context))
        assert torch.equal(out, expected)
    # On a stream of its own, whose results PyTorch's current stream must wait for.
    aside = ladon.Context(device="cuda", stream=torch.cuda.Stream())
    graph_aside = ladon.Graph(aside)
    caches = [ladon.KvCache.contiguous(**layer.cache_options(batch=2)) for _ in range(2)]
    for _ in range(20):
        x = torch.randn(2, 1, 16, device="cuda")
        expected = layer(x * 2, cache=caches[0])
        out = graph_aside.run(lambda: layer(x * 2, cache=caches[1], context=aside))
        assert torch.equal(out, expected)
    statistics = graph.statistics()
    assert 0 < statistics["num_changed"] < statistics["num_nodes"] and statistics["num_built"] <= 2
    with pytest.raises(ladon.InvalidArgumentError, match="waits for the device"):
        graph.run(context.synchronize)


@needs_gpu
def test_cupy_both_ways():
    cupy = pytest.importorskip("cupy")
    q, k, v = (cupy.random.standard_normal((2, 33, 4, 16), dtype=cupy.float32) for _ in range(3))
    out = ladon.attention(q, k, v, causal=True)
    assert isinstance(out, ladon.DeviceArray)
    there = cupy.from_dlpack(out)
    expected = ladon.attention(*(cupy.asnumpy(each) for each in (q, k, v)), causal=True)
    np.testing.assert_allclose(cupy.asnumpy(there), expected, rtol=1e-5, atol=1e-5)
    stream = cupy.cuda.Stream(non_blocking=True)
    context = ladon.Context(device="cuda", stream=stream)
    assert context.stream == stream.ptr
    with stream:
        out = cupy.from_dlpack(ladon.attention(q, k, v, causal=True, context=context))
    stream.synchronize()
    assert cupy.array_equal(out, there)
    del stream  # the Context keeps it
    out = cupy.from_dlpack(ladon.attention(q, k, v, causal=True, context=context))
    assert cupy.array_equal(out, there)


@needs_gpu
def test_jax_both_ways(monkeypatch):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    jax = pytest.importorskip("jax")
    if jax.default_backend() != "gpu":
        pytest.skip("JAX has no GPU")
    q, k, v = (jax.random.normal(jax.random.key(i), (2, 33, 4, 16)) for i in range(3))
    there = jax.dlpack.from_dlpack(ladon.attention(q, k, v, causal=True))
    expected = ladon.attention(*(np.asarray(each) for each in (q, k, v)), causal=True)
    np.testing.assert_allclose(np.asarray(there), expected, rtol=1e-5, atol=1e-5)


FAULT = """
import numpy as np, cupy, ladon
x = cupy.ones((1, 3, 2, 8), dtype=cupy.float32)
kept = ladon.attention(x, x, x)
cupy.RawKernel('extern "C" __global__ void fault(int* p) { *p = 1; }', "fault")((1,), (1,), (np.uintp(0),))
try:
    ladon.attention(x, x, x, context=ladon.Context(device="cuda"))
    ladon.attention(x, x, x).numpy()
except ladon.DeviceError as error:
    print("refused:", error)
host = np.ones((1, 3, 2, 8), np.float32)
assert np.array_equal(ladon.attention(host, host, host), host)
"""


@needs_gpu
def test_a_fault_on_the_device_is_an_error_and_the_cpu_goes_on():
    pytest.importorskip("cupy")
    done = subprocess.run([sys.executable, "-c", FAULT], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "refused:" in done.stdout and "cudaErrorIllegalAddress" in done.stdout, done.stdout
