"""Layers and caches as values: state dicts, copies and pickles."""

import copy
import os
from typing import Any, Dict, Mapping

import numpy as np

from ._errors import InvalidArgumentError


def state_dict(layer: Any, framework: str = "numpy") -> Dict[str, Any]:
    """The layer's weights by name; the arrays share its memory, as in PyTorch."""
    return dict(layer.parameters(framework))


def load_state_dict(layer: Any, state: Mapping[str, Any], strict: bool = True) -> None:
    """Copies weights in by name, all of them or none."""
    own = layer.parameters()
    missing = [name for name in own if name not in state]
    unexpected = [name for name in state if name not in own]
    if strict and (missing or unexpected):
        raise InvalidArgumentError(f"load_state_dict: missing {missing}, unexpected {unexpected}")
    for name, value in own.items():
        if name in state and tuple(state[name].shape) != tuple(value.shape):
            raise InvalidArgumentError(f"load_state_dict: {name}: got shape {tuple(state[name].shape)}, "
                                       f"expected {tuple(value.shape)}")
    before = {name: np.array(value) for name, value in own.items() if name in state}
    try:
        for name in before:
            layer.set_parameter(name, state[name])
    except BaseException:
        for name, value in before.items():
            layer.set_parameter(name, value)
        raise


def reduce_layer(layer: Any) -> Any:
    """For pickle: options, weights and mode. Gradients stay behind, as in PyTorch."""
    if hasattr(layer, "communicator"):
        raise TypeError("a layer that ranks share cannot be pickled: write_tensor_parallel_attention() and "
                        "save_training() of ladon.distributed write it to a file")
    on_host = layer if layer.device == "cpu" else layer.to("cpu")
    weights = {name: np.array(value) for name, value in on_host.parameters().items()}
    return rebuild_layer, (type(layer), layer.options, weights, layer.training), getattr(layer, "__dict__", None) or None


def rebuild_layer(kind: Any, options: Mapping[str, Any], weights: Mapping[str, Any],
                  training: bool) -> Any:
    # A class that derives from the layer's may have a constructor with other arguments, which is not called.
    native = next(base for base in kind.__mro__ if base.__module__ == "ladon._ladon")
    layer = kind.__new__(kind)
    native.__init__(layer, **options)
    load_state_dict(layer, weights)
    layer.train(training)
    return layer


def deep_copy_layer(layer: Any, memo: Dict[int, Any]) -> Any:
    """copy(), but of a class that derives from the layer's with its attributes."""
    if type(layer).__module__ == "ladon._ladon":
        return layer.copy()
    rebuild, arguments, attributes = reduce_layer(layer)
    made = rebuild(*arguments)
    memo[id(layer)] = made
    made.__dict__.update(copy.deepcopy(attributes or {}, memo))
    return made


class _MemoryFile:
    """A file without a name on a disk."""

    def __init__(self, content: bytes = b"") -> None:
        self.descriptor = os.memfd_create("ladon-cache")
        self.path = f"/proc/self/fd/{self.descriptor}"
        while content:
            content = content[os.write(self.descriptor, content):]

    def __enter__(self) -> "_MemoryFile":
        return self

    def __exit__(self, *_: Any) -> None:
        os.close(self.descriptor)

    def read(self) -> bytes:
        os.lseek(self.descriptor, 0, os.SEEK_SET)
        with os.fdopen(os.dup(self.descriptor), "rb") as file:
            return file.read()


def reduce_cache(cache: Any) -> Any:
    """For pickle: the kind, the options, and what save() writes."""
    if cache.kind == "paged":
        raise TypeError("a paged cache cannot be pickled: its pages belong to a PagePool; save() "
                        "writes its tokens, and load() reads them into a cache of any pool")
    with _MemoryFile() as file:
        cache.save(file.path)
        sizes = (dict(window_left=cache.window_left, spare=cache.spare) if cache.kind == "window"
                 else dict(capacity=cache.capacity))
        return rebuild_cache, (type(cache), cache.kind, {**cache.options, **sizes}, file.read())


def rebuild_cache(cache_class: Any, kind: str, arguments: Mapping[str, Any], content: bytes) -> Any:
    cache = getattr(cache_class, kind)(**arguments)
    with _MemoryFile(content) as file:
        cache.load(file.path)
    return cache
