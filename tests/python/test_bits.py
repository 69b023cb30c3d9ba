"""Python gives what C++ gives, bit for bit."""

import subprocess

import numpy as np
import pytest

import ladon

ml_dtypes = pytest.importorskip("ml_dtypes", reason="the package ml_dtypes is not installed")

DTYPES = {"f64": np.float64, "f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16}


@pytest.fixture(scope="module")
def read(expected_outputs, tmp_path_factory):
    folder = tmp_path_factory.mktemp("expected")
    subprocess.run([expected_outputs, folder], check=True)

    def read_one(name):
        array = np.load(folder / f"{name}.npy")
        # NumPy reads bfloat16 as two raw bytes.
        return array.view(ml_dtypes.bfloat16) if array.dtype.kind == "V" else array

    return read_one


def expect_bits(got, wanted, what):
    assert got.dtype == wanted.dtype and got.shape == wanted.shape, what
    assert got.tobytes() == wanted.tobytes(), f"{what}: other bits"


@pytest.mark.parametrize("name", DTYPES)
def test_attention(read, name):
    prefix = f"attention_{name}_"
    q, k, v, bias, sinks, dout = (read(prefix + part) for part in ("q", "k", "v", "bias", "sinks", "dout"))
    options = dict(
        scale=0.3, causal=True, window_left=20, bias=bias, kv_lengths=[53, 41], softcap=5, sinks=sinks,
        dropout=0.1, dropout_seed=9,
    )
    out, lse = ladon.attention(q, k, v, return_lse=True, **options)
    assert out.dtype == DTYPES[name]
    expect_bits(out, read(prefix + "out"), "out")
    expect_bits(lse, read(prefix + "lse"), "lse")
    # Any number of threads gives the same bits.
    single = ladon.attention(q, k, v, context=ladon.Context(num_threads=1), **options)
    expect_bits(single, out, "out of one thread")
    gradients = ladon.attention_backward(q, k, v, out, lse, dout, **options)
    for part, gradient in gradients._asdict().items():
        expect_bits(gradient, read(prefix + part), part)
    weights = ladon.attention_weights(q, k, stage="masked", **options)
    expect_bits(weights, read(prefix + "weights"), "weights")
    rotated = ladon.rope(
        q, layout="interleaved", rotary_dim=16, positions=11,
        scaling={"kind": "yarn", "factor": 4, "original_context": 64},
    )
    expect_bits(rotated, read(prefix + "rope"), "rope")


def layer_of(kind, name):
    if kind == "multi_head":
        return ladon.MultiHeadAttention(
            embed_dim=48, num_heads=6, num_kv_heads=2, query_bias=True, causal=True, rope={}, qk_norm=True,
            window_left=7, sinks=True, dtype=name, seed=33,
        )
    return ladon.LatentAttention(
        embed_dim=48, num_heads=4, query_rank=24, kv_rank=16, nope_dim=12, rope_dim=8, causal=True, dtype=name,
        seed=44,
    )


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("kind", ["multi_head", "latent"])
def test_layers(read, kind, name):
    prefix = f"{kind}_{name}_"
    layer = layer_of(kind, name)
    x = read(prefix + "x")
    expect_bits(layer(x), read(prefix + "out"), "out")
    cache = ladon.KvCache.contiguous(**layer.cache_options(2))
    expect_bits(layer(x[:, :12], cache=cache), read(prefix + "first"), "the first chunk")
    expect_bits(layer(x[:, 12:], cache=cache), read(prefix + "second"), "the second chunk")
    out, saved = layer.forward_training(x)
    dx, dkey, dvalue = layer.backward(out, saved)
    assert dkey is None and dvalue is None
    expect_bits(dx, read(prefix + "dx"), "dx")
    ladon.AdamW(layer, learning_rate=0.01).step()
    for parameter, value in layer.parameters().items():
        expect_bits(value, read(f"{prefix}after_{parameter}"), parameter)
