"""The service's NumPy backend, called directly."""

from __future__ import annotations

from typing import Any

import numpy as np

from attention_service.attention.operands import make_operands
from attention_service.attention.planning import make_plan
from attention_service.attention.result import Result, make_result
from attention_service.attention.spec import AttentionSpec, Output
from attention_service.backends.numpy.backend import NumpyBackend
from attention_service.runtime.machine import cpu_count


def use_all_processors() -> int:
    """Let the backend use one thread per processor, as the service does, and return their number."""
    Attention.backend = NumpyBackend(cpu_count())
    return cpu_count()


class Attention:
    """One planned computation, which can be executed repeatedly. backend: of all of them"""

    backend = NumpyBackend()

    def __init__(
        self,
        query: np.ndarray,
        key: np.ndarray,
        value: np.ndarray,
        *,
        include: tuple[Output, ...] = (),
        **options: Any,
    ) -> None:
        spec = AttentionSpec(query, key, value, include=include, **options)
        self._plan = make_plan(spec)
        self._operands = make_operands(spec, self._plan, spec.sources)

    def compute(self) -> object:
        """Execute the plan."""
        return self.backend.execute(self._plan, self._operands, "cpu")

    def result(self) -> Result:
        """Execute the plan, and return the arrays of the answer."""
        return make_result(self._plan, self.backend.execute(self._plan, self._operands, "cpu"))
