"""Random calls with bad arguments: a clean exception or a result, never a crash.

LADON_PYTHON_FUZZ_CALLS=1000000 LADON_PYTHON_FUZZ_SEED=2 pytest tests/python/test_fuzz.py asks for a long run.
"""

import os
import random as stdlib_random

import numpy as np
import pytest

import ladon

try:
    import ml_dtypes
except ImportError:
    ml_dtypes = None

CALLS = int(os.environ.get("LADON_PYTHON_FUZZ_CALLS", "20000"))
SEED = int(os.environ.get("LADON_PYTHON_FUZZ_SEED", "1"))
# What a call may raise. Memory and files that cannot be had come as ladon.Error too.
CLEAN = (ladon.Error, TypeError, ValueError)

ATTENTION_OPTIONS = (
    "causal scale alignment window_left window_right mask bias kv_lengths query_offsets kv_offsets softcap "
    "position_offset alibi_slopes sinks dropout dropout_seed dropout_first_sequence dropout_first_head "
    "dropout_first_query dropout_first_key out return_lse context stage dtype wanted dlse"
).split()
LAYER_OPTIONS = (
    "causal mask bias kv_lengths new_lengths query query_positions key_positions dropout_seed cache return_weights out "
    "context"
).split()
CACHE_OPTIONS = "batch num_kv_heads head_dim value_dim values_in_keys num_heads mha_dim dtype capacity".split()
MULTI_HEAD_OPTIONS = (
    "embed_dim num_heads num_kv_heads head_dim key_dim value_input_dim query_bias rope qk_norm qk_norm_epsilon scale "
    "softcap window_left window_right alibi_slopes sinks dropout dtype seed"
).split()
LATENT_OPTIONS = (
    "embed_dim num_heads query_rank kv_rank nope_dim rope_dim value_dim query_norm kv_norm norm_epsilon rope scale "
    "dropout form dtype seed"
).split()
ROPE_OPTIONS = "layout rotary_dim base scaling frequencies magnitude positions cos sin out context".split()
PLAN_OPTIONS = "length batch num_layers dtype num_heads head_dim value_dim num_kv_heads kv_rank rope_dim".split()


class BadIndex:
    def __index__(self):
        raise ZeroDivisionError("no index")


class BadFloat:
    def __float__(self):
        raise ZeroDivisionError("no float")


class BadDlpack:
    def __dlpack__(self, **kwargs):
        return "not a capsule"

    def __dlpack_device__(self):
        return (1, 0)


class BadDtype:
    name = 3


class Fuzzer:
    def __init__(self, seed, folder):
        self.choose = stdlib_random.Random(seed)
        self.numbers = np.random.default_rng(seed)
        self.folder = folder
        self.layers = [
            ladon.MultiHeadAttention(embed_dim=8, num_heads=4, num_kv_heads=2, rope={}),
            ladon.LatentAttention(embed_dim=8, num_heads=2, kv_rank=3, nope_dim=4, rope_dim=2),
        ]
        self.pool = ladon.PagePool(num_kv_heads=2, head_dim=4, page_size=2, num_pages=16)
        self.new_caches()

    def new_caches(self):
        self.caches = [
            ladon.KvCache.contiguous(num_kv_heads=2, head_dim=4, batch=2),
            ladon.KvCache.window(num_kv_heads=2, head_dim=4, batch=2, window_left=3),
            ladon.KvCache.paged(self.pool, 2),
            ladon.KvCache.contiguous(**self.layers[1].cache_options(2)),
        ]

    def array(self, *shape):
        """Sound more often than not."""
        array = self.numbers.standard_normal(shape).astype(np.float32)
        fault = self.choose.randrange(60)
        if fault == 0:
            types = [np.float64, np.float16, np.int32, np.bool_, np.complex64, ">f4", "U3", object, "f4,f4"]
            types += [ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn] if ml_dtypes else []
            return array.astype(np.float64).astype(self.choose.choice(types[:-3] + types[-2:]))
        if fault == 1 and array.ndim:
            return array[..., ::-1]
        if fault == 2:
            return array.reshape((1,) * self.choose.randrange(6) + array.shape)
        if fault == 3 and array.ndim:
            return array[self.choose.randrange(array.shape[0] + 1) :]
        if fault == 4:
            return np.asfortranarray(array)
        if fault == 5:
            array.flags.writeable = False
            return array
        if fault == 6:
            return np.broadcast_to(array[..., :1] if array.ndim else array, shape)
        if fault == 7:
            return self.value()
        if fault == 8:
            memory = bytearray(array.nbytes + 1)
            return np.frombuffer(memory, np.uint8)[1:].view(np.float32).reshape(shape)
        if fault == 9:
            array.fill(self.choose.choice([np.nan, np.inf, 0, 1e38]))
        return array

    def value(self):
        """Anything at all."""
        choices = [
            None, True, False, 0, 1, 2, 3, 4, 7, -1, -7, 2**62, 2**63, 2**64, -(2**63), 10**30, 0.0, 0.5, 1.0, -2.5,
            float("nan"), float("inf"), "", "f32", "bf16", "i8", "top_left", "interleaved", "torch", "\udcff", "a\0b",
            b"bytes", bytearray(8), [], [1], [1, 2], [2, 2], [0, 2, 4], [-1, 3], ["x"], [None], [2**70], (), (1, 2),
            {}, {"base": 10.0}, {"kind": "yarn", "factor": 2}, {"kind": "linear", "factor": -1}, {3: 4}, {"layout": 1},
            {"scaling": {"kind": "llama3", "factor": 8.0}}, object(), object, np.float32, np.float32(3), np.int8(2),
            np.bool_(True), np.array(3), np.array([1, 2]), np.array([[0, 1, 2], [3, 4, 5]]), np.ones(4), np.zeros(0),
            np.ones((3, 3), bool), np.ones((2, 4, 3, 3), np.float32), np.zeros((1,) * 9, np.float32), memoryview(b"abcd"),
            BadIndex(), BadFloat(), BadDlpack(), BadDtype(), np.ones(3).__dlpack__(), self.layers, iter([1]), range(3),
            1j, lambda: 1, self.caches[0], self.pool, self.layers[0], ladon.Context, str(self.folder), self.folder,
            np.dtype("f4"), ladon,
        ]  # fmt: skip
        return self.choose.choice(choices)

    def options(self, names, most=2):
        options = {name: self.value() for name in self.choose.sample(names, self.choose.randrange(most))}
        if self.choose.randrange(50) == 0:
            options["surplus"] = 1
        return options

    def qkv(self):
        batch, length = self.choose.choice([0, 1, 2]), self.choose.randrange(5)
        return (
            self.array(batch, self.choose.randrange(4), 4, 4),
            self.array(batch, length, 2, 4),
            self.array(batch, length, 2, self.choose.choice([4, 4, 3])),
        )

    def call_attention(self):
        q, k, v = self.qkv()
        kind = self.choose.randrange(5)
        options = self.options(ATTENTION_OPTIONS)
        if kind == 0:
            return ladon.attention_weights(q, k, **options)
        if kind == 1:
            return ladon.attention_backward(q, k, v, self.array(2, 3, 4, 4), self.array(2, 4, 3), q, **options)
        if kind == 2:
            return ladon.merge_attention([q, q], [self.array(2, 4, 3)] * 2, **options)
        return ladon.attention(q, k, v, **options)

    def call_rope(self):
        x = self.array(2, 3, 2, 4)
        run = self.choose.choice([ladon.rope, ladon.rope_backward])
        if self.choose.randrange(10) == 0:
            return ladon.make_rope_table(self.value(), self.choose.choice([2, 4, self.value()]), **self.options(["base", "dtype"]))
        return run(x, **self.options(ROPE_OPTIONS))

    def call_layer(self):
        layer = self.choose.choice(self.layers)
        x = self.array(2, 3, 8)
        kind = self.choose.randrange(9)
        if kind == 0:
            return layer.backward(x, self.choose.choice([layer.forward_training(np.ones((2, 3, 8), np.float32))[1], self.value()]))
        if kind == 1:
            return layer.set_parameter(self.choose.choice([*layer.parameters(), self.value()]), self.array(8, 8))
        if kind == 2:
            return layer.forward_from(x, self.choose.choice([*self.caches, self.value()]), **self.options(LAYER_OPTIONS))
        if kind == 3:
            return layer.parameters(self.value()) or layer.gradients(self.value())
        if kind == 4:
            return layer.cache_options(self.value(), self.value())
        if kind == 5:
            return layer.forward_training(x, **self.options(LAYER_OPTIONS))
        if kind == 6:
            return layer(x, cache=self.choose.choice(self.caches), **self.options(["new_lengths", "mask", "out"]))
        return layer(x, **self.options(LAYER_OPTIONS))

    def call_cache(self):
        cache = self.choose.choice(self.caches)
        if cache.batch > 6 or max([cache.length(b) for b in range(cache.batch)], default=0) > 60:
            self.new_caches()
        run = self.choose.randrange(11)
        number = self.choose.choice([0, 1, 2, 5, self.value()])
        if run == 0:
            return cache.truncate(number, self.choose.choice([0, 3, self.value()]))
        if run == 1:
            return cache.reorder(self.choose.choice([[0, 1], [1, 0], [1], self.value()]))
        if run == 2:
            return cache.reset(number)
        if run == 3:
            return cache.length(number) + cache.held(number)
        if run == 4:
            return cache.publish_prefix(number, self.value())
        if run == 5:
            return cache.adopt_prefix(number, self.value())
        if run == 6:
            return cache.attention(self.array(2, 1, 4, 4), **self.options(ATTENTION_OPTIONS))
        if run == 7:
            return cache.fork().append(self.array(2, 1, 2, 4), self.array(2, 1, 2, 4))
        if run == 8:
            return cache.load(self.choose.choice([self.folder / "none", self.value()]))
        return cache.append(self.array(2, 1, 2, 4), self.array(2, 1, 2, 4), *self.choose.choice([[], [[1, 1]], [self.value()]]))

    def call_makers(self):
        small = self.choose.choice([2, 4, 8])
        kind = self.choose.randrange(8)
        if kind == 0:
            return ladon.MultiHeadAttention(**{"embed_dim": 8, "num_heads": small, **self.options(MULTI_HEAD_OPTIONS)})
        if kind == 1:
            sizes = {"embed_dim": 8, "num_heads": 2, "kv_rank": 3, "nope_dim": small}
            return ladon.LatentAttention(**{**sizes, **self.options(LATENT_OPTIONS)})
        if kind == 2:
            return ladon.KvCache.contiguous(**{"num_kv_heads": 2, "head_dim": small, **self.options(CACHE_OPTIONS)})
        if kind == 3:
            sizes = {"num_kv_heads": 2, "head_dim": small, "window_left": 3}
            return ladon.KvCache.window(**{**sizes, **self.options([*CACHE_OPTIONS[:-1], "window_left", "spare"])})
        if kind == 4:
            sizes = {"num_kv_heads": 2, "head_dim": small, "page_size": 2, "num_pages": 3}
            return ladon.PagePool(**{**sizes, **self.options([*CACHE_OPTIONS[:-1], "page_size", "num_pages"])})
        if kind == 5:
            return ladon.plan(**{"length": 8, "num_heads": 2, "head_dim": 4, **self.options(PLAN_OPTIONS)})
        if kind == 6:
            return ladon.Context(**self.options(["isa"]))
        return ladon.KvCache.paged(self.choose.choice([self.pool, self.value()]), self.value())

    def call_files(self):
        kind = self.choose.randrange(6)
        if kind == 0:
            return ladon.describe_model(self.value(), **self.options(["ignored_fields"]))
        if kind == 1:
            return ladon.load_attention(self.value(), self.value(), **self.options(["dtype", "ignored_fields"]))
        if kind == 2:
            return ladon.attention_tensors(self.choose.choice([*self.layers, self.value()]), self.value(), self.value())
        if kind == 3:
            path = self.folder / "fuzz.safetensors"
            return ladon.save_safetensors(path, {"a": self.value()}, self.value())
        if kind == 4:
            return ladon.load_safetensors(self.value(), self.value())
        return ladon.clip_gradients(self.value(), self.value()), ladon.Sgd(self.value()), ladon.AdamW(self.value())

    def call(self):
        calls = [self.call_attention] * 4 + [self.call_layer] * 3 + [self.call_cache] * 3
        calls += [self.call_rope, self.call_makers, self.call_files]
        return self.choose.choice(calls)


@pytest.mark.filterwarnings("ignore")
def test_random_calls(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fuzzer = Fuzzer(SEED, tmp_path)
    refused = 0
    for number in range(CALLS):
        call = fuzzer.call()
        try:
            call()
        except CLEAN as error:
            refused += 1
            assert str(error), f"call {number} of seed {SEED}: {call.__name__}: no message"
        except ZeroDivisionError as error:
            assert str(error) in ("no index", "no float")  # the caller's own
        except Exception as error:
            raise AssertionError(f"call {number} of seed {SEED}: {call.__name__}: {error!r}") from error
    # The layers still compute, and some calls went through.
    assert np.isfinite(ladon.attention(*[np.ones((1, 2, 1, 4), np.float32)] * 3)).all()
    assert CALLS // 10 < refused < CALLS
    print(f"{CALLS} calls, {refused} of them refused")
