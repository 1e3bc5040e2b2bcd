"""Encode: from a result to the headers and chunks of an answer."""

from __future__ import annotations

from attention_service.attention.result import Result
from attention_service.codecs import Codec
from attention_service.codecs.chunks import Encoded
from attention_service.pipeline.admit import answer_bytes
from attention_service.pipeline.execution import Execution
from attention_service.pipeline.prepare import PreparedRequest
from attention_service.schemas.response import answer


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
