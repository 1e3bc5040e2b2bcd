"""Encode: from a result to the headers and chunks of an answer."""

from __future__ import annotations

from service.attention.result import Result
from service.codecs import Codec
from service.codecs.chunks import Encoded
from service.pipeline.admit import answer_bytes
from service.pipeline.execution import Execution
from service.pipeline.prepare import PreparedRequest
from service.schemas.response import answer


async def encode(
    codec: Codec, request: PreparedRequest, result: Result, request_id: str, execution: Execution
) -> Encoded:
    """The encoded answer. Chunks that are made one by one cost nothing yet. Errors: NotAcceptable, MemoryLimit."""
    if execution.lease.counted:
        execution.lease.shrink(answer_bytes(request, codec))
    fields = answer(request.spec, result, request_id)
    if request.plan.returned_bytes < codec.encode_inline:
        encoded = codec.encode(fields, request.decoded)
    else:
        encoded = await execution.in_thread(codec.encode, fields, request.decoded)
    if isinstance(encoded.chunks, list):
        execution.timings.step("encode")
    return encoded
