"""Backends execute plans. Each is an import string, loaded when first asked for, so that none burdens the others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib import import_module
from typing import Final, Protocol, cast

import numpy as np

from service.attention.operands import Operands
from service.attention.plan import Plan
from service.attention.result import Computed, Result
from service.attention.spec import Backend
from service.errors import UnknownBackend

BACKENDS: Final[dict[Backend, str]] = {"numpy": "service.backends.numpy", "torch": "service.backends.torch"}


class Executor(Protocol):
    """What the module of a backend offers."""

    def quick(self, plan: Plan, sources: Mapping[str, np.ndarray], device: str) -> Result | None:
        """The answer to what takes less time to compute than to prepare; None to anything else.

        sources: the fields that query, key and value come from, as they came
        """
        ...

    def is_quick(self, plan: Plan, device: str) -> bool:
        """Whether `quick` answers, unless numbers are too large for its way."""
        ...

    def is_apart(self, device: str) -> bool:
        """Whether the device is another than the processor, for which a thread waits. Errors: UnknownBackend."""
        ...

    def peak_bytes(self, plan: Plan, device: str, copied: int | None = None) -> int:
        """Memory of the machine that computing takes beyond the arrays of the request, at most, results included.

        copied: bytes of those arrays that are cast, by `cost.copied_bytes`; None where it is not known

        Errors: UnknownBackend.
        """
        ...

    def warm_up(self, device: str) -> None:
        """Do what the first request would else wait for."""
        ...

    def use_threads(self, count: int) -> None:
        """Compute by so many threads, in the whole process."""
        ...

    def execute(self, plan: Plan, operands: Operands, device: str, check: Callable[[], None] | None = None) -> Computed:
        """Compute what the plan includes, of operands that were made for it.

        check: called before each tile; what it raises ends the computation

        Errors: Overflow where a visible score is not finite, UnknownBackend for a device that is not there.
        """
        ...


def choose(backend: Backend, device: str, preferred: Backend = "numpy") -> Executor:
    """The backend asked for; auto is the preferred one, unless the device is one that another has.

    Errors: UnknownBackend.
    """
    if backend == "auto":
        backend = "torch" if device.startswith("cuda") else preferred
    return _load(backend)


def prefer(backend: Backend) -> Backend:
    """What `auto` is to be for requests, if the service is set to this: auto is torch where that sees a GPU.

    Errors: UnknownBackend.
    """
    if backend != "auto":
        _load(backend)
        return backend
    with suppress(UnknownBackend):
        if _load("torch").is_apart("auto"):
            return "torch"
    return "numpy"


def use_threads(count: int) -> None:
    """Let backends compute by so many threads, in the whole process, those that are loaded later as well."""
    global _threads
    _threads = count
    for executor in _loaded.values():
        executor.use_threads(count)


_loaded: dict[Backend, Executor] = {}
_threads = 0


def _load(name: Backend) -> Executor:
    found = _loaded.get(name)
    if found is not None:
        return found
    try:
        found = cast(Executor, import_module(BACKENDS[name]))
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("service"):
            raise
        hint = f"install attention-service[{name}] where the service runs"
        raise UnknownBackend.at(
            "/backend", "a backend that is installed", f"{name} without {error.name}", hint
        ) from None
    if _threads:
        found.use_threads(_threads)
    _loaded[name] = found
    return found
