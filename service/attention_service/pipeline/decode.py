"""Decode: from a body to the fields of a request."""

from __future__ import annotations

from typing import Final

from pydantic import ByteSize

from attention_service.codecs.base import Codec
from attention_service.codecs.decoded import Body, Decoded
from attention_service.codecs.table import CODECS
from attention_service.pipeline.admission import memory_limit_error
from attention_service.pipeline.execution import Execution
from attention_service.settings import Settings

# If even the worst body of this length takes at most 1 / BOUND_SHARE of the memory, it is not scanned for an estimate.
BOUND_SHARE: Final = 64
# Copies of the decoded fields while a request is prepared: their own, and those of masks and casts.
PREPARED: Final = 2


async def decode(codec: Codec, body: Body, limit: int, execution: Execution) -> Decoded:
    """The fields of a body: decoded in the event loop where that is quick, else in a worker thread.

    limit: bytes that the body may unpack to. A slot that a thread needed is kept, to prepare the request.

    Errors: ServiceError of every kind; Cancelled.
    """
    if not (execution.lease.counted or codec.may_be_compressed):
        decoded = codec.decode(body, limit)
    else:
        decoded = await _decode_counted(codec, body, limit, execution)
    execution.timings.step("decode")
    return decoded


async def _decode_counted(codec: Codec, body: Body, limit: int, execution: Execution) -> Decoded:
    """Like `decode`, with memory from admission control."""
    available = execution.admission.memory
    needed, is_inline = codec.decode_bound(len(body), limit), len(body) <= codec.decode_inline
    # If the body is decoded inline, the bound is held only while nothing else runs.
    is_bound = needed <= available // BOUND_SHARE or (is_inline and execution.admission.has_room(needed))
    if not is_bound:
        needed = codec.decode_bytes(body, limit)
    if needed > available:
        hint = "send npz or safetensors, which take less than JSON, or raise ATTENTION_MEMORY_LIMIT"
        raise memory_limit_error(needed, available, hint, "allowed")
    if is_inline:
        await execution.grow(needed)
        execution.timings.step("queue")
        decoded = codec.decode_quickly(body, limit)
        if decoded is not None:
            execution.decoded_bytes = decoded.nbytes
            execution.lease.shrink(max(len(body), PREPARED * execution.decoded_bytes))
            return decoded
        if is_bound:
            needed = codec.decode_bytes(body, limit)
            execution.lease.shrink(needed)
    async with execution.cancel_on_disconnect():
        await execution.grow(needed, slot=True)
        execution.timings.step("queue")
        fields, execution.decoded_bytes = await execution.in_thread(_decode_and_measure, codec, body, limit)
        return fields


def _decode_and_measure(codec: Codec, body: Body, limit: int) -> tuple[Decoded, int]:
    """The fields of a body, and the memory that they take: a walk over as many strings as the body holds."""
    decoded = codec.decode(body, limit)
    return decoded, decoded.nbytes


def oversized_body(settings: Settings) -> str | None:
    """A warning if decoding the largest body of some format may take more memory than a worker has for all requests."""
    most, memory = settings.max_body_bytes, ByteSize(settings.memory_limit // settings.workers)
    needed = ByteSize(max(codec.decode_bound(most, most) for codec in CODECS.values()))
    if needed <= memory:
        return None
    return (
        f"ATTENTION_MEMORY_LIMIT: {memory.human_readable()} for each worker; a body of {most.human_readable()} "
        f"(ATTENTION_MAX_BODY_BYTES) may take {needed.human_readable()} to decode, and is then refused with 413"
    )
