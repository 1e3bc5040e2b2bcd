"""The path of every request, whatever its transport: decode, prepare, admit, compute, encode."""

from __future__ import annotations

from attention_service.codecs import Codec
from attention_service.codecs.chunks import Encoded
from attention_service.codecs.decoded import Body
from attention_service.pipeline.admit import admit
from attention_service.pipeline.compute import compute
from attention_service.pipeline.decode import decode
from attention_service.pipeline.encode import encode
from attention_service.pipeline.engine import Engine
from attention_service.pipeline.execution import Execution
from attention_service.pipeline.prepare import prepare


async def run(
    engine: Engine, body: Body, decoder: Codec, encoder: Codec, execution: Execution, request_id: str
) -> Encoded:
    """The encoded answer to the request in a body. The time limit starts now.

    The caller should not keep the body: its memory counts as free after decoding, unless arrays are views of it.

    Errors: ServiceError of every kind, Cancelled.
    """
    execution.begin(len(body))
    decoded = await decode(decoder, body, engine.settings.max_body_bytes, execution)
    del body
    request = await prepare(engine.plans, engine.layers, decoded, execution)
    place = await admit(request, encoder, execution)
    result = await compute(request, place, engine.batcher, execution)
    return await encode(encoder, request, result, request_id, execution)
