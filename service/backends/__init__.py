"""Backends execute plans. Each is an import string, loaded when first asked for, so that none burdens the others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from typing import Final, Protocol, cast

import numpy as np

from service.attention.operands import Operands
from service.attention.plan import Plan
from service.attention.result import Computed, Result
from service.attention.spec import Backend
from service.backends import numpy
from service.errors import UnknownBackend

BACKENDS: Final[dict[Backend, str]] = {"numpy": "service.backends.numpy", "torch": "service.backends.torch"}


class Executor(Protocol):
    """What the module of a backend offers."""

    def quick(self, plan: Plan, sources: Mapping[str, np.ndarray], device: str) -> Result | None:
        """The answer to what takes less time to compute than to prepare; None to anything else.

        sources: the fields that query, key and value come from, as they came
        """
        ...

    def execute(self, plan: Plan, operands: Operands, device: str, check: Callable[[], None] | None = None) -> Computed:
        """Compute what the plan includes, of operands that were made for it.

        check: called before each tile; what it raises ends the computation

        Errors: Overflow where a visible score is not finite, UnknownBackend for a device that is not there.
        """
        ...


def choose(backend: Backend, device: str) -> Executor:
    """The backend asked for; auto is NumPy, unless the device is one that only torch has. Errors: UnknownBackend."""
    if backend == "auto":
        backend = "torch" if device.startswith("cuda") else "numpy"
    return _load(backend)


def use_threads(count: int) -> None:
    """Let the NumPy backend compute by so many threads, in the whole process."""
    numpy.use_threads(count)


@cache
def _load(name: Backend) -> Executor:
    try:
        return cast(Executor, import_module(BACKENDS[name]))
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("service"):
            raise
        hint = f"install attention-service[{name}] where the service runs"
        raise UnknownBackend.at(
            "/backend", "a backend that is installed", f"{name} without {error.name}", hint
        ) from None
