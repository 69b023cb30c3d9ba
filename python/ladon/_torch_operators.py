"""Ladon's attention as an operator of torch's library, for ladon.torch."""

import ast as _ast
import math as _math
from typing import Any, Dict, List, Optional, Tuple

import numpy as _numpy
import torch
from torch import Tensor

import ladon as _ladon


def _dense(tensor: Optional[Tensor]) -> Optional[Tensor]:
    """Detached, and with a last stride of 1: gradients of sums come with strides of 0."""
    if tensor is None:
        return None
    tensor = tensor.detach()
    return tensor if tensor.shape[-1:].numel() <= 1 or tensor.stride(-1) == 1 else tensor.contiguous()


# Attention is an operator of torch's library, so that torch.compile and torch.export see one node with known shapes.
# Its options travel as text that Python reads back; those that are arrays (masks, slopes, lengths) as a list of tensors
# with their names.


def _plain(where: str, value: Any) -> Any:
    """What repr() writes so that Python reads it back."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, dict):
        return {key: _plain(where, part) for key, part in value.items()}
    if not isinstance(value, float) and hasattr(value, "__iter__"):
        return [_plain(where, part) for part in value]
    if not isinstance(value, float):
        value = float(value) if getattr(value, "dtype", None) in _FLOATS else int(value)
    if isinstance(value, float) and not _math.isfinite(value):
        raise ValueError(f"{where}: got {value}, expected a finite number")
    return value


_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16, "float64", "float32", "float16")


def _packed(options: Dict[str, Any], operation: str = "attention") -> Tuple[str, List[Tensor]]:
    spec = ""
    names = ""
    arrays: List[Tensor] = []
    for name, value in options.items():
        where = f"ladon.torch.{operation}: {name}"
        if isinstance(value, _numpy.ndarray):
            value = torch.from_numpy(value)
        if isinstance(value, Tensor):
            if value.requires_grad and torch.is_grad_enabled():
                raise ValueError(f"{where}: got a tensor that requires a gradient, which it would not get: detach() it")
            arrays.append(value.detach())
            names += f"'{name}', "
        elif isinstance(value, _ladon.Context):
            raise ValueError(f"{where}: got one, expected none: it follows the tensors")
        elif value is not None:
            spec += f"'{name}': {_plain(where, value)!r}, "
    return f"({{{spec}}}, [{names}])", arrays


def _unpacked(spec: str, arrays: List[Tensor]) -> Dict[str, Any]:
    plain, names = _ast.literal_eval(spec)
    options = {**plain, **dict(zip(names, arrays))}
    if isinstance(options.get("dropout_seed"), Tensor):
        options["dropout_seed"] = int(options["dropout_seed"])
    return options


def check_call(operation: str, *tensors: Optional[Tensor], out: Any = None) -> None:
    """Refuses what would otherwise be lost without a word, or fail deep inside torch."""
    where = f"ladon.torch.{operation}"
    if out is not None:
        raise ValueError(f"{where}: out: got a tensor, expected none: autograd records results that are new")
    if torch.compiler.is_compiling():
        return
    if torch._C._are_functorch_transforms_active():
        raise _ladon.UnsupportedError(
            f"{where}: got a call inside a transform of torch.func (vmap, grad, jvp, ...), expected one outside: "
            "batches are a dimension of the arguments, and gradients are those of backward() and torch.autograd.grad()")
    if any(t is not None and torch.autograd.forward_ad.unpack_dual(t).tangent is not None for t in tensors):
        raise _ladon.UnsupportedError(f"{where}: got a tensor with a tangent, expected none: Ladon has no "
                                      "forward-mode differentiation")


def draw_seed() -> Tensor:
    """For dropout, by torch's generator. A tensor, so that a compiled graph draws another one in each run."""
    return torch.randint(0, 2**62, ())


@torch.library.custom_op("ladon::attention", mutates_args=())
def _attention(q: Tensor, k: Tensor, v: Tensor, bias: Optional[Tensor], sinks: Optional[Tensor],
               arrays: List[Tensor], spec: str) -> Tuple[Tensor, Tensor]:
    q, k, v, bias, sinks = (_dense(tensor) for tensor in (q, k, v, bias, sinks))
    return _ladon.attention(q, k, v, bias=bias, sinks=sinks, return_lse=True, **_unpacked(spec, arrays))


@_attention.register_fake
def _(q, k, v, bias, sinks, arrays, spec):  # type: ignore[no-untyped-def]
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    batch, query_len, heads = q.shape[:3]
    return q.new_empty((batch, query_len, heads, v.shape[3])), q.new_empty(
        (batch, heads, query_len), dtype=lse_dtype)


@torch.library.custom_op("ladon::attention_backward", mutates_args=())
def _attention_backward(q: Tensor, k: Tensor, v: Tensor, bias: Optional[Tensor], sinks: Optional[Tensor],
                        out: Tensor, lse: Tensor, dout: Tensor, dlse: Optional[Tensor], arrays: List[Tensor],
                        spec: str, wanted: List[bool]) -> List[Tensor]:
    names = ("dq", "dk", "dv", "dbias", "dsinks")
    inputs = [_dense(tensor) for tensor in (q, k, v, bias, sinks)]
    gradients = _ladon.attention_backward(
        *inputs[:3], _dense(out), _dense(lse), _dense(dout), dlse=_dense(dlse), bias=inputs[3], sinks=inputs[4],
        wanted=[name for name, needed in zip(names, wanted) if needed], **_unpacked(spec, arrays))
    return [gradient for gradient, needed in zip(gradients, wanted) if needed]


@_attention_backward.register_fake
def _(q, k, v, bias, sinks, out, lse, dout, dlse, arrays, spec, wanted):  # type: ignore[no-untyped-def]
    inputs = (q, k, v, bias, sinks)
    return [torch.empty(t.shape, dtype=t.dtype, device=t.device) for t, needed in zip(inputs, wanted) if needed]


def _save(ctx, inputs, output):  # type: ignore[no-untyped-def]
    q, k, v, bias, sinks, arrays, spec = inputs
    ctx.save_for_backward(q, k, v, bias, sinks, *output, *arrays)
    ctx.spec = spec
    ctx.set_materialize_grads(False)


def _backward(ctx, dout, dlse):  # type: ignore[no-untyped-def]
    q, k, v, bias, sinks, out, lse, *arrays = ctx.saved_tensors
    nothing = (None,) * 5 + ([None] * len(arrays), None)
    if dout is None and dlse is None:
        return nothing
    dout = torch.zeros_like(out) if dout is None else dout
    wanted = [bool(needed) for needed in ctx.needs_input_grad[:5]]
    made = iter(_attention_backward(q, k, v, bias, sinks, out, lse, dout, dlse, arrays, ctx.spec, wanted))
    return (*(next(made) if needed else None for needed in wanted), *nothing[5:])


_attention.register_autograd(_backward, setup_context=_save)


@torch.library.custom_op("ladon::attention_weights", mutates_args=())
def attention_weights(q: Tensor, k: Tensor, bias: Optional[Tensor], arrays: List[Tensor], spec: str) -> Tensor:
    return _ladon.attention_weights(_dense(q), _dense(k), bias=_dense(bias), **_unpacked(spec, arrays))


@attention_weights.register_fake
def _(q, k, bias, arrays, spec):  # type: ignore[no-untyped-def]
    return q.new_empty((q.shape[0], q.shape[2], q.shape[1], k.shape[1]))


@torch.library.custom_op("ladon::rope", mutates_args=())
def rotate(x: Tensor, arrays: List[Tensor], spec: str, back: bool) -> Tensor:
    function = _ladon.rope_backward if back else _ladon.rope
    return function(_dense(x), **_unpacked(spec, arrays))


@rotate.register_fake
def _(x, arrays, spec, back):  # type: ignore[no-untyped-def]
    return x.new_empty(x.shape)


def _save_rope(ctx, inputs, output):  # type: ignore[no-untyped-def]
    _, arrays, ctx.spec, ctx.back = inputs
    ctx.save_for_backward(*arrays)


def _rope_backward(ctx, dout):  # type: ignore[no-untyped-def]
    arrays = list(ctx.saved_tensors)
    return rotate(dout, arrays, ctx.spec, not ctx.back), [None] * len(arrays), None, None


rotate.register_autograd(_rope_backward, setup_context=_save_rope)
