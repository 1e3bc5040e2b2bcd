"""Comparisons as an operation of the pipeline."""

from __future__ import annotations

import math
from typing import Final, NamedTuple

from attention_service.backends.base import Backend, Check, no_check
from attention_service.codecs.chunks import Encoded, whole
from attention_service.codecs.decoded import Decoded
from attention_service.comparison.calls.compare import CallComparison, compare_call
from attention_service.comparison.calls.parts import call_bytes
from attention_service.comparison.calls.question import CallQuestion
from attention_service.comparison.calls.report import make_call_report
from attention_service.comparison.calls.request import call_question
from attention_service.comparison.compare import Comparison, compare_question
from attention_service.comparison.memory import comparison_bytes
from attention_service.comparison.question import make_question
from attention_service.comparison.report import make_report
from attention_service.comparison.truth import Question, pool_of
from attention_service.errors import ShapeMismatch
from attention_service.layers.layer import Layer
from attention_service.pipeline.calls import call_prepare_cost, in_arguments, is_call
from attention_service.pipeline.operation import Cost, Operation, PrepareCost
from attention_service.schemas.compare import CompareRequest

JSON: Final = "application/json"
# Heads of a comparison: mistakes of some are looked for head by head.
MAX_HEADS: Final = 2**14


class PreparedCallQuestion(NamedTuple):
    """A question about a call, and the memory that its comparison takes, in bytes."""

    asked: CallQuestion
    memory: int


class CompareOperation(Operation[Question | PreparedCallQuestion, str, Comparison | CallComparison]):
    """POST /attention/compare. backend: NumPy's, which computes the reference"""

    schemas = (CompareRequest,)

    def __init__(self, backend: Backend) -> None:
        self.encoders = {JSON: JSON}
        self._backend = backend

    def prepare_cost(self, decoded: Decoded) -> PrepareCost:
        """What `prepare` costs."""
        return call_prepare_cost(decoded, parts=True) if is_call(decoded) else super().prepare_cost(decoded)

    def prepare(
        self, decoded: Decoded, layer: Layer | None = None, check: Check = no_check
    ) -> Question | PreparedCallQuestion:
        """The question of the request, about arrays or about the call of another library."""
        if not is_call(decoded):
            question = make_question(decoded, layer)
            _check_heads(question.plan.sizes.num_heads, "")
            return question
        asked = call_question(decoded)
        with in_arguments():
            _check_heads(asked.addressed.query.heads, f"/{asked.addressed.query.name}")
            return PreparedCallQuestion(asked, call_bytes(asked, self._workers, check))

    @property
    def _workers(self) -> int:
        """Threads of a comparison."""
        return 1 if (pool := pool_of(self._backend)) is None else pool.threads

    def cost(self, request: Question | PreparedCallQuestion, encoder: str) -> Cost:
        """Always in a worker thread: a comparison computes its request some hundred times."""
        if isinstance(request, PreparedCallQuestion):
            memory = request.memory
        else:
            memory = comparison_bytes(request, self._workers)
        return Cost(math.inf, memory, memory, encodes_inline=False)

    def compute(self, request: Question | PreparedCallQuestion, check: Check) -> Comparison | CallComparison:
        """The comparison."""
        if isinstance(request, Question):
            return compare_question(request, self._backend, check)
        with in_arguments():
            return compare_call(request.asked, self._backend, check)

    def encode(
        self,
        request: Question | PreparedCallQuestion,
        result: Comparison | CallComparison,
        encoder: str,
        request_id: str,
    ) -> Encoded:
        """The report as JSON."""
        if isinstance(result, CallComparison):
            report = make_call_report(result, request_id)
        else:
            report = make_report(result, request_id)
        return whole(encoder, report.model_dump_json().encode())


def _check_heads(count: int, pointer: str) -> None:
    """Refuse more heads than a comparison looks at one by one. Errors: ShapeMismatch."""
    if count > MAX_HEADS:
        raise ShapeMismatch.at(pointer, f"at most {MAX_HEADS} heads in a comparison", str(count))
