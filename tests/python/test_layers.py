"""Both layers: forward, caches, training, parameters, copies."""

import copy

import numpy as np
import pytest

import ladon


def multi_head(**options):
    defaults = dict(embed_dim=24, num_heads=6, num_kv_heads=2, causal=True, rope={}, seed=1)
    return ladon.MultiHeadAttention(**{**defaults, **options})


def latent(**options):
    defaults = dict(embed_dim=24, num_heads=4, kv_rank=10, nope_dim=8, rope_dim=4, causal=True, seed=1)
    return ladon.LatentAttention(**{**defaults, **options})


@pytest.fixture(params=[multi_head, latent], ids=["multi_head", "latent"])
def make(request):
    return request.param


def test_options_go_round(make, random):
    layer = make(dropout=0.1)
    again = type(layer)(**layer.options, seed=1)
    assert again.options == layer.options
    x = random(2, 5, 24)
    assert np.array_equal(again(x), layer(x))
    assert layer.embed_dim == 24 and layer.dtype == "f32" and layer.training
    assert layer.parameter_count == sum(p.size for p in layer.parameters().values())
    assert type(layer).__name__ in repr(layer)
    explicit = make(rope={"frequencies": [0.5, 0.25], "magnitude": 1.5})
    assert explicit.options["rope"]["frequencies"] == [0.5, 0.25]
    assert explicit.options["rope"]["magnitude"] == 1.5
    assert np.array_equal(type(layer)(**explicit.options, seed=1)(x), explicit(x))
    assert not np.array_equal(explicit(x), layer(x))


def test_cached_calls_give_the_whole(make, random):
    layer = make()
    x = random(2, 9, 24)
    whole = layer(x)
    caches = [
        ladon.KvCache.contiguous(**layer.cache_options(2)),
        ladon.KvCache.paged(ladon.PagePool(page_size=2, num_pages=20, **layer.cache_options()), 2),
    ]
    for cache in caches:
        parts = [layer(x[:, :4], cache=cache)] + [layer(x[:, i : i + 1], cache=cache) for i in range(4, 9)]
        np.testing.assert_allclose(np.concatenate(parts, 1), whole, atol=1e-5)
    past = ladon.KvCache.contiguous(**layer.cache_options(2))
    layer(x[:, :8], cache=past)
    out, new = layer.forward_from(x[:, 8:], past)
    np.testing.assert_allclose(out, whole[:, 8:], atol=1e-5)
    assert past.length() == 8 and new.length() == 9
    given = np.empty((2, 1, 24), np.float32)
    assert layer(x[:, 8:], cache=past, out=given) is given and np.array_equal(given, out)


def test_new_lengths(make, random):
    layer = make()
    x = random(2, 4, 24)
    cache = ladon.KvCache.contiguous(**layer.cache_options(2))
    out = layer(x, cache=cache, new_lengths=[4, 2])
    assert [cache.length(0), cache.length(1)] == [4, 2] and not out[1, 2:].any()
    np.testing.assert_allclose(out[1, :2], layer(x[1:, :2])[0], atol=1e-6)


def test_training_follows_the_slope(make, random):
    layer = make(dtype="f64")
    x = random(1, 4, 24, dtype=np.float64)
    probe = random(1, 4, 24, dtype=np.float64)
    out, saved = layer.forward_training(x)
    np.testing.assert_allclose(out, layer(x), atol=1e-12)
    dx, _, _ = layer.backward(probe, saved)
    step = 1e-6

    def slope(array, index):
        old = array[index]
        array[index] = old + step
        high = (layer(x) * probe).sum()
        array[index] = old - step
        low = (layer(x) * probe).sum()
        array[index] = old
        return (high - low) / (2 * step)

    np.testing.assert_allclose(dx[0, 2, 3], slope(x, (0, 2, 3)), rtol=1e-4, atol=1e-7)
    for name, gradient in layer.gradients().items():
        index = (1,) * gradient.ndim
        np.testing.assert_allclose(gradient[index], slope(layer.parameters()[name], index), rtol=1e-4, atol=1e-7)
    layer.zero_grad()
    assert not any(g.any() for g in layer.gradients().values())


def test_dropout_acts_in_training_mode(make, random):
    layer = make(dropout=0.5)
    x = random(1, 6, 24)
    dropped = layer(x, dropout_seed=5)
    assert np.array_equal(dropped, layer.forward_training(x, dropout_seed=5)[0])
    assert not np.array_equal(dropped, layer(x, dropout_seed=6))
    layer.eval()
    assert not layer.training
    assert np.array_equal(layer(x, dropout_seed=5), layer(x, dropout_seed=6))
    assert np.array_equal(layer(x), make()(x))
    layer.train()
    assert layer.training


def test_parameters_and_copies(make, random):
    layer = make()
    x = random(1, 3, 24)
    before = layer(x)
    twin = copy.deepcopy(layer)
    name = next(iter(layer.parameters()))
    weight = layer.parameters()[name]
    layer.set_parameter(name, np.zeros(weight.shape, np.float64))
    assert not weight.any()
    assert np.array_equal(twin(x), before) and np.array_equal(twin.copy()(x), before)
    with pytest.raises(ladon.InvalidArgumentError, match="set_parameter"):
        layer.set_parameter(name, np.zeros((1, 1), np.float32))


def test_optimisers_learn(make, random):
    layer = make()
    x, target = random(2, 5, 24), random(2, 5, 24)
    optimiser = ladon.AdamW([layer], learning_rate=0.02)
    losses = []
    for _ in range(30):
        out, saved = layer.forward_training(x)
        losses.append(float(((out - target) ** 2).mean()))
        layer.zero_grad()
        layer.backward((out - target) * (2 / out.size), saved)
        assert ladon.clip_gradients(layer, 1.0) > 0
        optimiser.step()
    assert losses[-1] < 0.9 * losses[0]
    assert optimiser.steps_taken == 30
    optimiser.learning_rate = 0.5
    assert optimiser.learning_rate == 0.5
    with pytest.raises(ladon.InvalidArgumentError):
        optimiser.learning_rate = -1
    before = {name: value.copy() for name, value in layer.parameters().items()}
    ladon.Sgd(layer, learning_rate=0.1, momentum=0.5).step()
    for name, value in layer.parameters().items():
        np.testing.assert_allclose(value, before[name] - 0.1 * layer.gradients()[name], atol=1e-6)


def test_cross_attention_and_weights(random):
    layer = ladon.MultiHeadAttention(embed_dim=12, num_heads=3, key_dim=7, value_input_dim=5)
    x, key, value = random(2, 4, 12), random(2, 6, 7), random(2, 6, 5)
    out, weights = layer(x, key, value, return_weights=True)
    assert out.shape == (2, 4, 12) and weights.shape == (2, 3, 4, 6)
    np.testing.assert_allclose(weights.sum(-1), 1, atol=1e-5)
    out, saved = layer.forward_training(x, key, value)
    dx, dkey, dvalue = layer.backward(out, saved)
    assert dx.shape == x.shape and dkey.shape == key.shape and dvalue.shape == value.shape
    masked = layer(x, key, value, kv_lengths=[6, 2])
    shown = np.arange(6) < np.array([6, 2])[:, None]
    np.testing.assert_allclose(masked, layer(x, key, value, mask=shown[:, None, None]), atol=1e-6)


def test_inputs_without_batch(make, random):
    layer = make()
    x = random(5, 24)
    assert np.array_equal(layer(x), layer(x[None])[0])


def test_bfloat16_layers(make, random):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    layer = make(dtype=ml_dtypes.bfloat16)
    assert layer.dtype == "bf16"
    weight = layer.parameters()
    assert all(p.dtype == ml_dtypes.bfloat16 for p in weight.values())
    assert all(g.dtype == np.float32 for g in layer.gradients().values())
    assert layer(random(1, 3, 24).astype(ml_dtypes.bfloat16)).dtype == ml_dtypes.bfloat16


def test_latent_forms(random):
    layer = latent()
    x = random(1, 6, 24)
    outs = []
    for form in ("expanded", "absorbed"):
        layer.form = form
        assert layer.form == form and layer.form_for(1, 100) == form
        outs.append(layer(x))
    np.testing.assert_allclose(*outs, atol=1e-5)
    with pytest.raises(ladon.InvalidArgumentError, match="form: got 'other'"):
        layer.form = "other"
    latents = layer.compress(x)
    assert latents.shape == (1, 6, layer.latent_dim)
    keys, values = layer.expand(latents)
    assert keys.shape == (1, 6, 4, 12) and values.shape == (1, 6, 4, 8)
    cache = ladon.KvCache.contiguous(**layer.cache_options())
    layer(x, cache=cache)
    assert cache.elements_used == 6 * layer.latent_dim and cache.reduction > 0.7


def test_queries_of_their_own(make, random):
    layer = make(causal=False)
    past, x, query = random(2, 5, 24), random(2, 1, 24), random(2, 1, 24)
    cache = ladon.KvCache.contiguous(**layer.cache_options(batch=2))
    layer(past, cache=cache)
    out = layer(x, cache=cache, query=query, query_positions=[[9], [11]])
    assert cache.length() == 6
    everything = np.concatenate([past, x], axis=1)
    wanted = layer(query, key=everything, query_positions=[[9], [11]])
    np.testing.assert_allclose(out, wanted, atol=1e-5)
    with pytest.raises(ladon.InvalidArgumentError, match="forward: x: got"):
        layer(random(2, 1, 23))
    with pytest.raises(ladon.InvalidArgumentError, match="forward: key: got .* x's"):
        layer(x, key=random(3, 1, 24))
    with pytest.raises(ladon.InvalidArgumentError, match="query: got it without a cache"):
        layer(x, query=query)
    with pytest.raises(ladon.InvalidArgumentError, match="query_positions: got a number together with a cache"):
        layer(x, cache=cache, query=query, query_positions=9)


def test_positions_as_nested_lists(make, random):
    layer = make()
    x = random(2, 3, 24)
    positions = [[0, 1, 2], [7, 8, 9]]
    wanted = layer(x, query_positions=np.array(positions), key_positions=np.array(positions))
    assert np.array_equal(layer(x, query_positions=positions, key_positions=positions), wanted)
    with pytest.raises(ladon.InvalidArgumentError, match="got rows of 3 and 2 integers"):
        layer(x, query_positions=[[0, 1, 2], [7, 8]])


def test_backward_after_the_weights_have_changed(make, random):
    layer = make()
    x = random(2, 3, 24)
    out, saved = layer.forward_training(x)
    name = "q_proj.weight"
    layer.set_parameter(name, layer.parameters()[name] * 2)
    with pytest.raises(ladon.InvalidArgumentError, match="saved before the weights changed"):
        layer.backward(out, saved)
