#!/usr/bin/env python3
"""Ladon's Python package compared with PyTorch on one GPU, in turns, on the same data: attention forward and
backward, neighbours of round shapes, windows, packed batches, growth, and whole layers.

    python3 bench/gpu_table.py [--filter TEXT] [--rounds N] [--no-compile]

Needs PyTorch and the ladon package, both with CUDA. A round is a burst of calls of each contender in
turn; the table has the medians over all rounds. Rates count what is visible alone, so that a window or a
padded head shows what it loses. `ladon bench --device cuda` has the same cases without Python.
"""

import argparse
import statistics

import ladon
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import linear, scaled_dot_product_attention

BF16 = torch.bfloat16


def random(*shape):
    return torch.randn(*shape, device="cuda", dtype=BF16)


def seconds_of(call, calls):
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(calls):
        call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 / calls


def measure(contenders, rounds):
    """The median seconds of each; a contender that cannot run is None."""
    calls, times = {}, {}
    for name, call in list(contenders.items()):
        try:
            call()
            once = seconds_of(call, 2)
        except RuntimeError as problem:  # ladon.Error is one, too
            print(f"  {name}: {str(problem).splitlines()[0][:100]}")
            del contenders[name]
            continue
        calls[name], times[name] = max(3, min(15, int(0.03 / once))), []
    for _ in range(rounds):
        for name, call in contenders.items():
            times[name].append(seconds_of(call, calls[name]))
    return {name: statistics.median(values) for name, values in times.items()}


def visible_pairs(length, causal, window):
    """Pairs of a query and a key that it sees, in one head of one sequence."""
    if not causal:
        return length * length
    seen = min(window + 1, length)
    return seen * (seen + 1) // 2 + (length - seen) * seen


class Attention:
    """Calls of attention on one set of tensors, [batch, length, heads, dim]."""

    def __init__(self, batch, length, heads, kv_heads, dim, value_dim=None, causal=True, window=None, packed=None):
        value_dim = value_dim or dim
        self.options = {"causal": causal}
        if window is not None:
            self.options["window_left"] = window
        lengths = packed or [length] * batch
        if packed:
            offsets = [sum(packed[:i]) for i in range(len(packed) + 1)]
            self.options.update(query_offsets=offsets, kv_offsets=offsets)
            batch, length = 1, sum(packed)
        self.plain = window is None and not packed  # what PyTorch's function has a name for
        self.q = random(batch, length, heads, dim)
        self.k = random(batch, length, kv_heads, dim)
        self.v = random(batch, length, kv_heads, value_dim)
        self.dout = random(batch, length, heads, value_dim)
        pairs = heads * sum(visible_pairs(n, causal, window if window is not None else n) for n in lengths)
        self.forward_flop = 2 * pairs * (dim + value_dim)
        self.backward_flop = 2 * pairs * (3 * dim + 2 * value_dim)
        self.gqa = heads != kv_heads

    def torch_forward(self, backend):
        q, k, v = (x.transpose(1, 2) for x in (self.q, self.k, self.v))

        def call():
            with sdpa_kernel(backend):
                return scaled_dot_product_attention(q, k, v, is_causal=self.options["causal"], enable_gqa=self.gqa)

        return call

    def with_rule(self, flex=None, **rule):
        """Forward with a rule; `flex` is what flex_attention takes for it."""
        self.options.update(rule)
        calls = {"ladon": lambda: ladon.attention(self.q, self.k, self.v, **self.options)}
        if flex is not None:
            q, k, v = (x.transpose(1, 2) for x in (self.q, self.k, self.v))
            compiled = torch.compile(flex_attention)
            calls["flex"] = lambda: compiled(q, k, v, **flex)
        return self.forward_flop, calls

    def forward(self):
        calls = {"ladon": lambda: ladon.attention(self.q, self.k, self.v, **self.options)}
        if self.plain:
            calls["cudnn"] = self.torch_forward(SDPBackend.CUDNN_ATTENTION)
            calls["flash"] = self.torch_forward(SDPBackend.FLASH_ATTENTION)
        return self.forward_flop, calls

    def backward(self):
        out, lse = ladon.attention(self.q, self.k, self.v, return_lse=True, **self.options)
        arrays = (self.q, self.k, self.v, out, lse, self.dout)
        calls = {"ladon": lambda: ladon.attention_backward(*arrays, **self.options)}
        if self.plain:
            inputs = [x.detach().requires_grad_() for x in (self.q, self.k, self.v)]
            q, k, v = (x.transpose(1, 2) for x in inputs)
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                result = scaled_dot_product_attention(q, k, v, is_causal=self.options["causal"], enable_gqa=self.gqa)
            dout = self.dout.transpose(1, 2)
            calls["cudnn"] = lambda: torch.autograd.grad(result, inputs, dout, retain_graph=True)
        return self.backward_flop, calls


class TorchLayer(torch.nn.Module):
    """Llama 3's attention layer as PyTorch has it: one product for q, k and v, cuDNN's attention."""

    def __init__(self, embed_dim, heads, kv_heads, dim, length):
        super().__init__()
        self.heads, self.kv_heads, self.dim = heads, kv_heads, dim
        columns = (heads + 2 * kv_heads) * dim
        self.qkv = torch.nn.Parameter(random(columns, embed_dim) * embed_dim**-0.5)
        self.out = torch.nn.Parameter(random(embed_dim, heads * dim) * embed_dim**-0.5)
        frequencies = 500000.0 ** (-torch.arange(0, dim, 2, device="cuda", dtype=torch.float64) / dim)
        angles = torch.arange(length, device="cuda", dtype=torch.float64)[:, None] * frequencies
        self.cos = angles.cos().to(BF16)[:, None]
        self.sin = angles.sin().to(BF16)[:, None]

    def rotate(self, x):
        a, b = x.chunk(2, dim=-1)
        return torch.cat((a * self.cos - b * self.sin, a * self.sin + b * self.cos), dim=-1)

    def forward(self, x):
        batch, length, _ = x.shape
        rows = linear(x, self.qkv).view(batch, length, -1, self.dim)
        q, k, v = rows.split((self.heads, self.kv_heads, self.kv_heads), dim=2)
        q, k = self.rotate(q), self.rotate(k)
        y = scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True, enable_gqa=True
        )
        return linear(y.transpose(1, 2).reshape(batch, length, -1), self.out)


class Layer:
    """Llama-3-8B's attention layer over whole sequences."""

    def __init__(self, batch, length, with_compiled, embed_dim=4096, heads=32, kv_heads=8, dim=128):
        self.x, self.dout = random(batch, length, embed_dim), random(batch, length, embed_dim)
        self.ours = ladon.MultiHeadAttention(
            embed_dim=embed_dim, num_heads=heads, num_kv_heads=kv_heads, head_dim=dim, causal=True,
            rope={"base": 500000.0}, dtype="bf16", device="cuda")  # fmt: skip
        self.theirs = TorchLayer(embed_dim, heads, kv_heads, dim, length)
        self.peers = {"eager": self.theirs}
        if with_compiled:
            self.peers["compiled"] = torch.compile(self.theirs)
        weights = embed_dim * dim * (2 * heads + 2 * kv_heads)
        products = 2 * batch * length * weights
        pairs = batch * heads * visible_pairs(length, True, length)
        self.flop = products + 4 * pairs * dim
        self.step_flop = 3 * products + 14 * pairs * dim

    def prefill(self):
        def plain(layer):
            def call():
                with torch.no_grad(), sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                    layer(self.x)

            return call

        contenders = {"ladon": lambda: self.ours(self.x)}
        contenders.update((name, plain(layer)) for name, layer in self.peers.items())
        return self.flop, contenders

    def training(self):
        optimiser = ladon.AdamW(self.ours, learning_rate=1e-5)

        def ours():
            _, saved = self.ours.forward_training(self.x)
            self.ours.backward(self.dout, saved)
            optimiser.step()
            self.ours.zero_grad()

        def theirs(layer):
            adam = torch.optim.AdamW(self.theirs.parameters(), lr=1e-5, fused=True)
            x = self.x.detach().requires_grad_()

            def call():
                with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                    layer(x).backward(self.dout)
                adam.step()
                adam.zero_grad()
                x.grad = None

            return call

        contenders = {"ladon": ours}
        contenders.update((name, theirs(layer)) for name, layer in self.peers.items())
        return self.step_flop, contenders


def rule_rows(with_compiled):
    """Forward with one rule each; flex_attention has no dropout."""
    length, heads = 4096, 16

    def attention(causal):
        return Attention(4, length, heads, heads, 128, causal=causal)

    def flex(causal=False, **options):
        if not with_compiled:
            return None
        if causal:
            options["block_mask"] = create_block_mask(lambda b, h, i, j: i >= j, None, None, length, length)
        return options

    def softcap():
        score = lambda s, b, h, i, j: 30 * torch.tanh(s / 30)  # noqa: E731
        return attention(True).with_rule(flex(True, score_mod=score), softcap=30.0)

    def alibi():
        slopes = torch.exp2(-torch.arange(1, heads + 1, device="cuda") * 8.0 / heads)
        score = lambda s, b, h, i, j: s - slopes[h] * (i - j)  # noqa: E731
        return attention(True).with_rule(flex(True, score_mod=score), alibi_slopes=slopes)

    def mask():
        visible = torch.rand(1, 1, length, length, device="cuda") < 0.5
        options = flex()
        if options is not None:
            sees = lambda b, h, i, j: visible[0, 0, i, j]  # noqa: E731
            options["block_mask"] = create_block_mask(sees, None, None, length, length)
        return attention(False).with_rule(options, mask=visible)

    def bias():
        added = random(1, heads, length, length)
        score = lambda s, b, h, i, j: s + added[0, h, i, j]  # noqa: E731
        return attention(False).with_rule(flex(score_mod=score), bias=added)

    def dropout():
        return attention(False).with_rule(dropout=0.1, dropout_seed=1)

    for name, make in {"causal, softcap": softcap, "causal, ALiBi": alibi, "full, mask": mask, "full, bias": bias,
                       "full, dropout": dropout}.items():  # fmt: skip
        yield f"forward B4 H{heads} S{length} D128 {name}", make


def rows(with_compiled):
    """(name, what makes its contenders), in the table's order."""
    heads_16 = {"heads": 16, "kv_heads": 16, "dim": 128}
    shapes = {
        "B16 H16 S1024 D128 causal": lambda: Attention(16, 1024, **heads_16),
        "B4 H16 S4096 D128 causal": lambda: Attention(4, 4096, **heads_16),
        "B1 H16 S16384 D128 causal": lambda: Attention(1, 16384, **heads_16),
        "B4 H16 S4096 D128 full": lambda: Attention(4, 4096, **heads_16, causal=False),
        "B2 H32/8 S8192 D128 causal": lambda: Attention(2, 8192, 32, 8, 128),
        "B1 H32 S16384 D64 causal": lambda: Attention(1, 16384, 32, 32, 64),
        "B1 H8 S16384 D256 causal": lambda: Attention(1, 16384, 8, 8, 256),
        "B1 H128 S4096 192/128 causal": lambda: Attention(1, 4096, 128, 128, 192, 128),
    }
    for name, make in shapes.items():
        yield "forward " + name, lambda make=make: make().forward()
    for name, make in shapes.items():
        yield "backward " + name, lambda make=make: make().backward()
    neighbours = {
        "B4 H16 S4000": lambda: Attention(4, 4000, **heads_16),
        "B4 H16 S4100": lambda: Attention(4, 4100, **heads_16),
        "B4 H16 S4096 D120": lambda: Attention(4, 4096, 16, 16, 120),
        "B4 H16 S4096 D136": lambda: Attention(4, 4096, 16, 16, 136),
        "B4 H15 S4096": lambda: Attention(4, 4096, 15, 15, 128),
        "B1 H16 S16384 window 1024": lambda: Attention(1, 16384, **heads_16, window=1023),
        "H16 16384 tokens packed as 1000, 5000, 300, 8192, 1892": lambda: Attention(
            1, 0, **heads_16, packed=[1000, 5000, 300, 8192, 1892]),
    }  # fmt: skip
    for name, make in neighbours.items():
        yield "forward " + name, lambda make=make: make().forward()
    yield from rule_rows(with_compiled)
    for length in (2048, 4096, 8192, 16384, 32768):
        yield f"growth S{length}", lambda length=length: Attention(1, length, 16, 16, 128).forward()
    for batch, length in ((4, 4096), (1, 16384), (16, 512)):
        yield f"layer prefill B{batch} S{length}", lambda b=batch, n=length: Layer(b, n, with_compiled).prefill()
        yield f"layer training step B{batch} S{length}", lambda b=batch, n=length: Layer(b, n, with_compiled).training()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--filter", default="", metavar="TEXT", help="only rows whose name has TEXT in it")
    parser.add_argument("--rounds", type=int, default=7, metavar="N")
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out, which takes minutes")
    arguments = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}, Ladon {ladon.__version__}, bf16")
    for name, make in rows(not arguments.no_compile):
        if arguments.filter not in name:
            continue
        flop, contenders = make()
        medians = measure(contenders, arguments.rounds)
        ours = medians.pop("ladon", None)
        if ours is None:
            continue
        peers = ", ".join(f"{peer} {flop / t / 1e12:.0f} ({t / ours:.2f}x)" for peer, t in medians.items())
        print(f"{name}: {ours * 1e3:.3f} ms, {flop / ours / 1e12:.0f} TFLOP/s; {peers}", flush=True)


if __name__ == "__main__":
    main()
