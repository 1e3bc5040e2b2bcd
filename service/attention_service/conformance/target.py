"""The implementation under test: a callable that takes the fields of a request by name."""

from __future__ import annotations

import inspect
import os
import traceback
from collections.abc import Callable, Collection, Mapping
from functools import update_wrapper
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import numpy as np

from attention_service.codecs.array_objects import as_numpy
from attention_service.library.calls import named

Target = Callable[..., Any]
PACKAGE: Final = str(Path(__file__).resolve().parents[1]) + os.sep
# Characters that are shown of the message of somebody else's error.
SHOWN: Final = 1000
ALIGNMENT: Final = 64  # bytes


class Unsupported(Exception):
    """Raised by an implementation for a request that it has no arguments for."""


class TargetFailed(Exception):
    """Raised for what the code of an implementation raised; the message names the place in its file."""

    def __init__(self, name: str, error: BaseException, target: Target | None = None) -> None:
        super().__init__(f"{name} raised {described(error, target)}")


def load_target(name: str) -> Target:
    """The callable `module:function`. Errors: ImportError, ValueError; TargetFailed for what the module raises."""
    module, _, path = name.partition(":")
    if not module or not path or "/" in module or module.endswith(".py"):
        raise ValueError(f"{name}: expected module:function, as in kernels:attention for kernels.py")
    try:
        found: Any = import_module(module)
    except (Exception, SystemExit) as error:  # of somebody else's code: anything
        if isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}."):
            raise
        raise TargetFailed(module, error) from error
    for part in path.split("."):
        if not hasattr(found, part):
            raise ValueError(f"{name}: {module} has no {path}")
        found = getattr(found, part)
    if not callable(found):
        raise ValueError(f"{name}: not callable")
    target: Target = found
    return target


class WithTensors:
    """A callable that is given tensors of torch on a device in the place of arrays."""

    def __init__(self, target: Target, device: str) -> None:
        """Errors: ModuleNotFoundError without torch; RuntimeError, or another error of torch, for the device."""
        import torch

        torch.empty(0, device=device)
        self._target, self._device = target, device
        update_wrapper(self, target)

    def __call__(self, **fields: Any) -> Any:
        """What the callable returns for these fields."""
        from attention_service.torch_arrays import as_array

        tensors = self._converted(fields)
        found = self._target(**tensors)
        if "out" in fields:  # which the callable writes to: a tensor may have memory of its own
            fields["out"][...] = as_array(tensors["out"])
        return found

    def tensor(self, array: np.ndarray) -> Any:
        """An array, which is writeable, as a tensor on the device."""
        from attention_service.torch_arrays import as_tensor

        return as_tensor(array).to(self._device)

    def _converted(self, value: Any) -> Any:
        if isinstance(value, Mapping):
            return {name: self._converted(inner) for name, inner in value.items()}
        if isinstance(value, tuple):
            return tuple(map(self._converted, value))
        return self.tensor(value) if isinstance(value, np.ndarray) else value


def parameters(target: Target) -> Mapping[str, inspect.Parameter] | None:
    """The parameters of a callable by name; None if it has no signature."""
    try:
        return inspect.signature(target).parameters
    except ValueError:
        return None


def copied(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields with arrays of their own, which may be written to."""
    return {name: _copy(value) for name, value in fields.items()}


def _copy(value: Any) -> Any:
    if isinstance(value, Mapping):
        return copied(value)
    if isinstance(value, tuple):
        return tuple(map(_copy, value))
    return _copy_array(value) if isinstance(value, np.ndarray) else value


def _copy_array(array: np.ndarray) -> np.ndarray:
    """A copy that begins at a multiple of 64 bytes, as elsewhere some libraries round in another way."""
    memory = np.empty(array.nbytes + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    copy = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def run(target: Target, fields: Mapping[str, Any]) -> Any:
    """What an implementation returns for copies of these fields.

    Errors: Unsupported for NotImplemented, and what the implementation raises.
    """
    found = target(**copied(fields))
    if found is NotImplemented:
        raise Unsupported("NotImplemented")
    return found


def answer(target: Target, fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """The same, by name."""
    return present(run(target, fields))


def present(found: Any) -> dict[str, Any]:
    """What an implementation returned, by name."""
    return {name: array for name, array in named(found).items() if array is not None}


def supported_answer(target: Target, fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """What an implementation returns for a request, by name, arrays as they are.

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
        return answer(target, fields)
    except NotImplementedError as error:
        raise Unsupported(str(error)) from None


def call(target: Target, fields: Mapping[str, Any], needed: Collection[str] = ("output",)) -> dict[str, np.ndarray]:
    """Copies of the arrays that an implementation returns for a request, by name: its next call may overwrite them.

    needed: names of arrays that it must return, beside those that the request includes

    Errors: as of `supported_answer`; Unsupported also where one of them is missing.
    """
    arrays = {name: np.array(array) for name, array in as_numpy(supported_answer(target, fields)).items()}
    missing = [name for name in (*needed, *fields.get("include", ())) if name not in arrays]
    if missing:
        raise Unsupported(f"returns no {missing[0]}")
    return arrays


def described(error: BaseException, target: Target | None = None) -> str:
    """The type and the message of what an implementation raised, and the place in its file."""
    try:
        message = " ".join(str(error).split())[:SHOWN]
    except Exception:  # of its own __str__
        message = "without a message"
    return f"{type(error).__name__}: {message}{_place(error, target)}"


def _place(error: BaseException, target: Target | None) -> str:
    """The last place of a traceback in the file of a callable; else the last place outside of this package."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(("<frozen ", PACKAGE))
    ]
    try:
        file = None if target is None else inspect.getsourcefile(inspect.unwrap(target))
    except TypeError:  # an object that is no function
        file = None
    own = [frame for frame in frames if frame.filename == file] or frames
    if not own:
        return ""
    path = Path(own[-1].filename)
    shown = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    return f" ({shown}, line {own[-1].lineno}, in {own[-1].name}: {own[-1].line})"
