"""The adapter between HTTP and the pipeline: operations on tensors are answered without FastAPI, which documents them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.routing import APIRoute
from starlette.routing import Match
from starlette.types import ASGIApp, Receive, Scope, Send

from attention_service.codecs.base import Codec
from attention_service.errors import Fault, UnknownField, quote
from attention_service.http.body import BodyLimits, content_length, receive_body, receive_disconnect
from attention_service.http.negotiation import negotiate, refuse_content_encoding
from attention_service.http.streaming import ChunkedResponse
from attention_service.observability.requests import DISCONNECTED, ComputedRequest, headers_of, record_of
from attention_service.pipeline.engine import Engine
from attention_service.pipeline.operation import E, Operation, P, R
from attention_service.pipeline.run import run
from attention_service.schemas.validate import MAX_FAULTS, is_field


class TensorRoute(APIRoute):
    """A route whose endpoint takes the request and the parameters of the path, as text, and returns the response.

    FastAPI's own application of a route is only used if there are dependencies to resolve.
    """

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        super().__init__(path, endpoint, **options)
        if not self.dependant.dependencies:
            self.app = self.answer

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, as an ASGI application that resolves no dependencies."""
        request = Request(scope, receive, send)
        response: Response = await self.endpoint(request, **scope["path_params"])
        await response(scope, receive, send)


class AnswerTensors:
    """Middleware that answers POST requests for the paths of tensor routes; FastAPI answers all other requests.

    FastAPI's exception handlers, exit stacks and router take as long as a small request. They are used for a route
    that has dependencies, which an application may add to all routes, and for one that another route comes before.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._routes: dict[str, TensorRoute] | None = None  # by their paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if self._routes is None:
            self._routes = direct_routes(scope["app"]) if scope["type"] == "http" else None
        route = self._routes.get(scope["path"]) if self._routes and scope.get("method") == "POST" else None
        if route is None or scope["root_path"]:
            await self._app(scope, receive, send)
            return
        scope["route"], scope["path_params"] = route, {}
        try:
            await route.answer(scope, receive, send)
        except Exception as error:
            handlers = scope["app"].exception_handlers
            handler = next((handlers[kind] for kind in type(error).__mro__ if kind in handlers), None)
            if handler is None or record_of(scope).status != DISCONNECTED:
                raise
            response: Response = await handler(Request(scope), error)
            await response(scope, receive, send)


def direct_routes(app: FastAPI) -> dict[str, TensorRoute]:
    """The tensor routes without parameters and dependencies by their paths, if no other route comes before."""
    found: dict[str, TensorRoute] = {}
    for route in app.routes:
        if isinstance(route, TensorRoute) and not (route.dependant.dependencies or route.param_convertors):
            asked = {"type": "http", "method": "POST", "path": route.path, "root_path": "", "headers": []}
            first = next(other for other in app.routes if other.matches(asked)[0] is Match.FULL)
            if first is route:
                found[route.path] = route
    return found


def add_tensor_route(app: FastAPI, path: str, endpoint: Callable[..., Any], **documentation: Any) -> None:
    """Add a POST operation on tensors to the application itself, before all other routes.

    Routes are tried in order. A router in between would take a twentieth of a small request, each route before some
    hundredths.
    """
    routes = app.router.routes
    app.router.add_api_route(path, endpoint, methods=["POST"], route_class_override=TensorRoute, **documentation)
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
    headers = headers_of(request.scope)
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
