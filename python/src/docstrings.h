// The long docstrings of layers and caches, in NumPy's style; those of forward and backward are in
// call_docstrings.h.
#pragma once

#include <string>

namespace ladon::python::doc {

inline constexpr const char* kSetParameter = R"(Copies a weight in, converting its dtype.

Parameters
----------
name : str
    One of parameters().
value : array
    Of the parameter's shape, on the layer's device or the CPU.)";

inline constexpr const char* kCacheOptions =
    R"(Options of a cache for this layer: ``KvCache.contiguous(**layer.cache_options())``.

Parameters
----------
batch : int
    Number of sequences.
dtype : optional
    Of the stored keys and values, "i8" and "fp8" too; the layer's unless given.

Returns
-------
dict)";

inline constexpr const char* kLoadStateDict = R"(Copies weights in by name: all of them or none.

Parameters
----------
state : mapping of str to array
    As state_dict() returns it.
strict : bool
    Refuse missing and unknown names.)";

inline constexpr const char* kMultiHeadAttention =
    R"(MHA, GQA and MQA as one layer with weights, for self- and cross-attention.

out = W_o attention(rope(norm(W_q x)), rope(norm(W_k x)), W_v x) + b_o. Its weights are q_proj.weight, k_proj.weight, v_proj.weight,
out_proj.weight, their biases (q_proj.bias, ...), q_norm.weight, k_norm.weight and sinks. A new layer has Xavier-uniform weights,
zero biases and sinks, and norm weights of one.

Parameters
----------
embed_dim : int
    Features of x and of the output.
num_heads : int
    Query heads.
num_kv_heads : int
    num_heads is a multiple of it. 0 is num_heads (MHA), 1 is MQA, anything between is GQA.
head_dim : int
    Features of a head; 0 is embed_dim / num_heads.
key_dim, value_input_dim : int
    Features of the inputs `key` and `value` of cross-attention; 0 is embed_dim.
query_bias, key_bias, value_bias, out_bias : bool
    Whether the projections have biases.
causal : bool
    No token sees a later one.
rope : dict, optional
    A RopeOptions; {} for its defaults. None: without rope.
qk_norm : bool
    Normalise queries and keys before rope.
qk_norm_epsilon, qk_norm_offset : float
    Of the norms: added to the mean square, and to the weights (1 for Gemma's).
qk_norm_span : {"head", "all_heads", "each_head"}
    What a norm spans: a head with shared weights, all heads at once, or a head with its own weights.
qk_norm_centered : bool
    A layer norm instead of an RMS norm.
scale : float, optional
    Factor of the scores; 1 / sqrt(head_dim) unless given.
softcap : float
    Scores become c * tanh(score / c); 0 is off.
window_left, window_right : int, optional
    How far a token sees; without limit unless given.
alibi_slopes : array or sequence of float, optional
    One for each query head.
sinks : bool
    A learned logit for each head that takes part in its softmax.
dropout : float
    Probability with which a weight is dropped in training.
dtype : optional
    Of weights and computation: "f64", "f32", "f16" or "bf16".
seed : int
    Of the initial weights.
device : optional
    "cpu", "cuda" or "cuda:1".

Examples
--------
>>> layer = ladon.MultiHeadAttention(embed_dim=64, num_heads=4, num_kv_heads=2, causal=True, rope={})
>>> layer(np.ones((1, 5, 64), np.float32)).shape
(1, 5, 64))";

inline constexpr const char* kLatentAttention =
    R"(Multi-head latent attention (MLA), as in DeepSeek-V2 and V3.

The cache holds one short latent for each token, from which the keys and values of all heads follow. Parameters have DeepSeek's names. A
new layer has Xavier-uniform weights, zero biases, and norm weights of one.

Parameters
----------
embed_dim : int
    Features of x and of the output.
num_heads : int
    Query heads.
kv_rank : int
    Features of the latent.
nope_dim : int
    Features of a head's query and key without rope.
query_rank : int
    Rank of the query projection; 0 is a single matrix.
rope_dim : int
    Features of the rotated key, which all heads share.
value_dim : int
    Features of a head's value; 0 is nope_dim, or rope_dim where that is 0.
query_bias, kv_bias, out_bias : bool
    Whether the projections have biases.
query_norm, kv_norm : bool
    Whether the low-rank query and the latent are normalised.
norm_epsilon : float
    Of these norms.
causal : bool
    No token sees a later one.
rope : dict, optional
    A RopeOptions.
scale : float, optional
    Factor of the scores; 1 / sqrt(nope_dim + rope_dim) unless given.
dropout : float
    Probability with which a weight is dropped in training.
form : {"auto", "expanded", "absorbed"}
    "expanded" computes keys and values of every token, "absorbed" attends to the latents themselves, "auto" takes what costs less for the
    lengths of a sequence.
dtype : optional
    Of weights and computation: "f64", "f32", "f16" or "bf16".
seed : int
    Of the initial weights.
device : optional
    "cpu", "cuda" or "cuda:1".)";

inline constexpr const char* kFormFor = R"(The form in which new tokens of a sequence are computed.

Parameters
----------
query_len : int
    The new tokens.
kv_len : int
    All tokens of the sequence.

Returns
-------
{"expanded", "absorbed"})";

inline constexpr const char* kCompress = R"(Tokens to latents.

Parameters
----------
x : array [batch, seq, embed_dim]
positions : int or array, optional
    For rope; 0, 1, 2, ... unless given.
context : Context, optional
    Device, threads and kernels.

Returns
-------
array [batch, seq, latent_dim])";

/// What every kind of cache takes, after `begin`: `end` goes on with its own parameters.
inline std::string of_cache(const char* begin, const char* end) {
  return std::string(begin) + R"(

Parameters
----------
num_kv_heads, head_dim : int
    KV heads, and the features of a key.
batch : int
    Number of sequences.
value_dim : int
    Features of a value; 0 is head_dim.
values_in_keys : bool
    Latents: a value is the first value_dim features of its key.
num_heads, mha_dim : int
    Of the layer; used only for comparisons with MHA (mha_bytes, reduction).
dtype : optional
    Of the stored elements: "f64", "f32", "f16", "bf16", "i8" or "fp8".
device : optional
    "cpu", "cuda" or "cuda:1".
)" + end;
}

inline const std::string kContiguous =
    of_cache("A cache with one block of memory for each sequence.",
             R"(capacity : int
    Tokens of a sequence, for which memory is allocated at once; 0 grows as needed.

Returns
-------
KvCache)");

inline const std::string kWindow = of_cache("A cache that keeps the latest keys of each sequence.",
                                            R"(window_left : int
    How far queries see: window_left + 1 keys are kept.
spare : int
    Older keys that are kept as well, so that truncate() can go back that far.

Returns
-------
KvCache)");

inline const std::string kPagePool = of_cache(
    "Pages of keys and values that many caches share; all memory is allocated here.\n\n"
    "A pool lives as long as the last of its caches. It ignores batch, which is among "
    "layer.cache_options().",
    R"(page_size : int
    Tokens of a page.
num_pages : int
    Pages of the pool.)");

inline constexpr const char* kPaged = R"(A cache in pages, which it takes from a pool as it grows.

Parameters
----------
pool : PagePool
batch : int
    Number of sequences.

Returns
-------
KvCache)";

inline constexpr const char* kAppend = R"(Appends new tokens, all or nothing.

Parameters
----------
k : array [batch, new_len, num_kv_heads, head_dim]
v : array [batch, new_len, num_kv_heads, value_dim], optional
    Left out where values are in the keys (latents).
new_lengths : sequence of int, optional
    How many of them each sequence has, where they differ.)";

inline constexpr const char* kCacheAttention =
    R"(attention() of queries over this cache: they are its newest tokens.

Parameters
----------
q : array [batch, query_len, num_heads, head_dim]
    All other options are those of attention().

Returns
-------
array
    As attention().)";

inline constexpr const char* kTruncate = R"(Removes the last tokens of a sequence.

Parameters
----------
sequence : int
length : int
    The tokens that are kept.)";

inline constexpr const char* kPublishPrefix =
    R"(Paged caches: says which tokens a sequence holds, so that others can find its full pages.

Parameters
----------
sequence : int
token_ids : sequence of int
    The tokens from the first on.)";

inline constexpr const char* kAdoptPrefix =
    R"(Paged caches: gives an empty sequence the published pages of a prompt's beginning.

Parameters
----------
sequence : int
token_ids : sequence of int
    The prompt.

Returns
-------
int
    How many of its tokens the pages hold.)";

inline constexpr const char* kKeys = R"(A copy of the keys that a sequence holds, oldest first.

Parameters
----------
sequence : int
dtype : optional
    Of the result.
framework : {"numpy", "torch"}

Returns
-------
array [held, num_kv_heads, head_dim])";

inline constexpr const char* kValues = R"(A copy of the values that a sequence holds, oldest first.

Parameters
----------
sequence : int
dtype : optional
    Of the result.
framework : {"numpy", "torch"}

Returns
-------
array [held, num_kv_heads, value_dim])";

}  // namespace ladon::python::doc
