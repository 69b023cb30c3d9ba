"""ladon.torch: gradients against torch's own, and the modules."""

import copy
import io
import pickle

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed (LADON_TEST_TORCH=1 ./dev test installs it)")

import ladon  # noqa: E402
import ladon.torch as lt  # noqa: E402


def tensors(*shapes, dtype=torch.float64, grad=True, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*s, dtype=dtype, generator=generator).requires_grad_(grad) for s in shapes]


def plain(module):
    """A torch.nn.MultiheadAttention with the same weights."""
    other = torch.nn.MultiheadAttention(module.embed_dim, module.num_heads, batch_first=True, dtype=torch.float64)
    other.load_state_dict(module.state_dict())
    return other


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True},
        {"causal": True, "window_left": 2, "softcap": 3.0},
        {"kv_lengths": [3, 5], "alibi_slopes": [0.5, 0.25, 0.1, 0.05]},
        {"dropout": 0.3, "dropout_seed": 7},
    ],
)
def test_gradcheck(options):
    q, k, v, bias, sinks = tensors((2, 4, 4, 3), (2, 5, 2, 3), (2, 5, 2, 2), (1, 4, 4, 5), (4,))

    def run(q, k, v, bias, sinks):
        return lt.attention(q, k, v, bias=bias, sinks=sinks, return_lse=True, **options)

    assert torch.autograd.gradcheck(run, (q, k, v, bias, sinks))


def test_gradcheck_of_rope():
    (x,) = tensors((2, 3, 2, 8))
    assert torch.autograd.gradcheck(lambda x: lt.rope(x, layout="interleaved", rotary_dim=4, positions=5), (x,))


def test_only_wanted_gradients():
    q, k, v = tensors((1, 3, 2, 4), (1, 3, 2, 4), (1, 3, 2, 4), dtype=torch.float32)
    k.requires_grad_(False)
    lt.attention(q, k, v).sum().backward()
    assert q.grad is not None and k.grad is None and v.grad is not None


def test_results_share_no_copy():
    (x,) = tensors((1, 3, 2, 4), dtype=torch.float32, grad=False)
    out = torch.empty_like(x)
    assert ladon.attention(x, x, x, out=out) is out
    assert isinstance(ladon.attention(x, x, x), torch.Tensor)


def test_outputs_that_autograd_would_not_record_are_refused():
    """Not ignored: a caller would read an array that was never written."""
    (x,) = tensors((1, 3, 2, 4), dtype=torch.float32)
    out = torch.empty_like(x)
    for name, call in (("attention", lambda: lt.attention(x, x, x, out=out)), ("rope", lambda: lt.rope(x, out=out))):
        with pytest.raises(ValueError, match=f"^ladon.torch.{name}: out: got a tensor, expected none"):
            call()
    module = lt.MultiHeadAttention(embed_dim=8, num_heads=2)
    x = torch.randn(1, 3, 8)
    out = torch.empty_like(x)
    with pytest.raises(ValueError, match="^ladon.torch.MultiHeadAttention: out: got a tensor, expected none"):
        module(x, out=out)
    with torch.no_grad():
        assert module(x, out=out) is out and torch.equal(out, module(x))


def test_transforms_of_functions_are_refused():
    """By name. Forward-mode tangents were lost without a word: the derivative came out as 0."""
    (x,) = tensors((3, 1, 4, 2, 8), dtype=torch.float32, grad=False)
    tokens = torch.randn(3, 1, 4, 16)
    mine, drop_in = lt.MultiHeadAttention(embed_dim=16, num_heads=2), lt.MultiheadAttention(16, 2, batch_first=True)
    cases = [
        ("attention", lambda a: lt.attention(a, a, a), x),
        ("attention", lambda a: lt.scaled_dot_product_attention(a, a, a), x),
        ("rope", lt.rope, x),
        ("MultiHeadAttention", mine, tokens),
        ("attention", lambda a: drop_in(a, a, a)[0], tokens),
    ]
    for name, function, inputs in cases:
        for call in (
            lambda f=function, a=inputs: torch.vmap(f)(a),
            lambda f=function, a=inputs: torch.func.grad(lambda t: f(t).sum())(a[0]),
            lambda f=function, a=inputs: torch.func.jvp(f, (a[0],), (a[0],)),
        ):
            with pytest.raises(ladon.UnsupportedError, match=f"^ladon.torch.{name}: got a call inside a transform"):
                call()
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(inputs[0], inputs[0])
            with pytest.raises(ladon.UnsupportedError, match=f"^ladon.torch.{name}: got a tensor with a tangent"):
                function(dual)
        assert function(inputs[0]).shape == inputs[0].shape
    parameters = {name: value.detach() for name, value in mine.named_parameters()}
    assert torch.equal(torch.func.functional_call(mine, parameters, (tokens[0],)), mine(tokens[0]))


def test_bfloat16_tensors():
    q, k, v = tensors((1, 5, 4, 8), (1, 5, 2, 8), (1, 5, 2, 8), dtype=torch.bfloat16, grad=False)
    out = ladon.attention(q, k, v)
    assert out.dtype == torch.bfloat16
    wide = ladon.attention(q.double(), k.double(), v.double())
    assert torch.allclose(out.double(), wide, atol=0.03)


@pytest.mark.parametrize("causal, kind", [(False, None), (True, None), (False, "bool"), (False, "float")])
def test_scaled_dot_product_attention(causal, kind):
    q, k, v = tensors((2, 4, 6, 8), (2, 4, 7, 8), (2, 4, 7, 5))
    mask = None
    if kind == "bool":
        mask = torch.rand(6, 7) > 0.3
    elif kind == "float":
        mask = torch.randn(2, 1, 6, 7, dtype=torch.float64)
    ours = lt.scaled_dot_product_attention(q, k, v, mask, is_causal=causal)
    theirs = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, is_causal=causal)
    torch.testing.assert_close(ours, theirs)
    ours_grad = torch.autograd.grad(ours.square().sum(), (q, k, v))
    theirs_grad = torch.autograd.grad(theirs.square().sum(), (q, k, v))
    torch.testing.assert_close(ours_grad, theirs_grad)


def test_scaled_dot_product_attention_shapes():
    q, k, v = tensors((2, 3, 4, 6, 8), (2, 3, 2, 7, 8), (2, 3, 2, 7, 8), grad=False)
    ours = lt.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    theirs = torch.nn.functional.scaled_dot_product_attention(
        q, k.repeat_interleave(2, -3), v.repeat_interleave(2, -3)
    )
    torch.testing.assert_close(ours, theirs)
    with pytest.raises(ValueError, match="enable_gqa"):
        lt.scaled_dot_product_attention(q, k, v)


def module():
    return lt.MultiHeadAttention(
        embed_dim=8, num_heads=4, num_kv_heads=2, query_bias=True, qk_norm=True, rope={}, causal=True, dtype="f64"
    )


def test_gradcheck_of_layers():
    (x,) = tensors((2, 3, 8))
    for layer in (
        module(),
        lt.LatentAttention(embed_dim=8, num_heads=2, kv_rank=3, nope_dim=4, rope_dim=2, dtype="f64"),
    ):
        names = [name for name, _ in layer.named_parameters()]
        values = [value for _, value in layer.named_parameters()]

        def run(x, *parameters, layer=layer, names=names):
            return torch.func.functional_call(layer, dict(zip(names, parameters)), (x,))

        assert torch.autograd.gradcheck(run, (x, *values))


def test_module_shares_memory_and_trains():
    layer = module()
    own = layer.layer.parameters()
    for name, parameter in layer.named_parameters():
        assert parameter.data_ptr() == own[name].ctypes.data
    (x,) = tensors((2, 5, 8), grad=False)
    target = torch.randn(2, 5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    optimiser = torch.optim.Adam(layer.parameters(), lr=0.01)
    losses = []
    for _ in range(30):
        optimiser.zero_grad()
        loss = (layer(x) - target).square().mean()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
    # What torch trained is what the layer computes with.
    torch.testing.assert_close(layer.layer(x), layer(x).detach())


def test_module_state_dict_and_copies():
    first, second = module(), module()
    with torch.no_grad():
        for parameter in first.parameters():
            parameter.add_(0.25)
    second.load_state_dict(first.state_dict())
    (x,) = tensors((1, 4, 8), grad=False)
    torch.testing.assert_close(first(x), second(x), rtol=0, atol=0)
    third = copy.deepcopy(first)
    with torch.no_grad():
        next(third.parameters()).zero_()
    assert not torch.equal(first(x), third(x))
    assert type(third) is lt.MultiHeadAttention


@pytest.mark.parametrize("again", [
    lambda module: pickle.loads(pickle.dumps(module)),
    lambda module: torch.load(io.BytesIO(saved(module)), weights_only=False),
    copy.deepcopy,
], ids=["pickle", "torch.save", "deepcopy"])
def test_modules_are_values(again):
    first = torch.nn.Sequential(module(), lt.LatentAttention(embed_dim=8, num_heads=2, kv_rank=3, nope_dim=4, rope_dim=2))
    first.to(torch.float32).eval()
    next(first[0].parameters()).requires_grad_(False)
    first[0].note = "a user's own attribute"
    (x,) = tensors((1, 4, 8), dtype=torch.float32)
    second = again(first)
    assert torch.equal(first(x), second(x))
    assert second[0].note == first[0].note and not second[0].training and not second[0].layer.training
    for (name, old), (_, new) in zip(first.named_parameters(), second.named_parameters()):
        assert new.requires_grad == old.requires_grad, name
    for name, parameter in second[0].named_parameters():
        assert parameter.data_ptr() == second[0].layer.parameters()[name].ctypes.data
    with torch.no_grad():
        next(second.parameters()).zero_()
    assert not torch.equal(first(x), second(x))
    second(x).sum().backward()
    compiled = torch.compile(second, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), second(x))


def saved(module):
    file = io.BytesIO()
    torch.save(module, file)
    return file.getvalue()


def test_parameters_of_another_memory():
    """functional_call swaps the parameters for a while; the layer's own stay as they were."""
    layer = module()
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    (x,) = tensors((1, 4, 8), grad=False)
    zeros = {name: torch.zeros_like(value) for name, value in before.items()}
    assert not torch.func.functional_call(layer, zeros, (x,)).any()
    with torch.no_grad():
        assert not torch.func.functional_call(layer, zeros, (x,)).any()
    for name, value in layer.state_dict().items():
        assert torch.equal(value, before[name])
    assert layer(x).any()


def test_weights_changed_before_backward_are_noticed():
    layer = module()
    (x,) = tensors((1, 4, 8), grad=False)
    loss = layer(x).sum()
    with torch.no_grad():
        next(layer.parameters()).add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_module_with_cache():
    layer = module().eval()
    (x,) = tensors((1, 4, 8), grad=False)
    cache = ladon.KvCache.contiguous(**layer.layer.cache_options())
    steps = [layer(x[:, i : i + 1], cache=cache) for i in range(4)]
    torch.testing.assert_close(torch.cat(steps, 1), layer(x).detach())


@pytest.mark.parametrize("mask", [None, "bool", "float", "padding", "causal"])
def test_drop_in_multihead_attention(mask):
    torch.manual_seed(3)
    ours = lt.MultiheadAttention(8, 2, batch_first=True, dtype=torch.float64)
    theirs = plain(ours)
    x = torch.randn(3, 5, 8, dtype=torch.float64, requires_grad=True)
    options = {}
    if mask == "bool":
        options["attn_mask"] = torch.rand(5, 5) > 0.7
        options["attn_mask"].fill_diagonal_(False)
    elif mask == "float":
        options["attn_mask"] = torch.randn(6, 5, 5, dtype=torch.float64)
    elif mask == "padding":
        options["key_padding_mask"] = torch.arange(5)[None] >= torch.tensor([3, 5, 1])[:, None]
    elif mask == "causal":
        options["attn_mask"] = torch.nn.Transformer.generate_square_subsequent_mask(5).double()
    out, weights = ours(x, x, x, **options)
    wanted, wanted_weights = theirs(x, x, x, **options)
    torch.testing.assert_close(out, wanted)
    torch.testing.assert_close(weights, wanted_weights.detach())
    grads = torch.autograd.grad(out.square().sum(), [x, *ours.parameters()])
    wanted_grads = torch.autograd.grad(wanted.square().sum(), [x, *theirs.parameters()])
    torch.testing.assert_close(grads, wanted_grads)


def test_tensors_that_need_gradients_are_named():
    q, k, v = tensors((1, 2, 1, 4), (1, 2, 1, 4), (1, 2, 1, 4), dtype=torch.float32)
    slopes = torch.ones(1, requires_grad=True)
    with pytest.raises(ValueError, match="ladon.torch.attention: alibi_slopes: got a tensor that requires a gradient"):
        lt.attention(q, k, v, alibi_slopes=slopes)
    with pytest.raises(ladon.Error, match="ladon.torch"):
        ladon.attention(q, k, v)
    with torch.no_grad():
        ladon.attention(q, k, v)
