"""The path of a comparison in the pipeline: decode, prepare, admit, compare, encode."""

from __future__ import annotations

from math import prod
from typing import Final

from pydantic import ByteSize

from service.attention.arrays import compute_dtype
from service.attention.cost import arrays_of
from service.codecs import Codec
from service.codecs.chunks import MAX_CHUNK, Encoded, encoded
from service.codecs.decoded import Body, Decoded
from service.comparison.compare import Comparison, Question, compare_question
from service.comparison.question import make_question
from service.comparison.report import make_report
from service.comparison.samples import MAX_BATCHES, MAX_HEADS, MAX_ROWS, MAX_SCORES, WHOLE
from service.comparison.solve import BLOCK
from service.errors import MemoryLimit
from service.pipeline.decode import decode
from service.pipeline.engine import Engine
from service.pipeline.execution import Execution
from service.runtime.machine import memory_left

JSON: Final = "application/json"
# Copies of the scores of a block or sample that live at the same time, of 8 bytes each.
COPIES: Final = 12
# Copies of an array that was sent, in bytes for each element: as sent, as reference, and once for each legal rounding.
ARRAY_BYTES: Final = 64
# Answers of mutants that are kept for a sample.
ANSWERS: Final = 128


async def run_comparison(
    engine: Engine, body: Body, decoder: Codec, encoder: Codec, execution: Execution, request_id: str
) -> Encoded:
    """The encoded report on the request in a body, see service.pipeline.run. The encoder does not matter: it is JSON.

    Errors: ServiceError of every kind, Cancelled.
    """
    execution.begin(len(body))
    decoded = await decode(decoder, body, engine.settings.max_body_bytes, execution)
    del body
    async with execution.cancel_on_disconnect():
        question = await _prepare(decoded, execution)
        needed = comparison_bytes(question)
        await execution.grow(decoded.nbytes + needed, slot=True, last=True)
        execution.timings.step("queue")
        comparison = await execution.in_thread(_compare, engine, question, needed, execution)
        execution.metadata = comparison.metadata
        execution.timings.step("compute")
        text = await execution.in_thread(_encoded, comparison, request_id)
    execution.lease.release_slot()
    execution.lease.shrink(len(text))
    chunks = (text[start : start + MAX_CHUNK] for start in range(0, len(text), MAX_CHUNK))
    answer = encoded(JSON, chunks, len(text))
    execution.timings.step("encode")
    return answer


async def _prepare(decoded: Decoded, execution: Execution) -> Question:
    question = await execution.in_thread(make_question, decoded)
    execution.lease.release_slot()
    execution.timings.step("prepare")
    return question


def _compare(engine: Engine, question: Question, needed: int, execution: Execution) -> Comparison:
    try:
        return compare_question(question, engine.reference, execution.deadline.check)
    except MemoryError:
        pass
    available = memory_left()
    left = "" if available is None else f", of {ByteSize(available).human_readable()} that are free"
    about = f"one that needs about {ByteSize(needed).human_readable()}{left}"
    raise MemoryLimit.at("", "a comparison whose memory can be had", about, "fewer queries or keys need less")


def _encoded(comparison: Comparison, request_id: str) -> bytes:
    return make_report(comparison, request_id).model_dump_json().encode()


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
