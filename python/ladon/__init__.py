"""Ladon: attention for MHA, GQA, MQA and MLA, with gradients, caches and layers::

    import numpy as np
    import ladon

    q = np.random.randn(2, 256, 8, 64).astype(np.float32)  # batch, tokens, heads, head_dim
    k = np.random.randn(2, 256, 2, 64).astype(np.float32)  # two KV heads for eight query heads
    v = np.random.randn(2, 256, 2, 64).astype(np.float32)
    out = ladon.attention(q, k, v, causal=True)

Arrays are read in place: NumPy's, PyTorch's, and all others that support DLPack or the buffer
protocol. Results are torch tensors for torch inputs and NumPy arrays otherwise.

ladon.torch adds autograd and modules; ladon.onnx is a backend for ONNX's operators;
ladon.convert converts trained layers to other kinds of attention; ladon.distributed runs over
several processes.
"""

from typing import TYPE_CHECKING

from . import _ladon
from ._errors import (
    CommunicationError,
    DeviceError,
    Error,
    FileError,
    InvalidArgumentError,
    OutOfMemoryError,
    UnsupportedError,
)
from ._ladon import (
    AdamW,
    AttentionLayer,
    Context,
    DeviceArray,
    Graph,
    KvCache,
    LatentAttention,
    MultiHeadAttention,
    PagePool,
    SavedForward,
    Sgd,
    alibi_slopes,
    attention,
    attention_backward,
    attention_tensors,
    attention_weights,
    clip_gradients,
    compare_cache_memory,
    describe_model,
    list_devices,
    list_isas,
    load_attention,
    load_safetensors,
    load_torch_attention,
    make_rope_table,
    merge_attention,
    model_families,
    paged_attention,
    rope,
    rope_backward,
    save_safetensors,
    torch_attention_tensors,
    version,
)
from ._plan import plan
from ._signatures import describe_classes, describe_functions
from ._types import AttentionGradients, RopeOptions, RopeScaling

if not TYPE_CHECKING:
    describe_functions(globals())
    describe_classes(_ladon)

__version__ = version()

__all__ = [
    "AdamW",
    "AttentionGradients",
    "AttentionLayer",
    "CommunicationError",
    "Context",
    "DeviceArray",
    "DeviceError",
    "Error",
    "FileError",
    "Graph",
    "InvalidArgumentError",
    "KvCache",
    "LatentAttention",
    "MultiHeadAttention",
    "OutOfMemoryError",
    "PagePool",
    "RopeOptions",
    "RopeScaling",
    "SavedForward",
    "Sgd",
    "UnsupportedError",
    "alibi_slopes",
    "attention",
    "attention_backward",
    "attention_tensors",
    "attention_weights",
    "clip_gradients",
    "compare_cache_memory",
    "describe_model",
    "list_devices",
    "list_isas",
    "load_attention",
    "load_safetensors",
    "load_torch_attention",
    "make_rope_table",
    "merge_attention",
    "model_families",
    "paged_attention",
    "plan",
    "rope",
    "rope_backward",
    "save_safetensors",
    "torch_attention_tensors",
    "version",
]
