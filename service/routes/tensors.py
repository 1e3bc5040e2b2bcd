"""Operations whose bodies hold tensors: an HTTP adapter around the pipeline."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial

from fastapi import Request, Response

from service.http.body import BodyLimits, content_length, receive_body, receive_disconnect
from service.http.negotiation import Negotiate, refuse_content_encoding
from service.http.streaming import ChunkedResponse
from service.observability.requests import ComputedRequest, record_of
from service.pipeline.engine import Engine
from service.pipeline.run import run
from service.settings import Settings


async def respond(request: Request, negotiate: Negotiate) -> Response:
    """The response to one request. Errors: ServiceError of every kind, Cancelled."""
    engine: Engine = request.app.state.engine
    settings: Settings = request.app.state.settings
    record = record_of(request.scope)
    headers = dict(request.scope["headers"])
    refuse_content_encoding(headers)
    decoder, encoder = negotiate(headers)
    limits = BodyLimits(settings.max_body_bytes, settings.read_timeout, settings.read_rate)
    length = content_length(headers, limits)
    with ExitStack() as resources:
        execution = engine.start(partial(receive_disconnect, request.receive))
        resources.enter_context(execution.lease)
        body = receive_body(request.receive, length, limits, execution, decoder.decode_bound)
        encoded = await run(engine, await body, decoder, encoder, execution, record.request_id)
        response = ChunkedResponse(encoded, execution, resources.pop_all(), engine.chunk_lock)
    response_type = dict(encoded.headers)[b"content-type"].decode("ascii")
    record.computed = ComputedRequest.of(execution, decoder.media_type, response_type)
    return response
