"""ladon.torch as PyTorch's own operators and modules: dtypes, autocast, torch.compile and torch.export."""

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed (LADON_TEST_TORCH=1 ./dev test installs it)")

import ladon  # noqa: E402
import ladon.torch as lt  # noqa: E402
from ladon import _torch_operators as operators  # noqa: E402
from test_torch import tensors  # noqa: E402


@pytest.mark.parametrize("convert, dtype", [
    (lambda m: m.half(), torch.float16), (lambda m: m.bfloat16(), torch.bfloat16),
    (lambda m: m.double(), torch.float64), (lambda m: m.to(torch.float64), torch.float64)])
@pytest.mark.parametrize("make", [
    lambda: lt.MultiHeadAttention(embed_dim=16, num_heads=4, num_kv_heads=2, causal=True, seed=1),
    lambda: lt.LatentAttention(embed_dim=16, num_heads=2, kv_rank=8, nope_dim=6, rope_dim=4, seed=1)])
def test_modules_change_their_dtype_as_torchs_do(make, convert, dtype):
    module = make()
    (x,) = tensors((1, 5, 16), dtype=torch.float32, grad=False)
    expected = module(x)
    assert convert(module) is module
    assert all(p.dtype == dtype for p in module.parameters())
    own = module.layer.parameters("torch")
    assert all(p.data_ptr() == own[n].data_ptr() for n, p in module.named_parameters())
    out = module(x.to(dtype).requires_grad_())
    assert out.dtype == dtype
    torch.testing.assert_close(out.float(), expected, atol=0.1, rtol=0.1)
    out.float().sum().backward()
    assert all(p.grad is not None and p.grad.dtype == dtype for p in module.parameters())


def test_autocast_runs_in_its_dtype_and_gradients_keep_theirs():
    module = lt.MultiHeadAttention(embed_dim=16, num_heads=4, causal=True, seed=1)
    linear = torch.nn.Linear(16, 16)
    (x,) = tensors((1, 5, 16), dtype=torch.float32)
    expected = module(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = module(x)
        assert out.dtype == linear(x).dtype == torch.bfloat16
        heads = x.reshape(1, 5, 4, 4)
        assert lt.attention(heads, heads, heads).dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), expected, atol=0.05, rtol=0.05)
    out.float().sum().backward()
    assert x.grad.dtype == torch.float32
    assert all(p.grad.dtype == torch.float32 for p in module.parameters())


class Block(torch.nn.Module):
    """A user's own module around ladon.torch."""

    def __init__(self):
        super().__init__()
        self.qkv = torch.nn.Linear(16, 48, dtype=torch.float64)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (4, 4)) for t in self.qkv(x).chunk(3, -1))
        return lt.attention(q, k, v, causal=True, softcap=5.0).flatten(2)


@pytest.mark.parametrize("make", [Block, lambda: lt.MultiheadAttention(16, 4, batch_first=True,
                                                                         dtype=torch.float64)])
def test_compile_without_graph_breaks_gives_eagers_numbers(make):
    torch.manual_seed(3)
    module = make()
    call = (lambda m, x: m(x)) if isinstance(module, Block) else (
        lambda m, x: m(x, x, x, need_weights=False)[0])
    compiled = torch.compile(lambda x: call(module, x), fullgraph=True, backend="aot_eager")
    results = []
    for run in (lambda x: call(module, x), compiled):
        (x,) = tensors((2, 6, 16))
        module.zero_grad()
        out = run(x)
        out.square().sum().backward()
        results.append([out, x.grad, *(p.grad.clone() for p in module.parameters())])
    for eager, other in zip(*results):
        torch.testing.assert_close(other, eager, atol=1e-12, rtol=1e-12)


class LayerBlock(torch.nn.Module):
    """Owns a Ladon layer."""

    def __init__(self, attention):
        super().__init__()
        self.norm = torch.nn.LayerNorm(16, dtype=torch.float64)
        self.attention = attention

    def forward(self, x):
        return x + self.attention(self.norm(x))


LAYERS = [
    lambda: lt.MultiHeadAttention(
        embed_dim=16, num_heads=4, num_kv_heads=2, causal=True, rope={}, qk_norm=True, query_bias=True, key_bias=True,
        out_bias=True, dtype="f64", seed=1),
    lambda: lt.LatentAttention(
        embed_dim=16, num_heads=2, kv_rank=8, nope_dim=6, rope_dim=4, causal=True, dtype="f64", seed=1)]


@pytest.mark.parametrize("make", LAYERS)
def test_compile_of_modules_that_own_layers(make):
    module = LayerBlock(make())
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    optimiser = torch.optim.SGD(module.parameters(), lr=1e-3)
    for step in range(2):  # the second with weights that an optimiser has changed
        results = []
        for run in (module, compiled):
            (x,) = tensors((2, 6, 16))
            optimiser.zero_grad()
            out = run(x)
            out.square().sum().backward()
            results.append([out, x.grad, *(p.grad.clone() for p in module.parameters())])
        for eager, other in zip(*results):
            torch.testing.assert_close(other, eager, atol=1e-12, rtol=1e-12)
        optimiser.step()
    module.attention.half()
    half = x[:1].detach().half()
    compiled = torch.compile(module.attention, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(half), module.attention(half))
    cached = torch.compile(lambda x: module.attention(x, cache=1), fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match="cache: not available under torch.compile"):
        cached(x)


def test_compile_draws_dropout_by_torchs_generator():
    module = lt.MultiHeadAttention(embed_dim=16, num_heads=4, dropout=0.5, seed=1)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    x = torch.randn(1, 8, 16, generator=torch.Generator().manual_seed(2))

    def draw(run):
        torch.manual_seed(5)
        return run(x)

    torch.testing.assert_close(draw(compiled), draw(module), atol=0, rtol=0)
    assert not torch.equal(compiled(x), compiled(x))
    module.eval()
    torch.testing.assert_close(compiled(x), module(x), atol=0, rtol=0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = compiled(x)
        assert out.dtype == torch.bfloat16
        torch.testing.assert_close(out, module(x), atol=0, rtol=0)


@pytest.mark.parametrize("make", LAYERS)
def test_export_of_modules_that_own_layers(make):
    module = LayerBlock(make()).eval()
    (x,) = tensors((2, 6, 16), grad=False)
    exported = torch.export.export(module, (x,))
    assert "ladon.layer" in str(exported.graph)
    expected = module(x)
    torch.testing.assert_close(exported.module()(x), expected)
    del module  # the graph has what the layer is made of
    torch.testing.assert_close(exported.module()(x), expected)


def test_export():
    module = Block().eval()
    (x,) = tensors((2, 6, 16), grad=False)
    exported = torch.export.export(module, (x,))
    assert "ladon.attention" in str(exported.graph)
    torch.testing.assert_close(exported.module()(x), module(x))


def rotated(q, k, v):
    scaling = {"kind": "yarn", "factor": 4.0, "original_context": 64.0}
    return lt.attention(lt.rope(q, scaling=scaling), lt.rope(k, positions=torch.arange(6) + 2, rotary_dim=2), v)


def dropped(q, k, v):
    heads = (tensor.transpose(1, 2) for tensor in (q, k, v))
    return lt.scaled_dot_product_attention(*heads, dropout_p=0.3)


DROPPING = lt.MultiheadAttention(16, 4, batch_first=True, dtype=torch.float64, dropout=0.3)


def with_weights(q, k, v):
    out, weights = DROPPING(q.flatten(2), k.flatten(2), v.flatten(2))
    return out * weights.sum()


@pytest.mark.parametrize("function", [rotated, dropped, with_weights])
def test_every_function_compiles_without_graph_breaks(function):
    """In eager mode and compiled, the generator draws the same dropout."""
    results = []
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    for run in (function, compiled):
        inputs = tensors(*3 * [(2, 6, 4, 4)])
        torch.manual_seed(7)
        out = run(*inputs)
        out.square().sum().backward()
        results.append([out, *(tensor.grad for tensor in inputs)])
    for eager, other in zip(*results):
        torch.testing.assert_close(other, eager, atol=1e-12, rtol=1e-12)
    if function is not rotated:
        inputs = tensors(*3 * [(2, 6, 4, 4)], grad=False)
        assert not torch.equal(compiled(*inputs), compiled(*inputs))  # another draw, and no recompilation
    exported = torch.export.export(Rotated(), tuple(tensors(*3 * [(2, 6, 4, 4)], grad=False)))
    assert "ladon.rope" in str(exported.graph)


class Rotated(torch.nn.Module):
    def forward(self, q, k, v):
        return rotated(q, k, v)


def test_the_operators_are_as_torch_expects_them():
    q, k, v = tensors((1, 4, 2, 3), (1, 4, 2, 3), (1, 4, 2, 3))
    spec, arrays = operators._packed({"causal": True})
    torch.library.opcheck(operators._attention, (q, k, v, None, None, arrays, spec))
    torch.library.opcheck(operators.attention_weights, (q.detach(), k.detach(), None, arrays, spec))
    (x,) = tensors((1, 4, 2, 6))
    spec, arrays = operators._packed({"positions": torch.arange(4)})
    for back in (False, True):
        torch.library.opcheck(operators.rotate, (x, arrays, spec, back))
    module = lt.MultiHeadAttention(embed_dim=8, num_heads=2, dtype="f64")
    (x,) = tensors((1, 3, 8))
    arguments = (x, None, None, list(module.parameters()), [], None, module._description, "({}, [])", True)
    torch.library.opcheck(lt.layer_forward, arguments)


def test_options_of_every_kind_reach_the_operator():
    q, k, v = tensors((2, 4, 4, 3), (2, 5, 2, 3), (2, 5, 2, 3), grad=False)
    mask = torch.rand(4, 5, generator=torch.Generator().manual_seed(1)) > 0.3
    for options in ({"kv_lengths": [3, 5]}, {"kv_lengths": torch.tensor([3, 5])}, {"mask": mask},
                    {"kv_lengths": torch.tensor([3, 5]).numpy()}, {"alibi_slopes": (0.5, 1, 0.25, 2)},
                    {"scale": 0.3, "window_left": 2, "causal": True, "alignment": "top_left"}):
        torch.testing.assert_close(lt.attention(q, k, v, **options), ladon.attention(q, k, v, **options))
    with pytest.raises(ValueError, match="scale: got inf, expected a finite number"):
        lt.attention(q, k, v, scale=float("inf"))
