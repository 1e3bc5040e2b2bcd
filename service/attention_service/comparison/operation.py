"""Comparisons as an operation of the pipeline."""

from __future__ import annotations

import math
from typing import Final

from attention_service.backends.base import Backend, Check
from attention_service.codecs.chunks import Encoded, whole
from attention_service.codecs.decoded import Decoded
from attention_service.comparison.compare import Comparison, compare_question
from attention_service.comparison.memory import comparison_bytes
from attention_service.comparison.question import make_question
from attention_service.comparison.report import make_report
from attention_service.comparison.truth import Question, pool_of
from attention_service.layers.layer import Layer
from attention_service.pipeline.operation import Cost, Operation

JSON: Final = "application/json"


class CompareOperation(Operation[Question, str, Comparison]):
    """POST /attention/compare. backend: NumPy's, which computes the reference"""

    def __init__(self, backend: Backend) -> None:
        self.encoders = {JSON: JSON}
        self._backend = backend

    def prepare(self, decoded: Decoded, layer: Layer | None = None) -> Question:
        """The question of the request."""
        return make_question(decoded, layer)

    def cost(self, request: Question, encoder: str) -> Cost:
        """Always in a worker thread: a comparison computes its request some hundred times."""
        memory = comparison_bytes(request, 1 if (pool := pool_of(self._backend)) is None else pool.threads)
        return Cost(math.inf, memory, memory, encodes_inline=False)

    def compute(self, request: Question, check: Check) -> Comparison:
        """The comparison."""
        return compare_question(request, self._backend, check)

    def encode(self, request: Question, result: Comparison, encoder: str, request_id: str) -> Encoded:
        """The report as JSON."""
        return whole(encoder, make_report(result, request_id).model_dump_json().encode())
