"""Backends execute plans. Each is an import string, loaded when first asked for, so that none burdens the others."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Final, Protocol, cast

from service.attention.plan import Plan
from service.attention.result import Computed
from service.attention.spec import Backend

BACKENDS: Final[dict[Backend, str]] = {"auto": "service.backends.numpy", "numpy": "service.backends.numpy"}


class Executor(Protocol):
    """What the module of a backend offers."""

    def execute(self, plan: Plan) -> Computed:
        """Compute what the plan includes. Errors: Overflow where a visible score is not finite."""
        ...


@cache
def load(name: Backend) -> Executor:
    """The backend of this name."""
    return cast(Executor, import_module(BACKENDS[name]))
