"""Whole layers as operators of torch's library: what torch.compile and torch.export see of a ladon.torch.Module.

The operators are functions of tensors alone: inputs, parameters, and text that says which layer it is. Backward runs the
forward pass again, because what a layer saves is not a tensor.
"""

import ast
import functools
import itertools
import threading
import weakref
from typing import Any, Dict, List, Optional, Tuple

import torch
from torch import Tensor

import ladon as _ladon

from ._torch_operators import _dense, _unpacked

# Modules by their number: where the operator's parameters are a module's own memory, its layer is used as it is.
_modules: "weakref.WeakValueDictionary[int, Any]" = weakref.WeakValueDictionary()
_numbers = itertools.count()


def describe(module: Any) -> str:
    """Text from which the operators find the module's layer, or make such a layer again."""
    number = next(_numbers)
    _modules[number] = module
    layer = module.layer
    names = [name for name, _ in module.named_parameters()]  # in the order of parameters()
    return repr((number, type(layer).__name__, layer.options, names))


@functools.lru_cache(maxsize=256)
def _read(text: str) -> Tuple[int, str, Dict[str, Any], List[str]]:
    return ast.literal_eval(text)  # type: ignore[no-any-return]


def _layer_of(text: str, parameters: List[Tensor], training: bool) -> Tuple[Any, Any, List[str]]:
    """A layer with these parameters, the lock of its gradients, and the parameters' names."""
    number, kind, options, names = _read(text)
    module = _modules.get(number)
    layer = None if module is None else module.layer
    if layer is not None:
        own = layer.parameters("torch")
        if any(own[n].data_ptr() != p.data_ptr() or own[n].dtype != p.dtype for n, p in zip(names, parameters)):
            layer = None
    if layer is not None:
        lock = module._gradient_lock
    else:
        lock = threading.Lock()
        first = parameters[0]
        layer = getattr(_ladon, kind)(**{**options, "dtype": first.dtype, "device": str(first.device)})
        for name, parameter in zip(names, parameters):
            layer.set_parameter(name, parameter.detach())
    layer.train(training)
    return layer, lock, names


def _options_of(spec: str, arrays: List[Tensor], seed: Optional[Tensor]) -> Dict[str, Any]:
    options = _unpacked(spec, arrays)
    if seed is not None:
        options["dropout_seed"] = int(seed)
    return options


@torch.library.custom_op("ladon::layer", mutates_args=())
def layer_forward(x: Tensor, key: Optional[Tensor], value: Optional[Tensor], parameters: List[Tensor],
                  arrays: List[Tensor], seed: Optional[Tensor], text: str, spec: str, training: bool) -> Tensor:
    layer, _, _ = _layer_of(text, parameters, training)
    with torch.no_grad():
        return layer.forward(  # type: ignore[no-any-return]
            _dense(x), _dense(key), _dense(value), **_options_of(spec, arrays, seed))


@layer_forward.register_fake
def _(x, key, value, parameters, arrays, seed, text, spec, training):  # type: ignore[no-untyped-def]
    return x.new_empty(x.shape)


@torch.library.custom_op("ladon::layer_backward", mutates_args=())
def layer_backward(x: Tensor, key: Optional[Tensor], value: Optional[Tensor], parameters: List[Tensor],
                   arrays: List[Tensor], seed: Optional[Tensor], dout: Tensor, text: str, spec: str,
                   training: bool) -> List[Tensor]:
    layer, lock, names = _layer_of(text, parameters, training)
    with torch.no_grad(), lock:
        _, saved = layer.forward_training(
            _dense(x), _dense(key), _dense(value), **_options_of(spec, arrays, seed))
        layer.zero_grad()
        of_inputs = layer.backward(_dense(dout), saved)
        named = layer.gradients("torch")
        of_parameters = [named[n].to(p.dtype, copy=True) for n, p in zip(names, parameters)]
    return [*(gradient for gradient in of_inputs if gradient is not None), *of_parameters]


@layer_backward.register_fake
def _(x, key, value, parameters, arrays, seed, dout, text, spec, training):  # type: ignore[no-untyped-def]
    inputs = [tensor for tensor in (x, key, value) if tensor is not None]
    return [torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (*inputs, *parameters)]


def _save(ctx, inputs, output):  # type: ignore[no-untyped-def]
    x, key, value, parameters, arrays, seed, text, spec, training = inputs
    ctx.save_for_backward(x, key, value, seed, *parameters, *arrays)
    ctx.num_parameters = len(parameters)
    ctx.described = (text, spec, training)


def _backward(ctx, dout):  # type: ignore[no-untyped-def]
    x, key, value, seed, *rest = ctx.saved_tensors
    parameters, arrays = rest[:ctx.num_parameters], rest[ctx.num_parameters:]
    made = iter(layer_backward(x, key, value, parameters, arrays, seed, dout, *ctx.described))
    of_inputs = [None if tensor is None else next(made) for tensor in (x, key, value)]
    return (*of_inputs, list(made), [None] * len(arrays), None, None, None, None)


layer_forward.register_autograd(_backward, setup_context=_save)
