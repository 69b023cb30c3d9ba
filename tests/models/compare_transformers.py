"""Small models made and saved by Hugging Face's transformers, run there and by Ladon.

Usage: compare_transformers.py RUN_LAYER [FAMILY]. Exits with 77 where torch or transformers are
missing. The inputs and outputs of every attention module are taken while the whole model runs: over
the sequence at once, and over a prompt and single tokens with its cache. All of it is in float64:
transformers' own float32 steps (norms, rope, softmax) are made float64.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

try:
    import numpy as np
    import torch
    import transformers
except ImportError as error:
    print(f"skipped: no {error.name}")
    sys.exit(77)

TOLERANCE = 1e-10  # relative; both sides compute in f64
LENGTH = 23
PROMPT = 15

# What transformers' code finds when it asks for single precision.
torch.set_default_dtype(torch.float64)
torch.float = torch.float32 = torch.float64
torch.Tensor.float = torch.Tensor.double
LLAMA = dict(hidden_size=48, num_attention_heads=6, num_key_value_heads=2, num_hidden_layers=3,
             intermediate_size=64, vocab_size=99, max_position_embeddings=128)
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32,
        "beta_fast": 32.0, "beta_slow": 1.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 32}
GPT = dict(n_embd=48, n_head=6, n_layer=2, vocab_size=99, n_positions=64)


def cases():
    """(name, config, where the attention modules are)."""
    t = transformers
    layers = lambda model: [layer.self_attn for layer in model.model.layers]
    blocks = lambda model: [block.attn for block in model.transformer.h]
    falcon = lambda model: [block.self_attention for block in model.transformer.h]
    yield "llama", t.LlamaConfig(**LLAMA), layers
    yield "llama, bias, head_dim", t.LlamaConfig(**LLAMA, attention_bias=True, head_dim=12), layers
    yield "llama, linear", t.LlamaConfig(
        **LLAMA, rope_scaling={"rope_type": "linear", "factor": 3.0}), layers
    yield "llama, llama3", t.LlamaConfig(**LLAMA, rope_theta=500.0, rope_scaling=LLAMA3), layers
    yield "llama, yarn", t.LlamaConfig(**LLAMA, rope_scaling=YARN), layers
    yield "mistral", t.MistralConfig(**LLAMA, sliding_window=5, head_dim=12), layers
    yield "mistral, no window", t.MistralConfig(**LLAMA, sliding_window=None), layers
    yield "qwen2", t.Qwen2Config(**LLAMA), layers
    yield "qwen2, window", t.Qwen2Config(
        **LLAMA, use_sliding_window=True, sliding_window=5, max_window_layers=1), layers
    yield "qwen3", t.Qwen3Config(**LLAMA, head_dim=16, rms_norm_eps=1e-3), layers
    yield "gemma2", t.Gemma2Config(**LLAMA, head_dim=16, sliding_window=5, query_pre_attn_scalar=7,
                                   attn_logit_softcapping=1.5), layers
    yield "gpt_oss", t.GptOssConfig(**LLAMA, head_dim=16, sliding_window=5, num_local_experts=2,
                                    num_experts_per_tok=1,
                                    rope_scaling=YARN | {"truncate": False}), layers
    small = dict(hidden_size=48, num_attention_heads=6, num_hidden_layers=2, vocab_size=99)
    yield "falcon, multi-query", t.FalconConfig(**small, multi_query=True, alibi=False), falcon
    yield "falcon, grouped", t.FalconConfig(
        **small, new_decoder_architecture=True, num_kv_heads=2, bias=True, alibi=False), falcon
    yield "falcon, heads", t.FalconConfig(**small, multi_query=False, alibi=False), falcon
    # ALiBi in Falcon's code is rounded to bfloat16: 4 heads have slopes that it can hold. Its
    # "eager" attention adds it twice (once by the mask), the default one once.
    few = small | dict(num_attention_heads=4)
    yield "falcon, alibi", t.FalconConfig(**few, multi_query=False, alibi=True, bias=True), falcon
    yield "gpt2", t.GPT2Config(**GPT), blocks
    yield "gpt2, by layer", t.GPT2Config(**GPT, scale_attn_by_inverse_layer_idx=True), blocks
    yield "gpt2, unscaled", t.GPT2Config(**GPT, scale_attn_weights=False), blocks
    yield "gpt_bigcode, multi-query", t.GPTBigCodeConfig(**GPT), blocks
    yield "gpt_bigcode, heads", t.GPTBigCodeConfig(**GPT, multi_query=False), blocks
    yield "bloom", t.BloomConfig(hidden_size=48, n_head=6, n_layer=2, vocab_size=99), falcon
    yield from deepseek_cases(layers)
    yield from newer_cases(layers)
    bert = dict(hidden_size=48, num_attention_heads=6, num_hidden_layers=2, intermediate_size=64,
                vocab_size=99)
    encoder = lambda model: [layer.attention for layer in model.bert.encoder.layer]
    yield "bert", t.BertConfig(**bert), encoder
    yield "bert, decoder", t.BertConfig(**bert, is_decoder=True), encoder


def newer_cases(layers):
    t = transformers
    experts = dict(num_experts_per_tok=1)
    yield "llama, dynamic, short", t.LlamaConfig(
        **LLAMA, rope_scaling={"rope_type": "dynamic", "factor": 3.0}), layers
    # Longer than the context from the prompt on. Token by token, transformers rotates old keys for
    # one length and new ones for another: only the whole sequence can be compared.
    yield "llama, dynamic, long, whole", t.LlamaConfig(
        **LLAMA | dict(max_position_embeddings=10),
        rope_scaling={"rope_type": "dynamic", "factor": 3.0}), layers
    yield "mixtral", t.MixtralConfig(**LLAMA, **experts, num_local_experts=2), layers
    yield "mixtral, window", t.MixtralConfig(
        **LLAMA, **experts, num_local_experts=2, sliding_window=5, head_dim=12), layers
    yield "qwen3_moe", t.Qwen3MoeConfig(
        **LLAMA, **experts, num_experts=2, moe_intermediate_size=16, head_dim=16,
        rms_norm_eps=1e-3), layers
    yield "qwen3_moe, window", t.Qwen3MoeConfig(
        **LLAMA, **experts, num_experts=2, moe_intermediate_size=16, head_dim=16,
        use_sliding_window=True, sliding_window=5), layers
    yield "olmo2", t.Olmo2Config(**LLAMA, rms_norm_eps=1e-3, pad_token_id=None), layers
    yield "olmo2, bias", t.Olmo2Config(**LLAMA, attention_bias=True, pad_token_id=None), layers
    yield "cohere", t.CohereConfig(**LLAMA, eos_token_id=1), layers
    yield "cohere, q/k norm", t.CohereConfig(**LLAMA, use_qk_norm=True, layer_norm_eps=1e-3, eos_token_id=1), layers
    yield "cohere, bias", t.CohereConfig(**LLAMA, attention_bias=True, eos_token_id=1), layers
    phi = dict(eos_token_id=1, pad_token_id=None)
    factors = {"rope_type": "longrope", "short_factor": [1.0, 1.1, 1.3, 1.8],
               "long_factor": [1.0, 2.0, 4.5, 7.0]}
    yield "phi3", t.Phi3Config(**LLAMA, **phi), layers
    yield "phi3, window, partial", t.Phi3Config(
        **LLAMA, **phi, sliding_window=5, partial_rotary_factor=0.75), layers
    yield "phi3, longrope, short", t.Phi3Config(
        **LLAMA, **phi, original_max_position_embeddings=64, rope_scaling=dict(factors)), layers
    yield "phi3, longrope, long", t.Phi3Config(
        **LLAMA, **phi, original_max_position_embeddings=12, rope_scaling=dict(factors)), layers
    gemma = LLAMA | dict(head_dim=16, sliding_window=5, query_pre_attn_scalar=7)
    yield "gemma3_text", t.Gemma3TextConfig(**gemma, rms_norm_eps=1e-3), layers
    yield "gemma3_text, types, linear", t.Gemma3TextConfig(
        **gemma, layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 70.0}}), layers
    neox = dict(hidden_size=48, num_attention_heads=6, num_hidden_layers=2, intermediate_size=64,
                vocab_size=99, max_position_embeddings=128)
    modules = lambda model: [layer.attention for layer in model.gpt_neox.layers]
    yield "gpt_neox", t.GPTNeoXConfig(**neox), modules
    yield "gpt_neox, half, no bias", t.GPTNeoXConfig(
        **neox, attention_bias=False, rotary_pct=0.5, rotary_emb_base=700), modules


def deepseek_cases(layers):
    """All layers dense: experts do not concern attention."""
    t = transformers
    sizes = dict(hidden_size=48, num_attention_heads=6, num_key_value_heads=6, num_hidden_layers=2,
                 intermediate_size=64, moe_intermediate_size=16, vocab_size=99, kv_lora_rank=20,
                 q_lora_rank=24, qk_nope_head_dim=12, qk_rope_head_dim=8, v_head_dim=10,
                 first_k_dense_replace=2, n_routed_experts=4, n_group=1, topk_group=1,
                 num_experts_per_tok=1, max_position_embeddings=128,
                 rms_norm_eps=0.05)  # not that of the norms inside attention
    lite = sizes | dict(q_lora_rank=None)
    both = YARN | {"factor": 40.0, "mscale": 0.707, "mscale_all_dim": 0.707}
    yield "deepseek_v2", t.DeepseekV2Config(**sizes), layers
    yield "deepseek_v2, yarn", t.DeepseekV2Config(**sizes, rope_scaling=dict(YARN)), layers
    yield "deepseek_v2, lite, bias", t.DeepseekV2Config(
        **lite, attention_bias=True, rope_scaling=dict(YARN)), layers
    # Up to version 4 transformers left mscale out of V2's softmax, which DeepSeek's own code has.
    if int(t.__version__.split(".")[0]) >= 5:
        yield "deepseek_v2, mscale", t.DeepseekV2Config(**sizes, rope_scaling=dict(both)), layers
        yield "deepseek_v2, lite, mscale", t.DeepseekV2Config(
            **lite, rope_scaling=dict(both)), layers
    yield "deepseek_v3", t.DeepseekV3Config(**sizes), layers
    yield "deepseek_v3, mscale, bias", t.DeepseekV3Config(
        **sizes, attention_bias=True, rope_scaling=both | {"mscale": 1.0}), layers
    yield "deepseek_v3, lite, mscale", t.DeepseekV3Config(**lite, rope_scaling=dict(both)), layers
    yield "deepseek_v3, half-split", t.DeepseekV3Config(**sizes, rope_interleave=False), layers


def model_of(config):
    kinds = {"bert": "BertLMHeadModel" if getattr(config, "is_decoder", False)
             else "BertForMaskedLM"}
    causal = getattr(transformers, kinds[config.model_type]) if config.model_type in kinds else (
        transformers.AutoModelForCausalLM)
    config._experts_implementation = "eager"  # the others have no float64
    config._attn_implementation = "sdpa" if getattr(config, "alibi", False) else "eager"
    torch.manual_seed(1)
    make = causal.from_config if hasattr(causal, "from_config") else causal
    model = make(config).eval()
    # Fresh models have tiny weights, zero biases and unit norms: nothing would show.
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0.1 if parameter.dim() == 1 else 0.0,
                              0.5 if parameter.dim() == 1 else 1.4 / parameter.shape[-1] ** 0.5)
    return model


class Recorder:
    """The inputs and outputs of each attention module, joined over the calls of the model."""

    def __init__(self, modules):
        self.modules = modules
        self.inputs, self.outputs, self.hooks = {}, {}, []
        for index, module in enumerate(modules):
            self.hooks.append(module.register_forward_hook(self.hook(index), with_kwargs=True))
            if type(module).__name__ == "BertAttention":
                # Its output is normed and has the residual in it; the projection alone has not.
                self.hooks.append(module.output.dense.register_forward_hook(
                    lambda m, a, output, i=index: self.add(self.outputs, i, output)))

    def add(self, kept, index, tensor):
        before = [kept[index]] if index in kept else []
        kept[index] = torch.cat([*before, tensor], dim=1)

    def hook(self, index):
        def keep(module, args, kwargs, output):
            self.add(self.inputs, index, args[0] if args else kwargs["hidden_states"])
            name = type(module).__name__
            if name == "BertAttention":
                return
            first = output[0] if isinstance(output, tuple) else output
            # Bloom's module adds the residual, which it gets as its second argument.
            self.add(self.outputs, index, first - args[1] if name == "BloomAttention" else first)
        return keep

    def remove(self):
        for hook in self.hooks:
            hook.remove()


def record(model, modules, cached):
    """Over all tokens at once, or over a prompt and then token by token."""
    recorder = Recorder(modules)
    tokens = torch.arange(LENGTH)[None] % 97 + 1
    with torch.no_grad():
        if not cached:
            model(tokens)
        else:
            past = model(tokens[:, :PROMPT], use_cache=True).past_key_values
            for i in range(PROMPT, LENGTH):
                past = model(tokens[:, i:i + 1], past_key_values=past, use_cache=True).past_key_values
    recorder.remove()
    return recorder.inputs, recorder.outputs


def compare(name, run_layer, folder, which, given, expected, cached=False):
    np.save(folder / "in.npy", given.numpy())
    command = [run_layer, folder, which, folder / "in.npy", folder / "out.npy"]
    done = subprocess.run(command + ([str(PROMPT)] if cached else []),
                          capture_output=True, text=True, check=False)
    if done.returncode != 0:
        print(f"FAILED  {name}: {done.stderr.strip()}")
        return False
    off = np.abs(np.load(folder / "out.npy") - expected.numpy()).max()
    scale = np.abs(expected.numpy()).max()
    good = bool(off <= TOLERANCE * scale)
    print(f"{'ok' if good else 'FAILED':7} {name}: {off / scale:.1e} of {scale:.2f}")
    return good


def is_causal(config):
    return config.model_type != "bert" or config.is_decoder


def main():
    run_layer = sys.argv[1]
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    print(f"transformers {transformers.__version__}, torch {torch.__version__}")
    good = True
    chosen = sys.argv[2] if len(sys.argv) > 2 else ""
    for name, config, modules_of in cases():
        if not name.startswith(chosen):
            continue
        model = model_of(config)
        with tempfile.TemporaryDirectory() as temp:
            folder = Path(temp)
            model.save_pretrained(folder, safe_serialization=True)
            for cached in (False, True):
                if cached and (not is_causal(config) or name.endswith("whole")):
                    continue
                inputs, outputs = record(model, modules_of(model), cached)
                for layer in inputs:
                    good &= compare(f"{name}, layer {layer}{', cached' if cached else ''}",
                                    run_layer, folder, str(layer), inputs[layer], outputs[layer],
                                    cached)
    from safetensors.torch import save_file
    for bias in (True, False):
        torch.manual_seed(2)
        module = torch.nn.MultiheadAttention(48, 6, bias=bias, batch_first=True).eval()
        x = torch.randn(2, LENGTH, 48)
        with tempfile.TemporaryDirectory() as temp:
            save_file(module.state_dict(), Path(temp) / "model.safetensors")
            with torch.no_grad():
                expected = module(x, x, x, need_weights=False)[0]
            good &= compare(f"torch, bias={bias}", run_layer, Path(temp), "torch:6", x, expected)
    sys.exit(0 if good else 1)


main()
