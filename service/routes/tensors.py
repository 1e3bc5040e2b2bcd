"""Operations whose bodies hold tensors: read by a codec, answered by a codec."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any, Final, cast

from anyio import to_thread
from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from service.codecs import CODECS
from service.engine import Timings
from service.errors import ServiceError
from service.http.body import read_body
from service.http.media import answer_type, request_type
from service.http.parts import PartedResponse
from service.http.problems import problem
from service.jobs import Job, make_job
from service.schemas.request import AttentionRequest

# Bytes of a body up to which reading it in the event loop's thread is quicker than handing it to another.
INLINE: Final = 2**18


class TensorRequest(Request):
    """A request of a tensor operation, and what came to be known of it: `state` would take longer."""

    timings: Timings
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
        endpoint = self.endpoint

        async def handle(request: Request) -> Response:
            known = request if isinstance(request, TensorRequest) else TensorRequest(request.scope, request.receive)
            headers = dict(request.scope["headers"])
            own = request_type(headers.get(b"content-type", b"").decode("latin-1"), CODECS)
            media_type = answer_type(headers.get(b"accept", b"").decode("latin-1"), own, CODECS)
            limit = request.app.state.settings.max_body_bytes
            body = await read_body(headers.get(b"content-length", b""), request.receive, limit)
            timings = known.timings = Timings()
            if len(body) <= INLINE:
                job = known.job = _read(model, own, body, limit, timings)
            else:
                job = known.job = await to_thread.run_sync(_read, model, own, body, limit, timings)
            answer = await endpoint(job.body, known)
            parts = CODECS[media_type].encode(answer, base64=job.body.encoding == "base64")
            if isinstance(parts, list):  # else it is done while it is sent
                timings.step("encode")
            return PartedResponse(parts, media_type, timings.header())

        return handle


def _read(model: type[AttentionRequest], media_type: str, body: bytes, limit: int, timings: Timings) -> Job:
    """What a body asks for. Errors: ServiceError of every kind."""
    decoded = CODECS[media_type].decode(body, limit)
    timings.step("decode")
    job = make_job(model, decoded)
    timings.step("plan")
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
