"""Functions, methods and classes that inspect.signature() can read.

The compiled module's functions have their signatures as text alone, and take no attributes.
"""

import functools
import inspect
import re
from types import ModuleType
from typing import Any, Callable, Dict, Optional


def signature_of(native: Any) -> inspect.Signature:
    """From the text that nanobind keeps."""
    text, _, defaults = native.__nb_signature__[0]
    text = re.sub(r"\\(\d+)", r"defaults[\1]", text)  # a default stands as \0, \1, ...
    namespace: Dict[str, Any] = {"defaults": defaults}
    exec(f"from __future__ import annotations\n{text}: ...", namespace)
    return inspect.signature(namespace[native.__name__])


def described(native: Any, module: str = "ladon") -> Callable[..., Any]:
    """The same function, with its signature and without the copy of it in its docstring."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return native(*args, **kwargs)

    functools.update_wrapper(call, native, assigned=("__name__", "__qualname__"))
    call.__module__ = module
    call.__doc__ = native.__nb_signature__[0][1]
    call.__signature__ = signature_of(native)  # type: ignore[attr-defined]
    return call


def describe_functions(namespace: Dict[str, Any]) -> None:
    """Replaces the compiled functions of a module."""
    for name, value in list(namespace.items()):
        if type(value).__name__ == "nb_func":
            namespace[name] = described(value, namespace["__name__"])


class _ClassSignature:
    """A class's __signature__: its constructor's, and of an instance that of its call."""

    def __init__(self, native: type) -> None:
        self.constructor = native.__init__  # type: ignore[misc]
        self.call = getattr(native, "__call__", None)

    def __get__(self, instance: Any, owner: Optional[type] = None) -> inspect.Signature:
        native = self.constructor if instance is None else self.call
        # A class that derives from this one may have its own constructor or call.
        now = getattr(owner, "__init__" if instance is None else "__call__", None)
        if native is not now or type(native).__name__ != "nb_method":
            raise AttributeError("__signature__")
        signature = signature_of(native)
        answer = inspect.Signature.empty if instance is None else signature.return_annotation
        return signature.replace(parameters=list(signature.parameters.values())[1:], return_annotation=answer)


def describe_classes(module: ModuleType) -> None:
    """Gives the compiled classes of a module signatures, and their methods."""
    for native in list(vars(module).values()):
        if not isinstance(native, type) or native.__module__ != module.__name__:
            continue
        for name, value in list(vars(native).items()):
            if name.startswith("_") or len(getattr(value, "__nb_signature__", ())) != 1:
                continue
            kind = type(value).__name__
            if kind == "nb_method":
                setattr(native, name, described(value))
            elif kind == "nb_func":
                setattr(native, name, staticmethod(described(value)))
        setattr(native, "__signature__", _ClassSignature(native))
