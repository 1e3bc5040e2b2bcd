"""The path of every request, whatever its transport: decode, prepare, admit, compute, encode."""

from __future__ import annotations

from service.codecs import Codec
from service.codecs.chunks import Encoded
from service.codecs.decoded import Body
from service.pipeline.admit import admit
from service.pipeline.compute import compute
from service.pipeline.decode import decode
from service.pipeline.encode import encode
from service.pipeline.engine import Engine
from service.pipeline.execution import Execution
from service.pipeline.prepare import prepare


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
