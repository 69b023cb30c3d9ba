"""Functions that inspect.signature() can read.

The compiled module's functions have their signatures as text alone, and take no attributes.
"""

import functools
import inspect
from typing import Any, Callable, Dict


def described(native: Any) -> Callable[..., Any]:
    """The same function, with its signature and without the copy of it in its docstring."""
    text, doc, *_ = native.__nb_signature__[0]
    namespace: Dict[str, Any] = {}
    exec(f"from __future__ import annotations\n{text}: ...", namespace)

    def call(*args: Any, **kwargs: Any) -> Any:
        return native(*args, **kwargs)

    functools.update_wrapper(call, native, assigned=("__name__", "__qualname__"))
    call.__module__ = "ladon"
    call.__doc__ = doc
    call.__signature__ = inspect.signature(namespace[native.__name__])  # type: ignore[attr-defined]
    return call
