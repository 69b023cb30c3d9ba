"""An ONNX backend for the operators that Ladon is about: Attention (23 to 25) and RotaryEmbedding (23).

    import onnx
    import ladon.onnx

    outputs = ladon.onnx.run_model(onnx.load("attention.onnx"), [q, k, v])

It runs models that are made of these operators alone, on the CPU, and is what ONNX's own backend test
runner drives in tests/python. Needs the package onnx.
"""

from typing import Any, Dict, List, Optional, Sequence, Tuple

import numpy as np

from . import attention as _attention
from . import attention_weights as _attention_weights
from . import rope as _rope
from ._errors import InvalidArgumentError, UnsupportedError

try:
    import onnx
    from onnx.backend.base import Backend, BackendRep, Device, DeviceType
except ImportError as missing:
    raise ImportError(
        f"ladon.onnx needs the package onnx, which cannot be imported here ({missing}): pip install onnx"
    ) from missing

# qk_matmul_output_mode, as ONNX 1.23 has it; earlier references exchange 1 and 2.
_STAGES = ("scaled", "softcapped", "masked", "probability")

__all__ = ["LadonBackend", "Model", "is_compatible", "prepare", "run_model", "supports_device"]


def _require(operator: str, inputs: Dict[str, Any]) -> None:
    for name, value in inputs.items():
        if value is None:
            raise InvalidArgumentError(f"ladon.onnx: {operator}: {name}: got none, expected an input")


def _as_heads(tensor: np.ndarray, num_heads: Optional[int]) -> np.ndarray:
    """[batch, seq, heads * dim] or [batch, heads, seq, dim] as [batch, seq, heads, dim]."""
    if tensor.ndim == 4:
        return tensor.transpose(0, 2, 1, 3)
    if not num_heads:
        raise UnsupportedError("ladon.onnx: a 3-D input needs the attribute that counts its heads")
    batch, length, width = tensor.shape
    return tensor.reshape(batch, length, num_heads, width // num_heads)


def _window(attributes: Dict[str, Any], query_len: int, kv_len: int, past_len: int, padded: bool) -> Dict[str, Any]:
    """Causal and window as Ladon's options.

    Query i stands at past_len + i; with nonpad_kv_seqlen at its sequence's length - query_len + i. The
    latter, and the former where past and new tokens are all keys, is Ladon's bottom-right corner.
    """
    left = attributes.get("left_window_size", -1)
    right = attributes.get("right_window_size", -1)
    if attributes.get("is_causal", 0):
        right = 0
    options: Dict[str, Any] = {}
    if not padded and past_len + query_len != kv_len:
        # Neither corner. Counted from the top left, the window is past_len further right; a left edge
        # right of the diagonal is not a window of Ladon's, and becomes a mask.
        options["alignment"] = "top_left"
        right = right if right < 0 else right + past_len
        if 0 <= left < past_len:
            ages = np.arange(query_len)[:, np.newaxis] + past_len - np.arange(kv_len)
            options["mask"] = ages <= left
            left = -1
        left = left if left < 0 else left - past_len
    if left >= 0:
        options["window_left"] = left
    if right >= 0:
        options["window_right"] = right
    return options


def _pad_keys(mask: np.ndarray, kv_len: int) -> np.ndarray:
    """A mask may stop before the last key; keys past its end are hidden."""
    if mask.shape[-1] >= kv_len:
        return mask
    shape = mask.shape[:-1] + (kv_len,)
    padded = np.full(shape, False if mask.dtype == np.bool_ else -np.inf, dtype=mask.dtype)
    padded[..., : mask.shape[-1]] = mask
    return padded


def _run_attention(attributes: Dict[str, Any], inputs: Sequence[Any], wanted: Sequence[bool]) -> List[Any]:
    q, k, v, attn_mask, past_key, past_value, lengths = (list(inputs) + [None] * 7)[:7]
    _require("Attention", {"Q": q, "K": k, "V": v})
    ours_q = _as_heads(q, attributes.get("q_num_heads"))
    ours_k = _as_heads(k, attributes.get("kv_num_heads"))
    ours_v = _as_heads(v, attributes.get("kv_num_heads"))
    past_len = 0 if past_key is None else past_key.shape[2]
    if past_key is not None:
        ours_k = np.concatenate([past_key.transpose(0, 2, 1, 3), ours_k], axis=1)
    if past_value is not None:
        ours_v = np.concatenate([past_value.transpose(0, 2, 1, 3), ours_v], axis=1)
    query_len, kv_len = ours_q.shape[1], ours_k.shape[1]

    # softmax_precision is not read: the softmax is never below f32.
    options: Dict[str, Any] = {"softcap": attributes.get("softcap", 0.0)}
    if "scale" in attributes:
        options["scale"] = attributes["scale"]
    if lengths is not None:
        options["kv_lengths"] = lengths
    options.update(_window(attributes, query_len, kv_len, past_len, lengths is not None))
    if attn_mask is not None:
        while attn_mask.ndim < 2:
            attn_mask = attn_mask[np.newaxis]
        mask = np.ascontiguousarray(_pad_keys(attn_mask, kv_len))
        if mask.dtype != np.bool_:
            options["bias"] = mask
        else:
            options["mask"] = mask & options["mask"] if "mask" in options else mask

    out = _attention(ours_q, ours_k, ours_v, **options)
    if q.ndim == 4:
        y = out.transpose(0, 2, 1, 3)
    else:
        y = out.reshape(*out.shape[:2], -1)
    weights = None
    mode = attributes.get("qk_matmul_output_mode", 0)
    if not 0 <= mode < len(_STAGES):
        raise InvalidArgumentError(f"ladon.onnx: qk_matmul_output_mode: got {mode}, expected 0 to {len(_STAGES) - 1}")
    if len(wanted) > 3 and wanted[3]:
        weights = _attention_weights(ours_q, ours_k, stage=_STAGES[mode], **options)
    return [y, ours_k.transpose(0, 2, 1, 3), ours_v.transpose(0, 2, 1, 3), weights]


def _run_rotary_embedding(attributes: Dict[str, Any], inputs: Sequence[Any], wanted: Sequence[bool]) -> List[Any]:
    x, cos, sin, position_ids = (list(inputs) + [None] * 4)[:4]
    _require("RotaryEmbedding", {"X": x, "cos_cache": cos, "sin_cache": sin})
    out = _rope(
        _as_heads(x, attributes.get("num_heads")),
        layout="interleaved" if attributes.get("interleaved", 0) else "half_split",
        rotary_dim=attributes.get("rotary_embedding_dim", 0),
        positions=position_ids,
        cos=cos,
        sin=sin,
    )
    return [out.transpose(0, 2, 1, 3) if x.ndim == 4 else out.reshape(x.shape)]


# Operator: what runs it, and the opsets that brought a version of it that this runs.
_OPERATORS = {"Attention": (_run_attention, (23, 24, 25)), "RotaryEmbedding": (_run_rotary_embedding, (23,))}


def _refusal(model: "onnx.ModelProto") -> Optional[str]:
    """Why a model cannot be run; None where it can."""
    opsets = {entry.domain: entry.version for entry in model.opset_import}
    opset = opsets.get("", opsets.get("ai.onnx", 0))
    for node in model.graph.node:
        if node.domain not in ("", "ai.onnx") or node.op_type not in _OPERATORS:
            return f"operator {node.domain}::{node.op_type} is not one of {', '.join(_OPERATORS)}"
        since = onnx.defs.get_schema(node.op_type, opset).since_version if opset else 0
        if since not in _OPERATORS[node.op_type][1]:
            return f"operator {node.op_type} of opset {opset} (version {since}) is not known"
    return None


class Model(BackendRep):
    """A model that is ready to run."""

    def __init__(self, model: "onnx.ModelProto") -> None:
        self._model = model

    def run(self, inputs: Any, **kwargs: Any) -> Tuple[Any, ...]:
        """inputs: the graph's inputs in order, or by name. Returns its outputs in order."""
        graph = self._model.graph
        values: Dict[str, Any] = {item.name: onnx.numpy_helper.to_array(item) for item in graph.initializer}
        names = [item.name for item in graph.input if item.name not in values]
        if not isinstance(inputs, dict):
            inputs = list(inputs)
            if len(inputs) > len(names):
                raise InvalidArgumentError(
                    f"ladon.onnx: inputs: got {len(inputs)}, expected at most {len(names)}: {', '.join(names)}"
                )
        given = inputs if isinstance(inputs, dict) else dict(zip(names, inputs))
        unknown = [name for name in given if name not in names and name not in values]
        missing = [name for name in names if name not in given]
        if unknown or missing:
            wrong = f"got {unknown[0]!r}" if unknown else f"got no {missing[0]!r}"
            raise InvalidArgumentError(f"ladon.onnx: inputs: {wrong}, expected {', '.join(names)}")
        values.update({name: np.asarray(value) for name, value in given.items()})
        for node in graph.node:
            attributes = {item.name: onnx.helper.get_attribute_value(item) for item in node.attribute}
            arguments = [values[name] if name else None for name in node.input]
            run, _ = _OPERATORS[node.op_type]
            results = run(attributes, arguments, [bool(name) for name in node.output])
            values.update({name: result for name, result in zip(node.output, results) if name})
        return tuple(np.ascontiguousarray(values[item.name]) for item in graph.output)


class LadonBackend(Backend):
    """What onnx.backend.test drives."""

    @classmethod
    def is_compatible(cls, model: "onnx.ModelProto", device: str = "CPU", **kwargs: Any) -> bool:
        """Whether prepare() takes the model.

        Parameters
        ----------
        model : onnx.ModelProto
        device : str
            "CPU" is the one that there is.

        Returns
        -------
        bool
        """
        return cls.supports_device(device) and _refusal(model) is None

    @classmethod
    def prepare(cls, model: "onnx.ModelProto", device: str = "CPU", **kwargs: Any) -> Model:
        """Makes a model ready to run.

        Parameters
        ----------
        model : onnx.ModelProto
            Of Attention and RotaryEmbedding nodes.
        device : str
            "CPU" is the one that there is.

        Returns
        -------
        Model
            Its run() takes the inputs.
        """
        if not cls.supports_device(device):
            raise UnsupportedError(f"ladon.onnx: device: got {device}, expected CPU")
        onnx.checker.check_model(model)
        reason = _refusal(model)
        if reason is not None:
            raise UnsupportedError(f"ladon.onnx: model: {reason}")
        return Model(model)

    @classmethod
    def run_model(cls, model: "onnx.ModelProto", inputs: Any, device: str = "CPU", **kwargs: Any) -> Tuple[Any, ...]:
        """Runs a model once: ``prepare(model, device).run(inputs)``.

        Parameters
        ----------
        model : onnx.ModelProto
        inputs : sequence or dict of array
            In the graph's order, or by name.
        device : str
            "CPU" is the one that there is.

        Returns
        -------
        tuple of numpy.ndarray
            The graph's outputs in order.
        """
        return cls.prepare(model, device, **kwargs).run(inputs)

    @classmethod
    def supports_device(cls, device: str) -> bool:
        """Whether models run on a device: True for "CPU".

        Parameters
        ----------
        device : str

        Returns
        -------
        bool
        """
        return bool(Device(device).type == DeviceType.CPU)


prepare = LadonBackend.prepare
run_model = LadonBackend.run_model
is_compatible = LadonBackend.is_compatible
supports_device = LadonBackend.supports_device
