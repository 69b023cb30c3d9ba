"""Layers from model folders and back, and safetensors files."""

import json

import numpy as np
import pytest

import ladon
import ladon.distributed

CONFIG = {
    "model_type": "llama",
    "hidden_size": 24,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500.0,
    "vocab_size": 10,
    "torch_dtype": "float32",
}


@pytest.fixture
def folder(tmp_path):
    """A model of two layers, written by Ladon."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    tensors = {}
    for index, options in enumerate(ladon.describe_model(tmp_path)["layers"]):
        tensors.update(ladon.attention_tensors(ladon.MultiHeadAttention(**options, seed=index), "llama", index))
    ladon.save_safetensors(tmp_path / "model.safetensors", tensors, {"by": "ladon"})
    return tmp_path


def test_describe(folder):
    model = ladon.describe_model(folder)
    assert model["family"] == "llama" and model["num_layers"] == 2 and model["head_dim"] == 4
    assert model["dtype"] == "f32" and len(model["layers"]) == 2
    assert model["layers"][0]["rope"]["base"] == 500.0
    assert "llama" in ladon.model_families()


def test_load(folder, random):
    layer = ladon.load_attention(folder, 1)
    assert isinstance(layer, ladon.MultiHeadAttention) and isinstance(layer, ladon.AttentionLayer)
    assert not layer.training
    options = ladon.describe_model(str(folder))["layers"][1]
    x = random(1, 5, 24)
    assert np.array_equal(layer(x), ladon.MultiHeadAttention(**options, seed=1)(x))
    assert ladon.load_attention(folder, 0, dtype="f64").dtype == "f64"
    with pytest.raises(ladon.Error, match="layer_index"):
        ladon.load_attention(folder, 2)


def test_errors_name_the_function_that_was_called(folder, tmp_path):
    """Not those that it calls in turn."""
    (ranks,) = ladon.distributed.make_thread_communicators(1)
    with pytest.raises(ladon.InvalidArgumentError, match="^plan: length: got -3"):
        ladon.plan(length=-3, num_layers=2, num_heads=2, head_dim=2)
    layer = ladon.MultiHeadAttention(embed_dim=8, num_heads=2)
    nowhere = folder / "nowhere"
    for name, call in {
        "load_attention": lambda path: ladon.load_attention(path, 0),
        "describe_model": ladon.describe_model,
        "plan": lambda path: ladon.plan(path, length=3),
        "load_torch_attention": lambda path: ladon.load_torch_attention(path, num_heads=2),
        "load_training": lambda path: ladon.distributed.load_training(path, layer, ladon.AdamW(layer)),
        "load_tensor_parallel_attention": lambda path: ladon.distributed.load_tensor_parallel_attention(ranks, path, 0),
    }.items():
        with pytest.raises(FileNotFoundError, match=f"^{name}: .*nowhere"):
            call(nowhere)
    with pytest.raises(ladon.Error, match="^MultiHeadAttention: rope.scaling.factor: got 0"):
        ladon.MultiHeadAttention(embed_dim=8, num_heads=2, rope={"scaling": {"kind": "llama3", "factor": 0}})
    with pytest.raises(ladon.Error, match='^MultiHeadAttention.set_parameter: name: got "w", expected one of q_proj'):
        layer.set_parameter("w", np.zeros(3))
    pages = np.zeros((3, 4, 2, 4), "f4")
    with pytest.raises(ladon.Error, match="^paged_attention: cache: sequence 0: got page 9"):
        ladon.paged_attention(np.zeros((1, 1, 4, 4), "f4"), pages, pages, [[9]], [4])
    (folder / "model.safetensors").unlink()
    with pytest.raises(ladon.FileError, match="^load_attention: .* got neither model.safetensors nor"):
        ladon.load_attention(folder, 0)


def test_refusals(folder):
    config = dict(CONFIG, attention_flavour="odd")
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ladon.UnsupportedError, match="attention_flavour"):
        ladon.describe_model(folder)
    assert ladon.describe_model(folder, ignored_fields=["attention_flavour"])["num_heads"] == 6
    with pytest.raises(TypeError, match="ignored_fields"):
        ladon.describe_model(folder, ignored_fields="attention_flavour")
    (folder / "config.json").write_text("{")
    with pytest.raises(ladon.FileError):
        ladon.describe_model(folder)


def test_plan_of_a_model(folder):
    rows = {row["kind"]: row for row in ladon.plan(folder, length=100, batch=3)}
    assert rows["GQA"]["bytes"] == 2 * 100 * 3 * 2 * 2 * 4 * 4
    assert rows["MHA"]["bytes"] == 3 * rows["GQA"]["bytes"]
    assert ladon.plan(folder, length=100, dtype="bf16")[0]["bytes"] == rows["MHA"]["bytes"] // 6


def test_safetensors_go_round(tmp_path):
    path = tmp_path / "some.safetensors"
    tensors = {
        "a": np.arange(6, dtype=np.float32).reshape(2, 3),
        "b": np.arange(6, dtype=np.int64).reshape(3, 2).T,
        "empty": np.zeros((0, 3), np.float16),
    }
    ladon.save_safetensors(path, tensors)
    loaded = ladon.load_safetensors(path)
    assert set(loaded) == set(tensors)
    for name, wanted in tensors.items():
        assert loaded[name].dtype == wanted.dtype and np.array_equal(loaded[name], wanted)
    assert set(ladon.load_safetensors(path, ["a"])) == {"a"}
    with pytest.raises(ladon.FileError, match="nothing"):
        ladon.load_safetensors(path, names=["nothing"])


def test_torch_layout(tmp_path, random):
    layer = ladon.MultiHeadAttention(
        embed_dim=8, num_heads=2, query_bias=True, key_bias=True, value_bias=True, out_bias=True, seed=3
    )
    tensors = ladon.torch_attention_tensors(layer, "self_attn.")
    assert set(tensors) == {f"self_attn.{n}" for n in ("in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias")}
    ladon.save_safetensors(tmp_path / "a.safetensors", tensors)
    again = ladon.load_torch_attention(tmp_path / "a.safetensors", num_heads=2, prefix="self_attn.")
    x = random(1, 4, 8)
    assert np.array_equal(again(x), layer(x))


def test_latent_models(tmp_path, random):
    config = {
        "model_type": "deepseek_v3",
        "hidden_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "q_lora_rank": None,
        "kv_lora_rank": 10,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 6,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "vocab_size": 10,
        "torch_dtype": "float32",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    options = ladon.describe_model(tmp_path)["layers"][0]
    made = ladon.LatentAttention(**options, seed=2)
    ladon.save_safetensors(tmp_path / "model.safetensors", ladon.attention_tensors(made, "deepseek_v3", 0))
    layer = ladon.load_attention(tmp_path, 0)
    assert isinstance(layer, ladon.LatentAttention) and layer.latent_dim == 14
    x = random(1, 5, 24)
    assert np.array_equal(layer(x), made(x))
    rows = {row["kind"]: row for row in ladon.plan(tmp_path, length=100)}
    assert rows["MLA"]["elements"] == 100 * 14
    assert rows["MHA"]["elements"] == 100 * 4 * (12 + 6)
