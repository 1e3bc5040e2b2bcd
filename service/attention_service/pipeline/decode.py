"""Decode: from a body to the fields of a request."""

from __future__ import annotations

from typing import Final

from pydantic import ByteSize

from attention_service.codecs import Codec
from attention_service.codecs.decoded import Body, Decoded
from attention_service.errors import MemoryLimit
from attention_service.pipeline.execution import Execution

# If even the worst body of this length takes at most 1 / BOUND_SHARE of the memory, it is not scanned for an estimate.
BOUND_SHARE: Final = 64


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
    needed = codec.decode_bound(len(body), limit)
    if needed > available // BOUND_SHARE:
        needed = codec.decode_bytes(body, limit)
    if needed > available:
        expected = f"a body that takes at most {ByteSize(available).human_readable()} while it is decoded"
        raise MemoryLimit.at("", expected, f"one that takes about {ByteSize(needed).human_readable()}")
    if len(body) <= codec.decode_inline:
        await execution.grow(needed)
        execution.timings.step("queue")
        decoded = codec.decode_quickly(body, limit)
        if decoded is not None:
            return decoded
    async with execution.cancel_on_disconnect():
        await execution.grow(needed, slot=True)
        execution.timings.step("queue")
        return await execution.in_thread(codec.decode, body, limit)
