"""The adapter between HTTP and the pipeline, which all operations on tensors share."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from functools import partial
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.routing import APIRoute
from starlette.types import Receive, Scope, Send

from attention_service.codecs.base import Codec
from attention_service.errors import Fault, UnknownField, quote
from attention_service.http.body import BodyLimits, content_length, receive_body, receive_disconnect
from attention_service.http.head import joined
from attention_service.http.negotiation import negotiate, refuse_content_encoding
from attention_service.http.streaming import ChunkedResponse
from attention_service.observability.requests import ComputedRequest, record_of
from attention_service.pipeline.engine import Engine
from attention_service.pipeline.operation import E, Operation, P, R
from attention_service.pipeline.run import run
from attention_service.routes.openapi import documentation
from attention_service.routes.table import OPERATIONS, TensorOperation
from attention_service.schemas.validate import MAX_FAULTS, is_field


class DirectRoute(APIRoute):
    """A route whose endpoint takes the request and the parameters of the path, as text, and returns the response.

    FastAPI's own application of a route resolves dependencies and keeps two exit stacks for them: a fifth of a small
    request. It is used if there are dependencies, which an application may add to all routes.
    """

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        super().__init__(path, endpoint, **options)
        if not self.dependant.dependencies:
            self.app = self._answer

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, as an ASGI application."""
        request = Request(scope, receive, send)
        response: Response = await self.endpoint(request, **request.path_params)
        await response(scope, receive, send)


def add_routes(app: FastAPI) -> None:
    """Add all operations of the table to the application, the first before all others."""
    for path, row in reversed(OPERATIONS.items()):
        add_tensor_route(app, path, _endpoint(row), **documentation(row))


def _endpoint(row: TensorOperation) -> Callable[[Request], Awaitable[Response]]:
    """The endpoint that answers by the operation of a row."""

    async def answer(request: Request) -> Response:
        return await respond(request, row.operation(request.app.state.engine))

    return answer


def add_tensor_route(app: FastAPI, path: str, endpoint: Callable[..., Any], **documentation: Any) -> None:
    """Add a POST operation on tensors to the application itself, before all other routes.

    Routes are tried in order. A router in between would take a twentieth of a small request, each route before some
    hundredths.
    """
    routes = app.router.routes
    app.router.add_api_route(path, endpoint, methods=["POST"], route_class_override=DirectRoute, **documentation)
    routes.insert(0, routes.pop())


async def respond(
    request: Request,
    operation: Operation[P, E, R],
    codecs: Callable[[Mapping[bytes, bytes]], tuple[Codec, E]] | None = None,
) -> Response:
    """The response to one request. Errors: ServiceError of every kind, Cancelled.

    codecs: from the headers to the decoder and what encodes the response; by default those of `negotiate`
    """
    engine: Engine = request.app.state.engine
    settings = engine.settings
    record = record_of(request.scope)
    headers = joined(request.scope["headers"])
    if request.scope["query_string"]:
        refuse_fields(request.query_params, operation)
    refuse_content_encoding(headers)
    decoder, encoder = codecs(headers) if codecs else negotiate(headers, operation.decoders, operation.encoders)
    limits = BodyLimits(settings.max_body_bytes, settings.read_timeout, settings.read_rate)
    length = content_length(headers, limits)
    execution = engine.start(partial(receive_disconnect, request.receive))
    record.timings = execution.timings
    try:
        body = receive_body(request.receive, length, limits, execution)
        encoded = await run(engine, operation, await body, decoder, encoder, execution, record.request_id)
    except BaseException:
        execution.lease.release()
        raise
    response_type = dict(encoded.headers)[b"content-type"].decode("ascii")
    record.computed = ComputedRequest.of(execution, decoder.media_type, response_type)
    return ChunkedResponse(encoded, execution, engine.chunk_lock)


def refuse_fields(query: Iterable[str], operation: Operation[P, E, R]) -> None:
    """Refuse fields in the query of the address, where none is read. Errors: UnknownField."""
    fields = [name for name in query if any(is_field(name, schema) for schema in operation.schemas)][:MAX_FAULTS]
    if fields:
        raise UnknownField(*(Fault("", f"{quote(name)} in the body", "it in the address") for name in fields))
