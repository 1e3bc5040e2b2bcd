"""Comparisons as operations of the pipeline: of a request, and of a call."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, Generic, NamedTuple, TypeVar

from attention_service.backends.base import Backend, Check, no_check
from attention_service.codecs.chunks import Encoded, whole
from attention_service.codecs.decoded import Decoded
from attention_service.comparison.calls.compare import CallComparison, compare_call
from attention_service.comparison.calls.parts import call_bytes
from attention_service.comparison.calls.question import CallQuestion
from attention_service.comparison.calls.report import make_call_report
from attention_service.comparison.calls.request import call_question
from attention_service.comparison.compare import compare_question
from attention_service.comparison.engine.comparison import Comparison
from attention_service.comparison.memory import comparison_bytes
from attention_service.comparison.question import make_question
from attention_service.comparison.report import make_report
from attention_service.comparison.truth import Question, pool_of
from attention_service.errors import ShapeMismatch
from attention_service.layers.layer import Layer
from attention_service.pipeline.calls import call_prepare_cost, in_arguments
from attention_service.pipeline.operation import Cost, Operation, PrepareCost, R
from attention_service.schemas.compare import CompareCallRequest, CompareReport, CompareRequest

JSON: Final = "application/json"
# Heads of a comparison: mistakes of some are looked for head by head.
MAX_HEADS: Final = 2**14
Q = TypeVar("Q")


class Prepared(NamedTuple, Generic[Q]):
    """A question, and the memory that its comparison takes, in bytes."""

    question: Q
    memory: int


class ReportingOperation(Operation[Prepared[Q], str, R]):
    """An operation that returns a report as JSON. backend: NumPy's, which computes the reference"""

    encoders: Mapping[str, str] = MappingProxyType({JSON: JSON})

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._workers = 1 if (pool := pool_of(backend)) is None else pool.threads

    def cost(self, request: Prepared[Q], encoder: str) -> Cost:
        """Always in a worker thread: a comparison computes its request some hundred times."""
        return Cost(math.inf, request.memory, request.memory, encodes_inline=False)

    def encode(self, request: Prepared[Q], result: R, encoder: str, request_id: str) -> Encoded:
        return whole(encoder, self.report(result, request_id).model_dump_json().encode())

    @abstractmethod
    def report(self, result: R, request_id: str | None = None) -> CompareReport:
        """The report of a comparison. request_id: of a service"""


class CompareOperation(ReportingOperation[Question, Comparison[Question]]):
    """POST /attention/compare."""

    schemas = (CompareRequest,)

    def prepare(self, decoded: Decoded, layer: Layer | None = None, check: Check = no_check) -> Prepared[Question]:
        question = make_question(decoded, layer)
        _check_heads(question.plan.sizes.num_heads, "")
        return Prepared(question, comparison_bytes(question, self._workers))

    def compute(self, request: Prepared[Question], check: Check) -> Comparison[Question]:
        return compare_question(request.question, self._backend, check)

    def report(self, result: Comparison[Question], request_id: str | None = None) -> CompareReport:
        return make_report(result, request_id)


class CompareCallOperation(ReportingOperation[CallQuestion, CallComparison]):
    """POST /attention/call/compare."""

    schemas = (CompareCallRequest,)

    def prepare_cost(self, decoded: Decoded) -> PrepareCost:
        return call_prepare_cost(decoded, parts=True)

    def prepare(self, decoded: Decoded, layer: Layer | None = None, check: Check = no_check) -> Prepared[CallQuestion]:
        question = call_question(decoded)
        with in_arguments():
            _check_heads(question.addressed.query.heads, f"/{question.addressed.query.name}")
            return Prepared(question, call_bytes(question, self._workers, check))

    def compute(self, request: Prepared[CallQuestion], check: Check) -> CallComparison:
        with in_arguments():
            return compare_call(request.question, self._backend, check)

    def report(self, result: CallComparison, request_id: str | None = None) -> CompareReport:
        return make_call_report(result, request_id)


def _check_heads(count: int, pointer: str) -> None:
    """Refuse more heads than a comparison looks at one by one. Errors: ShapeMismatch."""
    if count > MAX_HEADS:
        raise ShapeMismatch.at(pointer, f"at most {MAX_HEADS} heads in a comparison", str(count))
