#!/usr/bin/env python3
"""The error of attention over quantised caches, by how their scales are chosen: per token and head (what int8 and
fp8 caches do), per group of channels, per channel, after a fixed rotation, and with values of 4 bits.

    python3 bench/cache_scales.py [--keys N] [--head-dim D] [--spread S] [--seeds N] [--half-scales]

Needs numpy alone: nothing of Ladon runs. A decode step of 8 query heads on 2 KV heads is computed in double over
what each format reads back. The measure is that of docs/numerics.md: the largest error of any element, as a
percentage of the largest output. Queries are not rounded.

Queries are scaled so that the scores of each head have standard deviation S over the keys. Over 4096 normal keys,
S = 2 gives the largest weight of a head about 0.05 and S = 4 about 0.4; the tables print them.

Inputs, one column each:
  normal    unit-normal q, k and v
  key x20   one key channel is 20 times as large
  q /20     the same, and that channel of q is 20 times as small: other channels decide the scores
  offsets   keys as in trained models: a mean of each channel (deviation 0.5); 4 channels have a mean of +-5 to +-20,
            and a quarter of that as deviation
  rope      the same, then rotated by position (base 10000)
  v x10     4 channels of v are 10 times as large
  v /10     the same outputs; errors and outputs of those 4 channels are divided by 10 first

Operations are those that a format adds to int8's of today: for each key and query row, unless it says otherwise.
"""

import argparse

import numpy as np

HEADS, KV_HEADS = 8, 2
CALIBRATION = 512  # tokens, not among those that are cached, from which fixed factors are taken


def round_to(x, mantissa_bits, lowest_exponent):
    """x as a float with so many bits of mantissa, ties to even."""
    exponent = np.maximum(np.frexp(x)[1] - 1, lowest_exponent)
    return np.ldexp(np.rint(np.ldexp(x, mantissa_bits - exponent)), exponent - mantissa_bits)


def scale_of(largest, number, scale_type):
    """As kv_rows.inl has it: the scale that makes the largest magnitude `number`, rounded as it is stored."""
    return np.where(largest / number < 2.0**-126, 0, largest / number).astype(scale_type).astype(np.float64)


def over(x, scale):
    return np.divide(x, scale, out=np.zeros_like(x), where=scale != 0)


def symmetric(x, levels, axis=-1, scale_type=np.float32):
    """Codes of -levels to levels, the nearest, ties to even. One scale along `axis`."""
    scale = scale_of(np.abs(x).max(axis, keepdims=True), levels, scale_type)
    return np.clip(np.rint(over(x, scale)), -levels, levels) * scale


def with_zero_point(x, scale_type):
    """Codes of 0 to 15 and the smallest element."""
    low = x.min(-1, keepdims=True).astype(scale_type).astype(np.float64)
    scale = scale_of(x.max(-1, keepdims=True) - low, 15, scale_type)
    return np.clip(np.rint(over(x - low, scale)), 0, 15) * scale + low


def bf16(x, _):
    return round_to(x, 7, -126)


def token(x, _):
    return symmetric(x, 127)


def fp8(x, _):
    scale = scale_of(np.abs(x).max(-1, keepdims=True), 448, np.float32)
    return np.clip(round_to(over(x, scale), 3, -6), -448, 448) * scale


def grouped(x, group, function):
    """function of each group of channels."""
    return function(x.reshape(*x.shape[:-1], -1, group)).reshape(x.shape)


def by_channel(x, _, tokens=64):
    """One scale for a channel and block of tokens."""
    return symmetric(x.reshape(x.shape[0], -1, tokens, x.shape[-1]), 127, axis=-2).reshape(x.shape)


def hadamard(dim):
    """An orthogonal matrix of +-1 / sqrt(dim): a Hadamard matrix, its columns with fixed random signs."""
    matrix = np.ones((1, 1))
    while len(matrix) < dim:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix * np.random.default_rng(1).choice([-1, 1], dim) / np.sqrt(dim)


def rotated(x, sample, function=token):
    """What is read back, rotated back: the same products as with a rotated query."""
    rotation = hadamard(x.shape[-1])
    return function(x @ rotation.T, sample) @ rotation


def fixed(x, sample, pairs=False):
    """Each channel of a head over a fixed factor: its largest magnitude in a sample, compared with the median channel's,
    as the nearest power of two. Or rope pairs with their largest norm, which rotation does not change."""
    if pairs:
        half = x.shape[-1] // 2
        sample = np.tile(np.hypot(sample[..., :half], sample[..., half:]), 2)
    largest = np.abs(sample).max(-2, keepdims=True)
    factors = 2.0 ** np.rint(np.log2(largest / np.median(largest, -1, keepdims=True)))
    return symmetric(x / factors, 127) * factors


def formats(dim, scale_type):
    """name -> (keys, values, bytes of a key and a value, operations); keys and values come with a sample."""
    size = np.dtype(scale_type).itemsize

    def group(count, levels=127):
        return lambda x, _: grouped(x, count, lambda y: symmetric(y, levels, scale_type=scale_type))

    def zero_point(x, _):
        return grouped(x, 32, lambda y: with_zero_point(y, scale_type))

    def bytes_of(bits, scales, each=size):
        return dim * bits // 8 + scales * each

    whole, four, by32_4 = bytes_of(8, 1, 4), bytes_of(4, 1, 4), bytes_of(4, dim // 32)
    by32, by64 = (bytes_of(8, dim // count) for count in (32, 64))
    sums = "{0} sums a key, {0} weights a value".format
    turn = int(dim * np.log2(dim))
    return {
        "bf16": (bf16, bf16, 4 * dim, ""),
        "fp8, token": (fp8, fp8, 2 * whole, ""),
        "int8, token": (token, token, 2 * whole, ""),
        "int8, groups of 64": (group(64), group(64), 2 * by64, sums(dim // 64)),
        "int8, groups of 32": (group(32), group(32), 2 * by32, sums(dim // 32)),
        "K by channel": (by_channel, token, whole + dim + 4 * dim / 64, f"2 x {dim} a row and 64 keys"),
        "K fixed factors": (fixed, token, 2 * whole, f"{dim} a query, append"),
        "K fixed, rope pairs": (lambda x, s: fixed(x, s, True), token, 2 * whole, f"{dim} a query, append"),
        "K, V fixed factors": (fixed, fixed, 2 * whole, f"{dim} a query, output, 2 x {dim} an append"),
        "K rotated": (rotated, token, 2 * whole, f"{turn} a query, append"),
        "K, V rotated": (rotated, rotated, 2 * whole, f"{turn} a query, output, 2 x {turn} an append"),
        "K rotated, groups of 32": (lambda x, s: rotated(x, s, group(32)), group(32), 2 * by32, "those of both"),
        "V int4, token": (token, lambda x, _: symmetric(x, 7), whole + four, f"unpack {dim} a key"),
        "V int4, groups of 32": (token, group(32, 7), whole + by32_4, f"unpack, {dim // 32} weights a value"),
        "V int4, 32, zero point": (token, zero_point, whole + by32_4 + dim // 32 * size,
                                   f"unpack, {dim // 32} weights and {dim // 32} sums a value"),
        "V int4, 32, rotated": (token, lambda x, s: rotated(x, s, group(32, 7)), whole + by32_4,
                                f"unpack, {dim // 32} weights a value, {turn} an output"),
    }


def rope(x, first):
    """Rotates channel i with channel i + dim / 2; rows are positions from `first` on."""
    half = x.shape[-1] // 2
    angle = (first + np.arange(x.shape[-2]))[:, None] * 10000.0 ** (-np.arange(half) / half)
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * np.cos(angle) - b * np.sin(angle), a * np.sin(angle) + b * np.cos(angle)], -1)


def inputs(kind, seed, keys, dim):
    """q, k, v, and how large the channels of v are. The tokens of the calibration come first."""
    rng = np.random.default_rng(seed)
    q = rng.standard_normal((KV_HEADS, HEADS // KV_HEADS, dim))
    k = rng.standard_normal((KV_HEADS, CALIBRATION + keys, dim))
    v = rng.standard_normal((KV_HEADS, CALIBRATION + keys, dim))
    v_factors = np.ones((KV_HEADS, 1, dim))
    if kind in ("key x20", "q /20"):
        k[..., 5] *= 20
    if kind == "q /20":
        q[..., 5] /= 20
    for head in range(KV_HEADS):
        outliers = rng.choice(dim, 4, replace=False)
        if kind in ("offsets", "rope"):
            mean, deviation = rng.standard_normal(dim) * 0.5, np.ones(dim)
            mean[outliers] = np.array([5, 10, 15, 20]) * rng.choice([-1, 1], 4)
            deviation[outliers] = np.abs(mean[outliers]) / 4
            k[head] = k[head] * deviation + mean
        if kind.startswith("v "):
            v_factors[head, 0, outliers] = 10
    if kind == "rope":
        k, q = rope(k, 0), rope(q[:, :, None], CALIBRATION + keys)[:, :, 0]
    return q, k, v * v_factors, v_factors


def attend(q, k, v):
    scores = q @ k.swapaxes(-1, -2)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return weights @ v, weights


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--keys", type=int, default=4096, help="a multiple of 64 (4096)")
    parser.add_argument("--head-dim", type=int, default=128, help="a power of two, 64 or more (128)")
    parser.add_argument("--spread", type=float, default=2, help="standard deviation of a head's scores (2)")
    parser.add_argument("--seed", type=int, default=1, help="the first seed (1)")
    parser.add_argument("--seeds", type=int, default=5, help="how many seeds (5)")
    parser.add_argument("--half-scales", action="store_true", help="scales of groups are f16, not f32")
    options = parser.parse_args()
    dim = options.head_dim
    if options.keys % 64 or dim < 64 or dim & (dim - 1):
        parser.error("--keys must be a multiple of 64, --head-dim a power of two of at least 64")

    columns = ["normal", "key x20", "q /20", "offsets", "rope", "v x10", "v /10"]
    table = formats(dim, np.float16 if options.half_scales else np.float32)
    errors = {name: np.zeros((options.seeds, len(columns))) for name in table}
    tops = np.zeros((options.seeds, len(columns)))
    for s in range(options.seeds):
        for c, column in enumerate(columns[:-1]):
            q, k, v, v_factors = inputs(column, options.seed + s, options.keys, dim)
            k_sample, k = k[:, :CALIBRATION], k[:, CALIBRATION:]
            v_sample, v = v[:, :CALIBRATION], v[:, CALIBRATION:]
            q *= options.spread / (q @ k.swapaxes(-1, -2)).std(-1, keepdims=True)
            exact, weights = attend(q, k, v)
            tops[s, c:] = weights.max(-1).mean()
            for name, (keys, values, *_) in table.items():
                out, _ = attend(q, keys(k, k_sample), values(v, v_sample))
                errors[name][s, c] = np.abs(out - exact).max() / np.abs(exact).max()
                if c == len(columns) - 2:
                    errors[name][s, c + 1] = np.abs((out - exact) / v_factors).max() / np.abs(exact / v_factors).max()

    print(f"{HEADS} query heads, {KV_HEADS} KV heads, {options.keys} keys, head_dim {dim}, standard deviation of scores "
          f"{options.spread:g}")
    for title, over_seeds in (("mean", np.mean), ("worst", np.max)):
        print(f"\nlargest error, % of the largest output: {title} of {options.seeds} seeds")
        print(f"{'':24}" + "".join(f"{column:>9}" for column in columns))
        for name, found in errors.items():
            print(f"{name:24}" + "".join(f"{100 * x:9.2f}" for x in over_seeds(found, axis=0)))
    print(f"{'largest weight':24}" + "".join(f"{x:9.2f}" for x in tops.mean(0)))
    print(f"\n{'bytes of a token and head':>36}  of bf16  operations besides the products")
    for name, (_, _, size, operations) in table.items():
        print(f"{name:24}{size:12.0f}{size / (4 * dim):9.2f}  {operations}")


if __name__ == "__main__":
    main()
