"""Operations whose bodies hold tensors: read by a codec, answered by a reader."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Mapping
from functools import partial
from typing import Any, Final, cast

from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from service.codecs.decoded import Body
from service.engine import Call, Engine
from service.errors import MemoryLimit, ServiceError, settle
from service.gate import Coming
from service.http.body import announced, read_body
from service.http.cycle import AT_WORK, WHOLE_BODY
from service.http.disconnect import watching
from service.http.parts import PartedResponse
from service.http.problems import problem
from service.jobs import Job
from service.metrics import Tally, note_computed
from service.reading import Reader, plan, read, read_in_thread
from service.routes.exchange import Begin, by_media_type
from service.schemas.request import AttentionRequest
from service.settings import Settings

# Bytes of a body that are not worth counting, unless it unpacks to more.
TINY: Final = 2**16

Endpoint = Callable[..., Coroutine[Any, Any, dict[str, Any]]]


class TensorRequest(Request):
    """A request of a tensor operation, and what came to be known of it: `state` would take longer."""

    engine: Engine
    call: Call
    job: Job
    media_types: tuple[str, str]  # of the body, and of the answer
    received: int


class TensorRoute(APIRoute):
    """Documents an operation from its signature as FastAPI does, and reads and writes its bodies with the codecs.

    FastAPI's own handler would make a Python object of every number on both ways. The endpoint takes its body model,
    for the options in it, and the request with the job, and returns the fields of the answer.
    """

    @property
    def straight_paths(self) -> Collection[str]:
        """Where requests can come that need no routing."""
        return (self.path,)

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The handler that FastAPI calls in place of its own."""
        assert self.body_field is not None
        model = cast(type[AttentionRequest], self.body_field.field_info.annotation)
        return handler(by_media_type, model, self.endpoint)


def handler(
    begin: Begin, model: type[AttentionRequest], endpoint: Endpoint
) -> Callable[[Request], Coroutine[Any, Any, Response]]:
    """What answers a request: read and written as `begin` says, its fields held against the model."""
    return partial(_handle, begin, model, endpoint)


async def _handle(begin: Begin, model: type[AttentionRequest], endpoint: Endpoint, request: Request) -> Response:
    known = request if isinstance(request, TensorRequest) else TensorRequest(request.scope, request.receive)
    state = request.scope["app"].state
    settings: Settings = state.settings
    engine = known.engine = state.engine
    call = known.call = Call(settings.time_limit)
    try:
        headers = dict(request.scope["headers"])
        exchange = begin(headers, request.scope)
        reader = exchange.reader
        limit = settings.max_body_bytes
        body = await _body(headers, reader, known, limit)
        known.received = len(body)
        call.timings.begin()
        if len(body) <= reader.inline:
            known.job, decoded = read(model, reader, body, call, limit)
            if reader.packed:  # it may have taken far less than it might
                call.keep(len(body) + decoded.nbytes)
        elif (quickly := reader.quick(body)) is not None:
            known.job = plan(model, quickly, call)
        else:
            async with watching(request.receive, call.stop):
                known.job = await read_in_thread(model, reader, body, call, engine, limit)
        await in_step(known)
        if engine.is_at_once(known.job):
            answer = await endpoint(known.job.body, known)
        else:
            async with watching(request.receive, call.stop):
                answer = await endpoint(known.job.body, known)
        parts = exchange.write(answer, known.job)
    except BaseException:
        call.leave()
        raise
    if isinstance(parts, list):  # else it is done while it is sent
        call.timings.step("encode")
    response = PartedResponse(parts, exchange.media_type, call, settings.write_timeout, exchange.headers)
    known.media_types = exchange.own, exchange.media_type
    request.scope["state"]["note"] = partial(_note, known, answer["metadata"], response)
    return response


def _note(request: TensorRequest, metadata: Mapping[str, Any], response: PartedResponse, tally: Tally | None) -> None:
    """Count what a request took, and put it on the line that is logged."""
    request.scope["state"]["noted"] = note_computed(
        tally, request.media_types, metadata, request.received, response.sent, request.call.timings
    )


async def _body(headers: Mapping[bytes, bytes], reader: Reader, request: TensorRequest, limit: int) -> Body:
    """The body, with memory for what is read from it. Errors: BodyTooLarge, Busy, ClientDisconnect."""
    engine = request.engine
    length = announced(headers, limit)
    if length is not None and length <= TINY and not reader.packed:
        return await read_body(request.receive, limit)
    if engine.work.promised:
        raise engine.work.busy()  # before reading what can hardly be computed
    with Coming(engine.work):
        return await _large_body(length, reader, request, limit)


async def _large_body(length: int | None, reader: Reader, request: TensorRequest, limit: int) -> Body:
    """The body, when there is memory for it. Errors: Busy, ClientDisconnect; BodyTooLarge where no length is known."""
    engine = request.engine
    memory = 0 if length is None else reader.memory(length, limit)
    permit = engine.bodies.try_enter(memory)
    if permit is None:
        permit = await engine.bodies.enter(memory, request.call.stop)
    request.call.hold(permit)
    if length is None:  # chunked: memory is taken as it comes
        return await read_body(request.receive, limit, lambda size: permit.grow(reader.memory(size, limit)))
    whole = request.scope.get("extensions", {}).get(WHOLE_BODY)
    return await read_body(request.receive, limit) if whole is None else await whole(length)


async def in_step(request: TensorRequest) -> None:
    """Let the others that are at work come as far as this request, where none is large: those would take too long.

    What is done for many, one after the other, finds its instructions in the caches; and answers that leave together
    wake a client that waits for several of them once.
    """
    at_work = request.scope.get("extensions", {}).get(AT_WORK, ())
    if len(at_work) > 1 and not request.engine.bodies.taken:
        await asyncio.sleep(0)


class StraightToTensors:
    """Hands requests of tensor operations to their handlers without FastAPI's routing between.

    Finding a route, and preparing for dependencies that these operations do not have, takes as long as a small
    attention does. What is not known here goes on to FastAPI, which finds the same operations, and answers what is not
    allowed.
    """

    def __init__(self, app: ASGIApp, routes: Iterable[BaseRoute]) -> None:
        self._app = app
        self._handlers: dict[str, tuple[TensorRoute, Callable[[Request], Awaitable[Response]]]] = {
            path: (route, route.get_route_handler())
            for route in routes
            if isinstance(route, TensorRoute)
            for path in route.straight_paths
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        found = self._handlers.get(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        if found is None:
            await self._app(scope, receive, send)
            return
        scope["route"], handler = found
        request = TensorRequest(scope, receive)
        try:
            response = await handler(request)
        except ServiceError as error:
            settle(error)
            response = problem(error, request)
        except MemoryError as error:
            settle(error)
            response = problem(MemoryLimit.failed(), request)
        await in_step(request)
        await response(scope, receive, send)
