// The docstrings of a layer's forward and backward calls, in NumPy's style.
#pragma once

namespace ladon::python::doc {

inline constexpr const char* kForward = R"(The layer's output for x.

Parameters
----------
x : array [batch, seq, embed_dim] or [seq, embed_dim]
key, value : array, optional
    Inputs for cross-attention. Without value, both keys and values come from key.
cache : KvCache, optional
    Appends the new tokens and attends over all that it holds.
causal : bool, optional
    In place of the layer's own.
mask, bias : array, optional
    As attention() takes them.
kv_lengths : sequence of int, optional
    The keys that exist in each sequence; without a cache.
new_lengths : sequence of int, optional
    With a cache: how many of the tokens in x each sequence has, where they differ.
query : array, optional
    With a cache: attends in place of x, at query_positions (one for each token of x).
query_positions, key_positions : int or array, optional
    For rope. 0, 1, 2, ... unless given; with a cache, those of the new tokens.
dropout_seed : int
    Draws dropout, where the layer trains and has one.
return_weights : bool
    Return the probabilities too, [batch, num_heads, query_len, kv_len]; not with a cache.
out : array, optional
    Takes the result: an array of the shape of x and the layer's dtype, apart from the inputs.
context : Context, optional
    Device, threads and kernels.

Returns
-------
array
    Of the shape of x, or (array, weights) with return_weights.)";

inline constexpr const char* kForwardFrom = R"(forward() over a cache that is left unchanged.

Parameters
----------
x : array [batch, seq, embed_dim]
    The new tokens.
past : KvCache
    Keys and values of the tokens before them.
causal, mask, bias, new_lengths, query, query_positions, context : optional
    As forward() takes them.

Returns
-------
out : array
cache : KvCache
    A fork of `past` that also holds the new tokens.)";

inline constexpr const char* kForwardTraining = R"(forward() that also saves what backward() needs.

Parameters
----------
x, key, value : array
    As forward() takes them, with its options.
out : array, optional
    Takes the result.

Returns
-------
out : array
saved : SavedForward
    For backward(), which refuses it once the weights have changed.)";

inline constexpr const char* kBackward =
    R"(The gradients of the inputs; adds to the parameters' gradients.

Parameters
----------
grad_out : array
    The gradient of the output.
saved : SavedForward
    From this layer's forward_training().
out : tuple of three (array or None), optional
    Takes the gradients of x, key and value: arrays of their shapes and the layer's dtype. None is a new array. An array
    alone takes that of x.
context : Context, optional
    Device, threads and kernels.

Returns
-------
dx, dkey, dvalue : array or None
    None for an input that the call did not have.)";

}  // namespace ladon::python::doc
