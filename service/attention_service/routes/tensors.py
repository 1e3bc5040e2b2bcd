"""The adapter between HTTP and the pipeline: FastAPI documents the operations on tensors, and does not answer them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from inspect import iscoroutinefunction
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.routing import APIRoute
from starlette.datastructures import QueryParams
from starlette.routing import Match
from starlette.types import ASGIApp, Receive, Scope, Send

from attention_service.codecs.base import Codec
from attention_service.errors import Fault, UnknownField, quote
from attention_service.http.body import BodyLimits, content_length, receive_body, receive_disconnect
from attention_service.http.negotiation import negotiate, refuse_content_encoding
from attention_service.http.streaming import ChunkedResponse
from attention_service.observability.requests import ComputedRequest, headers_of, record_of
from attention_service.pipeline.engine import Engine
from attention_service.pipeline.operation import E, Operation, P, R
from attention_service.pipeline.run import run
from attention_service.routes.openapi import documentation
from attention_service.routes.table import OPERATIONS, TensorOperation
from attention_service.schemas.validate import MAX_FAULTS, is_field


class TensorRoute(APIRoute):
    """A route whose endpoint takes the request and the parameters of the path, as text, and returns the response.

    FastAPI's own application of a route is only used if there are dependencies to resolve.
    """

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        super().__init__(path, endpoint, **options)
        if not self.dependant.dependencies:
            self.app = self._answer

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, as an ASGI application."""
        response: Response = await self.endpoint(Request(scope, receive, send), **scope["path_params"])
        await response(scope, receive, send)


class AnswerTensors:
    """Middleware that answers POST requests for the paths of the table; FastAPI answers all other requests.

    FastAPI's exception handlers, exit stacks and router take as long as a small request. They are used for a route
    that has dependencies, which an application may add to all routes, for one that another route comes before, as seen
    at the first request, and where the application is mounted below a path.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        # Looked up at the first request, as Starlette builds its middleware then.
        self._direct: dict[str, tuple[TensorRoute, Operation[Any, Any, Any]]] | None = None
        self._engine: Engine

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http" or scope["method"] != "POST" or scope.get("root_path"):
            await self._app(scope, receive, send)
            return
        if self._direct is None:
            self._engine = scope["app"].state.engine
            self._direct = direct_routes(scope["app"])
        found = self._direct.get(scope["path"])
        if found is None:
            await self._app(scope, receive, send)
            return
        scope["route"], operation = found
        try:
            response = await respond(self._engine, scope, receive, operation)
        except Exception as error:
            handlers = scope["app"].exception_handlers
            kinds = (kind for kind in type(error).__mro__ if kind in handlers and kind is not Exception)
            if (kind := next(kinds, None)) is None:  # a defect, of which `Entry` tells
                raise
            handler, request = handlers[kind], Request(scope, receive)
            is_async = iscoroutinefunction(handler)
            response = await (handler(request, error) if is_async else run_in_threadpool(handler, request, error))
        await response(scope, receive, send)


def direct_routes(app: FastAPI) -> dict[str, tuple[TensorRoute, Operation[Any, Any, Any]]]:
    """The routes of the table that have no dependencies and come before all others of their paths; their operations."""
    found = {}
    for path, row in OPERATIONS.items():
        asked = {"type": "http", "method": "POST", "path": path, "root_path": "", "headers": []}
        route = next((route for route in app.routes if route.matches(asked)[0] is Match.FULL), None)
        if isinstance(route, TensorRoute) and not route.dependant.dependencies:
            found[path] = route, row.operation(app.state.engine)
    return found


def add_routes(app: FastAPI) -> None:
    """Add all operations of the table to the application."""
    for path, row in OPERATIONS.items():
        add_tensor_route(app, path, _endpoint(row), **documentation(row))


def _endpoint(row: TensorOperation) -> Callable[[Request], Awaitable[Response]]:
    """The endpoint that answers by the operation of a row."""

    async def answer(request: Request) -> Response:
        engine = request.app.state.engine
        return await respond(engine, request.scope, request.receive, row.operation(engine))

    return answer


def add_tensor_route(app: FastAPI, path: str, endpoint: Callable[..., Any], **documentation: Any) -> None:
    """Add a POST operation on tensors to the application."""
    app.router.add_api_route(path, endpoint, methods=["POST"], route_class_override=TensorRoute, **documentation)


async def respond(
    engine: Engine,
    scope: Scope,
    receive: Receive,
    operation: Operation[P, E, R],
    codecs: Callable[[Mapping[bytes, bytes]], tuple[Codec, E]] | None = None,
) -> Response:
    """The response to one request. Errors: ServiceError of every kind, Cancelled.

    codecs: from the headers to the decoder and what encodes the response; by default those of `negotiate`
    """
    settings = engine.settings
    record, headers = record_of(scope), headers_of(scope)
    if scope["query_string"]:
        refuse_fields(scope["query_string"], operation)
    refuse_content_encoding(headers)
    decoder, encoder = codecs(headers) if codecs else negotiate(headers, operation.decoders, operation.encoders)
    limits = BodyLimits(settings.max_body_bytes, settings.read_timeout, settings.read_rate)
    length = content_length(headers, limits)
    execution = engine.start(partial(receive_disconnect, receive))
    record.timings = execution.timings
    try:
        body = receive_body(receive, length, limits, execution)
        encoded = await run(engine, operation, await body, decoder, encoder, execution, record.request_id)
    except BaseException:
        execution.lease.release()
        raise
    record.computed = ComputedRequest.of(execution, decoder.media_type, encoded.media_type)
    return ChunkedResponse(encoded, execution, engine.chunk_lock)


def refuse_fields(query: bytes, operation: Operation[P, E, R]) -> None:
    """Refuse fields in the query of the address, where none is read. Errors: UnknownField."""
    fields = [name for name in QueryParams(query) if any(is_field(name, schema) for schema in operation.schemas)]
    if fields:
        raise UnknownField(
            *(Fault("", f"{quote(name)} in the body", "it in the address") for name in fields[:MAX_FAULTS])
        )
