"""Comparisons over HTTP: decode, prepare, admit, compare, encode."""

from __future__ import annotations

from math import prod
from typing import Final

from attention_service.attention.arrays import compute_dtype
from attention_service.attention.cost import arrays_of
from attention_service.attention.result import Metadata
from attention_service.backends.base import Check
from attention_service.codecs import Codec
from attention_service.codecs.chunks import Encoded
from attention_service.codecs.decoded import Body, Decoded
from attention_service.comparison.compare import Question, compare_question
from attention_service.comparison.question import make_question
from attention_service.comparison.report import make_report
from attention_service.comparison.samples import MAX_BATCHES, MAX_HEADS, MAX_ROWS, MAX_SCORES, WHOLE
from attention_service.comparison.solve import BLOCK
from attention_service.pipeline.engine import Engine
from attention_service.pipeline.execution import Execution
from attention_service.pipeline.threaded import Operation, run_in_thread

# Copies of the scores of a block or sample that live at the same time, of 8 bytes each.
COPIES: Final = 12
# Copies of an array that was sent, in bytes for each element: as sent, as reference, and once for each legal rounding.
ARRAY_BYTES: Final = 64
# Answers of mutants that are kept for a sample.
ANSWERS: Final = 128


class Comparing(Operation[Question]):
    """POST /attention/compare."""

    what = "a comparison"

    def prepare(self, decoded: Decoded) -> Question:
        """The question of a request."""
        return make_question(decoded)

    def memory(self, prepared: Question, engine: Engine) -> int:
        """See `comparison_bytes`."""
        return comparison_bytes(prepared)

    def answer(self, prepared: Question, engine: Engine, request_id: str, check: Check) -> tuple[bytes, Metadata]:
        """The report as JSON."""
        comparison = compare_question(prepared, engine.reference, check)
        return make_report(comparison, request_id).model_dump_json().encode(), comparison.metadata


async def run_comparison(
    engine: Engine, body: Body, decoder: Codec, encoder: Codec, execution: Execution, request_id: str
) -> Encoded:
    """The encoded report on the request in a body, see `run_in_thread`. The encoder does not matter: it is JSON."""
    return await run_in_thread(Comparing(), engine, body, decoder, encoder.media_type, execution, request_id)


def comparison_bytes(question: Question) -> int:
    """Upper bound of the memory of a comparison, beyond the arrays of the request, in bytes."""
    plan = question.plan
    (h, g, b, q, k, d, e), scores = plan.sizes, plan.score_count
    operands = b * (h * q * d + g * k * (d + e))
    sent = sum(array.size for array in (question.actual or {}).values())
    tables = sum(array.size for array in arrays_of(plan))
    row = k + d + e
    block = max(min(scores, BLOCK), row) + h * row
    heads = h if plan.roles.output_map else min(h, MAX_HEADS)
    rows = b * h * q if scores <= WHOLE else min(b, MAX_BATCHES) * heads * min(q, MAX_ROWS)
    sample = COPIES * min(scores, MAX_SCORES) + ANSWERS * rows * e
    width = compute_dtype(plan.dtype).itemsize + 8
    others = prod((b, h, q, e))
    return 5 * width * operands + ARRAY_BYTES * (sent + others) + 16 * tables + 8 * (COPIES * block + sample)
