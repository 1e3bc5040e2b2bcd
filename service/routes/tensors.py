"""Operations whose bodies hold tensors: read by a codec, answered by a codec."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from functools import partial
from typing import Any, Final, cast

from anyio import to_thread
from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.datastructures import State
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from service.codecs import CODECS, Codec
from service.engine import Call, Engine
from service.errors import ServiceError
from service.http.body import announced, read_body
from service.http.disconnect import watching
from service.http.media import answer_type, request_type
from service.http.parts import PartedResponse
from service.http.problems import problem
from service.jobs import Job, make_job
from service.schemas.request import AttentionRequest

# Bytes of a body that are not worth counting, unless it unpacks to more.
TINY: Final = 2**16

Endpoint = Callable[..., Coroutine[Any, Any, dict[str, Any]]]


class TensorRequest(Request):
    """A request of a tensor operation, and what came to be known of it: `state` would take longer."""

    call: Call
    job: Job


class TensorRoute(APIRoute):
    """Documents an operation from its signature as FastAPI does, and reads and writes its bodies with the codecs.

    FastAPI's own handler would make a Python object of every number on both ways. The endpoint takes its body model,
    for the options in it, and the request with the job, and returns the fields of the answer.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The handler that FastAPI calls in place of its own."""
        assert self.body_field is not None
        model = cast(type[AttentionRequest], self.body_field.field_info.annotation)
        return partial(_handle, model, self.endpoint)


async def _handle(model: type[AttentionRequest], endpoint: Endpoint, request: Request) -> Response:
    known = request if isinstance(request, TensorRequest) else TensorRequest(request.scope, request.receive)
    state = request.app.state
    call = known.call = Call(state.settings.time_limit)
    try:
        headers = dict(request.scope["headers"])
        own = request_type(headers.get(b"content-type", b"").decode("latin-1"), CODECS)
        media_type = answer_type(headers.get(b"accept", b"").decode("latin-1"), own, CODECS)
        limit = state.settings.max_body_bytes
        body = await _body(headers, CODECS[own], known, state.engine, limit)
        call.timings.begin()
        if len(body) <= CODECS[own].inline:
            known.job = _read(model, CODECS[own], body, call, limit)
        else:
            known.job = await _read_in_thread(model, CODECS[own], body, known, state)
        if state.engine.is_quick(known.job):
            answer = await endpoint(known.job.body, known)
        else:
            async with watching(request.receive, call.stop):
                answer = await endpoint(known.job.body, known)
        parts = CODECS[media_type].encode(answer, base64=known.job.body.encoding == "base64")
    except BaseException:
        call.leave()
        raise
    if isinstance(parts, list):  # else it is done while it is sent
        call.timings.step("encode")
    return PartedResponse(parts, media_type, call, state.settings.write_timeout)


async def _body(
    headers: Mapping[bytes, bytes], codec: Codec, request: TensorRequest, engine: Engine, limit: int
) -> bytes:
    """The body, with memory for what is read from it. Errors: BodyTooLarge, Busy, ClientDisconnect."""
    length = announced(headers, limit)
    if length is not None and length <= TINY and not codec.packed:
        return await read_body(request.receive, limit)
    memory = 0 if length is None else codec.memory(length, limit)
    permit = engine.bodies.try_enter(memory)
    if permit is None:
        permit = await engine.bodies.enter(memory, request.call.stop)
    request.call.hold(permit)
    if length is None:  # chunked: memory is taken as it comes
        return await read_body(request.receive, limit, lambda size: permit.grow(codec.memory(size, limit)))
    if length > codec.inline and engine.work.full:
        raise engine.work.busy()  # before reading what could not be computed
    return await read_body(request.receive, limit)


def _read(model: type[AttentionRequest], codec: Codec, body: bytes, call: Call, limit: int) -> Job:
    """What a body asks for. Errors: ServiceError of every kind."""
    decoded = codec.decode(body, limit)
    call.timings.step("decode")
    job = make_job(model, decoded)
    call.timings.step("plan")
    if codec.packed:  # it may have taken far less than it might
        call.keep(len(body) + decoded.nbytes)
    return job


async def _read_in_thread(
    model: type[AttentionRequest], codec: Codec, body: bytes, request: TensorRequest, state: State
) -> Job:
    """The same, when there is a place and memory for it. Errors: Busy besides."""
    call, engine, limit = request.call, state.engine, state.settings.max_body_bytes
    async with watching(request.receive, call.stop):
        with await engine.work.enter(min(codec.effort * len(body), engine.work.memory), call.stop):
            call.timings.step("queue")
            decoded = await to_thread.run_sync(codec.decode, body, limit)
            call.timings.step("decode")
            job = await to_thread.run_sync(make_job, model, decoded)
            call.timings.step("plan")
    call.keep(len(body) + decoded.nbytes)
    return job


class StraightToTensors:
    """Hands requests of tensor operations to their handlers without FastAPI's routing between.

    Finding a route, and preparing for dependencies that these operations do not have, takes as long as a small
    attention does. What is not known here goes on to FastAPI, which finds the same operations, and answers what is not
    allowed.
    """

    def __init__(self, app: ASGIApp, routes: Iterable[BaseRoute]) -> None:
        self._app = app
        self._handlers: dict[str, Callable[[Request], Awaitable[Response]]] = {
            route.path: route.get_route_handler() for route in routes if isinstance(route, TensorRoute)
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        handler = self._handlers.get(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        if handler is None:
            await self._app(scope, receive, send)
            return
        request = TensorRequest(scope, receive)
        try:
            response = await handler(request)
        except ServiceError as error:
            response = problem(error, request)
        await response(scope, receive, send)
