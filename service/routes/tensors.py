"""Operations whose bodies hold tensors: decoded by a codec, computed by the engine, encoded in chunks."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute

from service.http.body import BodyLimits, content_length, receive_body
from service.http.disconnect import CancelOnDisconnect
from service.http.negotiation import Formats
from service.http.streaming import ChunkedResponse
from service.observability.metrics import ComputedRequest
from service.observability.request_id import request_id
from service.pipeline.engine import Engine
from service.schemas.request import AttentionRequest
from service.schemas.response import answer
from service.settings import Settings


class TensorRoute(APIRoute):
    """A route whose endpoint takes the request and returns the response.

    FastAPI's own handler resolves dependencies, which takes as long as a small attention. It is left out where the
    application has none.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The handler that FastAPI calls."""
        if self.dependant.dependencies:
            return super().get_route_handler()
        endpoint = self.endpoint

        async def handle(request: Request) -> Response:
            response: Response = await endpoint(request, **request.path_params)
            return response

        return handle


async def respond(request: Request, negotiate: Callable[[Mapping[bytes, bytes]], Formats]) -> Response:
    """Decode, prepare, admit, compute and encode one request. Errors: ServiceError of every kind, Cancelled."""
    state = request.app.state
    settings: Settings = state.settings
    engine: Engine = state.engine
    execution = engine.start()
    try:
        headers = dict(request.scope["headers"])
        formats = negotiate(headers)
        limits = BodyLimits(settings.max_body_bytes, settings.read_timeout, settings.read_rate)
        bound = partial(formats.decoder.decode_bound, limit=limits.size)
        body = await receive_body(request.receive, content_length(headers, limits), limits, execution, bound)
        received = len(body)
        execution.timings.begin()
        async with CancelOnDisconnect(request.receive, execution, received > formats.decoder.inline):
            prepared = await engine.prepare(AttentionRequest, formats.decoder, body, execution)
        del body  # its arrays hold what they need of it
        async with CancelOnDisconnect(request.receive, execution, not engine.is_inline(prepared)):
            result = await engine.attend(prepared, execution)
        fields = answer(prepared.spec, result, request_id(request.scope))
        encoded = formats.encode(fields, prepared)
    except BaseException:
        execution.release()
        raise
    if isinstance(encoded.chunks, list):  # else they are made while they are sent
        execution.timings.step("encode")
    backend, kernel = fields["metadata"]["backend"], fields["metadata"]["kernel"]
    request.scope["state"]["computed"] = ComputedRequest(  # for RequestContext, which counts and logs the request
        formats.request_type, formats.response_type, backend, kernel, received, execution.timings
    )
    return ChunkedResponse(encoded, formats.response_type, execution, engine.encoding, formats.headers)
