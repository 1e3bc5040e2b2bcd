"""The path of every request, whatever its transport: decode, prepare, admit, compute, encode."""

from __future__ import annotations

from typing import NamedTuple

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


class Exchange(NamedTuple):
    """A request and its answer: the codec of each, the id that both have, and what the request holds."""

    decoder: Codec
    encoder: Codec
    request_id: str
    execution: Execution


async def run(engine: Engine, exchange: Exchange, body: Body) -> Encoded:
    """The encoded answer to a request. The caller should not keep the body: once decoded, its memory counts as free.

    Errors: ServiceError of every kind, Cancelled.
    """
    decoder, encoder, request_id, execution = exchange
    execution.received = len(body)
    execution.timings.begin()
    decoded = await decode(decoder, body, engine.settings.max_body_bytes, execution)
    del body
    request = await prepare(engine.plans, decoded, execution)
    place = await admit(request, encoder, execution)
    result = await compute(request, place, engine.batcher, execution)
    return await encode(encoder, request, result, request_id, execution)
