"""The implementation under test: a callable that takes the fields of a request by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

import numpy as np

from attention_service.codecs.array_objects import as_numpy

Target = Callable[..., Any]


class Unsupported(Exception):
    """Raised by an implementation for a request that it has no arguments for."""


def load_target(name: str) -> Target:
    """The callable `module:function`. Errors: ImportError, ValueError."""
    module, _, path = name.partition(":")
    if not module or not path:
        raise ValueError(f"{name}: expected module:function")
    found: Any = import_module(module)
    for part in path.split("."):
        if not hasattr(found, part):
            raise ValueError(f"{name}: {module} has no {path}")
        found = getattr(found, part)
    if not callable(found):
        raise ValueError(f"{name}: not callable")
    target: Target = found
    return target


def copied(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields with arrays of their own, which may be written to."""
    return {name: _copy(value) for name, value in fields.items()}


def _copy(value: Any) -> Any:
    if isinstance(value, Mapping):
        return copied(value)
    return value.copy() if isinstance(value, np.ndarray) else value


def call(target: Target, fields: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """The arrays that an implementation returns for a request, by name.

    Errors: Unsupported also for a field that the callable has no argument for, and for NotImplemented; and what the
    implementation raises.
    """
    try:
        inspect.signature(target).bind(**fields)
    except TypeError as error:
        raise Unsupported(str(error)) from None
    except ValueError:
        pass  # a callable without a signature
    try:
        found = target(**copied(fields))
    except NotImplementedError as error:
        raise Unsupported(str(error)) from None
    if found is NotImplemented:
        raise Unsupported("NotImplemented")
    found = as_numpy(found if isinstance(found, Mapping) else {"output": found})
    arrays = {name: np.asarray(array) for name, array in found.items() if array is not None}
    missing = [name for name in ("output", *fields.get("include", ())) if name not in arrays]
    if missing:
        raise Unsupported(f"returns no {missing[0]}")
    return arrays
