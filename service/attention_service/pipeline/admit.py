"""Admit: wait until a prepared request may compute."""

from __future__ import annotations

from typing import Literal

from pydantic import ByteSize

from attention_service.attention.cost import Memory
from attention_service.attention.outputs import OUTPUTS
from attention_service.attention.plan import Plan
from attention_service.codecs import Codec
from attention_service.errors import MemoryLimit
from attention_service.pipeline.admission import UNCOUNTED
from attention_service.pipeline.execution import Execution
from attention_service.pipeline.prepare import PreparedRequest

Place = Literal["inline", "thread", "batch"]


async def admit(request: PreparedRequest, encoder: Codec, execution: Execution) -> Place:
    """Wait until a request may compute, and return where: the place of its strategy, "inline if idle" decided.

    Afterwards the lease holds the most memory that the request takes from now on (none if that is little, and the lease
    not counted), and a slot for a worker thread. A request in a batch holds only the memory of its arrays and its
    answer; a batch that needs a worker thread takes the memory for computing, and a slot, with a lease of its own.

    Errors: MemoryLimit if the request can never have so much, Busy, Cancelled.
    """
    place = request.strategy.place
    if place == "inline if idle":  # waking a thread takes longer than computing
        others = execution.admission.counted_requests - execution.lease.counted  # without this request itself
        place = "thread" if others else "inline"
    memory = 0
    if execution.lease.counted or request.strategy.memory > UNCOUNTED:
        memory = _needed(request, encoder, execution.admission.memory)
        if place == "batch":  # the batch takes the memory for computing
            memory = answer_bytes(request, encoder)
    if place == "thread" or memory:
        async with execution.cancel_on_disconnect():
            await execution.grow(memory, slot=place == "thread", last=True)
        execution.timings.step("queue")
    return place


def answer_bytes(request: PreparedRequest, encoder: Codec) -> int:
    """Memory of a request while its answer is encoded."""
    returned = request.plan.returned_bytes
    return request.nbytes + returned + encoder.encode_bytes(returned, request.decoded)


def _needed(request: PreparedRequest, encoder: Codec, limit: int) -> int:
    """Bytes that a request takes from now on. Errors: MemoryLimit if they are more than the limit."""
    plan = request.plan
    encode = encoder.encode_bytes(plan.returned_bytes, request.decoded)
    memory = Memory(0, request.nbytes, request.strategy.memory, plan.returned_bytes, encode).peak
    if memory > limit:
        raise memory_limit_error(plan, memory, limit)
    return memory


def memory_limit_error(plan: Plan, needed: int, available: int | None) -> MemoryLimit:
    """The error for a plan that needs more memory than there is, by its estimate or because allocation failed."""
    about = f"one that needs about {ByteSize(needed).human_readable()}"
    if available is None or needed <= available:  # it failed all the same, so that only this much is known
        left = "" if available is None else f", of {ByteSize(available).human_readable()} that are free"
        return MemoryLimit.at("", "a request whose memory can be had", f"{about}{left}", _advice(plan))
    limit = f"a request that needs at most {ByteSize(available).human_readable()}"
    return MemoryLimit.at("", limit, about, _advice(plan))


def _advice(plan: Plan) -> str:
    """A hint how to make a plan smaller."""
    returned = {name for name in plan.selection.include if OUTPUTS[name].is_score_matrix}
    if not returned:
        return "fewer queries or keys at a time need less"
    if returned == {"attention_weights"} and plan.selection.top_k is None:
        return "top_k, select_queries, select_heads, or include without attention_weights need less"
    return f"include without {', '.join(sorted(returned))} needs less"
