"""ladon.convert: the conversions are tested in C++; here that Python reaches them."""

import numpy as np
import pytest

import ladon
from ladon import convert

try:
    convert.to_mla(ladon.MultiHeadAttention(embed_dim=4, num_heads=2))
except ladon.UnsupportedError as error:
    pytest.skip(f"this build has no conversions: {error}", allow_module_level=True)


@pytest.fixture
def layer():
    return ladon.MultiHeadAttention(embed_dim=24, num_heads=4, head_dim=6, causal=True, rope={}, dtype="f64", seed=3)


@pytest.fixture
def inputs():
    return np.random.default_rng(1).normal(size=(6, 12, 24))


def calibrate(x):
    calibration = convert.Calibration(x.shape[-1])
    calibration.add(x)
    return calibration


def test_exact(layer, inputs):
    latent, summary = convert.to_mla(layer)
    assert summary["exact"] and isinstance(latent, ladon.LatentAttention)
    np.testing.assert_allclose(latent(inputs), layer(inputs), atol=1e-12)
    np.testing.assert_allclose(convert.to_mha(latent)(inputs), layer(inputs), atol=1e-12)
    np.testing.assert_allclose(convert.to_mqa(latent)(inputs), layer(inputs), atol=1e-12)
    again, summary = convert.reduce_rank(latent)
    assert summary["exact"] and summary["cache_after"] == convert.cache_elements(again)
    grouped = ladon.MultiHeadAttention(embed_dim=24, num_heads=4, num_kv_heads=2, dtype="f64", seed=3)
    back, summary = convert.to_gqa(convert.to_mha(grouped), 2)
    assert summary["exact"] and summary["head_order"] == [0, 1, 2, 3]
    np.testing.assert_array_equal(back.parameters()["k_proj.weight"], grouped.parameters()["k_proj.weight"])


def test_losses(layer, inputs, tmp_path):
    calibration = calibrate(inputs)
    assert calibration.width == 24 and calibration.tokens == 72
    calibration.save(tmp_path / "c.safetensors")
    loaded = convert.Calibration.load(tmp_path / "c.safetensors")
    assert loaded.tokens == 72
    converted, summary = convert.to_gqa(layer, 2, calibration=loaded)
    assert not summary["exact"] and 0 < summary["discarded"] < 1
    before = convert.compare_layers(layer, converted, inputs, head_order=summary["head_order"])
    convert.refit_output(layer, converted, list(inputs))
    chosen = convert.compare_layers(layer, converted, inputs, head_order=summary["head_order"])
    assert chosen["output_error"] <= before["output_error"]
    convert.refit_output(layer, converted, list(inputs), ridge=1e-6)
    after = convert.compare_layers(layer, converted, inputs, head_order=summary["head_order"])
    assert 0 < after["output_error"] < before["output_error"] < 1
    assert (after["cache_before"], after["cache_after"]) == (48, 24)
    mean, _ = convert.to_gqa(layer, 2, merge="mean", grouping="consecutive")
    assert convert.compare_layers(layer, mean, inputs)["output_error"] > before["output_error"]
    latent, summary = convert.to_mla(layer, kv_rank=8, rope_dim=4, choice="energy", calibration=calibration)
    assert latent.options["kv_rank"] == 8 and len(latent.options["rope"]["frequencies"]) == 2
    assert abs(sum(summary["spectrum"]) - 1) < 1e-9


def test_balance_channels(layer, inputs):
    inputs = inputs * np.where(np.arange(24) == 3, 50, 1)
    layer.parameters()["k_proj.weight"][1] *= 20
    balanced, summary = convert.balance_channels(layer, calibration=calibrate(inputs))
    assert summary["keys_balanced"] and summary["limited"] == 0
    assert 1 <= summary["key_spread_after"] < 2 < summary["key_spread_before"]
    assert np.log2(summary["largest_factor"]) >= 2
    np.testing.assert_array_equal(balanced(inputs), layer(inputs))
    weights = [each.parameters()["k_proj.weight"] for each in (balanced, layer)]
    assert np.all(weights[0][1] == weights[1][1] * (weights[0][1, 0] / weights[1][1, 0]))
    with pytest.raises(ladon.InvalidArgumentError, match="balance_channels: layer: got a LatentAttention"):
        convert.balance_channels(convert.to_mla(layer)[0])


def test_errors(layer, inputs):
    with pytest.raises(ladon.InvalidArgumentError, match="to_gqa: num_kv_heads: got 3"):
        convert.to_gqa(layer, 3)
    with pytest.raises(ladon.InvalidArgumentError, match="merge: got 'x'"):
        convert.to_gqa(layer, 2, merge="x")
    with pytest.raises(TypeError, match="calibration: got int, expected a ladon.convert.Calibration"):
        convert.to_mla(layer, calibration=3)
    with pytest.raises(ladon.InvalidArgumentError, match="expected finite numbers"):
        calibrate(np.full((2, 24), np.nan))
    with pytest.raises(ladon.InvalidArgumentError, match="reduce_rank: layer: got a MultiHeadAttention"):
        convert.reduce_rank(layer)
    with pytest.raises(ladon.InvalidArgumentError, match="got the same layer"):
        convert.refit_output(layer, layer, [inputs])
    normed = ladon.LatentAttention(embed_dim=24, num_heads=4, kv_rank=10, nope_dim=8, rope_dim=4)
    with pytest.raises(ladon.UnsupportedError, match="to_mha: kv_norm"):
        convert.to_mha(normed)


class Handle:
    def __init__(self, module, hook):
        self.module, self.hook = module, hook

    def remove(self):
        self.module.hooks.remove(self.hook)


class Module:
    """What record_inputs() needs of a torch module."""

    def __init__(self):
        self.hooks = []

    def register_forward_pre_hook(self, hook, with_kwargs):
        assert with_kwargs
        self.hooks.append(hook)
        return Handle(self, hook)

    def __call__(self, *args, **kwargs):
        for hook in self.hooks:
            hook(self, args, kwargs)


class Hidden:
    def __init__(self, array):
        self.array = array

    def detach(self):
        return self

    float = cpu = detach

    def numpy(self):
        return self.array


class Model:
    def __init__(self):
        self.modules = {f"model.layers.{n}.self_attn": Module() for n in range(2)}
        self.modules["model.layers.0.mlp"] = Module()

    def named_modules(self):
        return self.modules.items()


def test_record_inputs(tmp_path):
    model = Model()
    first, second = model.modules["model.layers.0.self_attn"], model.modules["model.layers.1.self_attn"]
    x = np.random.default_rng(2).normal(size=(2, 5, 8)).astype(np.float32)
    with convert.record_inputs(model, tmp_path / "acts"):
        for n in range(2):
            first(Hidden(x + n))
            second(hidden_states=Hidden(x - n))
    np.testing.assert_array_equal(np.load(tmp_path / "acts" / "layer_0.npy"), np.concatenate([x, x + 1]))
    np.testing.assert_array_equal(np.load(tmp_path / "acts" / "layer_1.npy"), np.concatenate([x, x - 1]))
    assert not first.hooks
    with pytest.raises(ValueError, match="expected one length"):
        with convert.record_inputs(model, tmp_path / "other"):
            first(Hidden(x))
            first(Hidden(x[:, :3]))
    assert not (tmp_path / "other").exists()
    model.modules = {"mlp": Module()}
    with pytest.raises(ValueError, match="no attention modules"):
        with convert.record_inputs(model, tmp_path):
            pass
