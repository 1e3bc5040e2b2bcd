"""Comparisons as operations of the pipeline: of a request, and of a call."""

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
from attention_service.pipeline.calls import call_prepare_cost, in_arguments
from attention_service.pipeline.operation import Cost, Operation, P, PrepareCost, R
from attention_service.schemas.compare import CompareCallRequest, CompareReport, CompareRequest

JSON: Final = "application/json"
# Heads of a comparison: mistakes of some are looked for head by head.
MAX_HEADS: Final = 2**14


class ReportingOperation(Operation[P, str, R]):
    """An operation that returns a report as JSON. backend: NumPy's, which computes the reference"""

    encoders = {JSON: JSON}

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    @property
    def _workers(self) -> int:
        """Threads of a comparison."""
        return 1 if (pool := pool_of(self._backend)) is None else pool.threads


class CompareOperation(ReportingOperation[Question, Comparison]):
    """POST /attention/compare."""

    schemas = (CompareRequest,)

    def prepare(self, decoded: Decoded, layer: Layer | None = None, check: Check = no_check) -> Question:
        """The question of the request."""
        question = make_question(decoded, layer)
        _check_heads(question.plan.sizes.num_heads, "")
        return question

    def cost(self, request: Question, encoder: str) -> Cost:
        return _cost(comparison_bytes(request, self._workers))

    def compute(self, request: Question, check: Check) -> Comparison:
        return compare_question(request, self._backend, check)

    def encode(self, request: Question, result: Comparison, encoder: str, request_id: str) -> Encoded:
        return _encoded(make_report(result, request_id), encoder)


class PreparedCallQuestion(NamedTuple):
    """A question about a call, and the memory that its comparison takes, in bytes."""

    asked: CallQuestion
    memory: int


class CompareCallOperation(ReportingOperation[PreparedCallQuestion, CallComparison]):
    """POST /attention/call/compare."""

    schemas = (CompareCallRequest,)

    def prepare_cost(self, decoded: Decoded) -> PrepareCost:
        return call_prepare_cost(decoded, parts=True)

    def prepare(self, decoded: Decoded, layer: Layer | None = None, check: Check = no_check) -> PreparedCallQuestion:
        """The question of the request."""
        asked = call_question(decoded)
        with in_arguments():
            _check_heads(asked.addressed.query.heads, f"/{asked.addressed.query.name}")
            return PreparedCallQuestion(asked, call_bytes(asked, self._workers, check))

    def cost(self, request: PreparedCallQuestion, encoder: str) -> Cost:
        return _cost(request.memory)

    def compute(self, request: PreparedCallQuestion, check: Check) -> CallComparison:
        """The comparison. Errors: InvalidRequest, with pointers into /arguments, and what `check` raises."""
        with in_arguments():
            return compare_call(request.asked, self._backend, check)

    def encode(self, request: PreparedCallQuestion, result: CallComparison, encoder: str, request_id: str) -> Encoded:
        return _encoded(make_call_report(result, request_id), encoder)


def _cost(memory: int) -> Cost:
    """What a comparison costs. Always in a worker thread: it computes its request some hundred times."""
    return Cost(math.inf, memory, memory, encodes_inline=False)


def _encoded(report: CompareReport, encoder: str) -> Encoded:
    """A report as JSON."""
    return whole(encoder, report.model_dump_json().encode())


def _check_heads(count: int, pointer: str) -> None:
    """Refuse more heads than a comparison looks at one by one. Errors: ShapeMismatch."""
    if count > MAX_HEADS:
        raise ShapeMismatch.at(pointer, f"at most {MAX_HEADS} heads in a comparison", str(count))
