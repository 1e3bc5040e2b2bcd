"""Errors as responses: problem details (RFC 9457), or what the protocol of a path has in their place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Final, NamedTuple

import orjson
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from service.errors import (
    Fault,
    InvalidRequest,
    InvalidValue,
    MemoryLimit,
    MethodNotAllowed,
    NotFound,
    ServiceError,
    describe,
    drop_tracebacks,
    kind_of,
)
from service.observability.request_id import request_id

MEDIA_TYPE = "application/problem+json"
# The Open Inference Protocol.
INFERENCE = "/v2"


class Failure(NamedTuple):
    """Why a request failed, as it is rendered. type: a URI that identifies the code; headers: of the response"""

    type: str
    title: str
    status: int
    detail: str
    code: str
    faults: Sequence[Fault]
    headers: Mapping[str, str]


def problem(error: ServiceError, request: Request) -> Response:
    """The response to a request that failed with an error of the service."""
    kind = kind_of(error)
    detail = str(error) if error.faults else f"{kind.title}."
    uri = f"/problems/{kind.code}"
    return _respond(Failure(uri, kind.title, kind.status, detail, kind.code, error.faults, error.headers), request)


def _respond(failure: Failure, request: Request) -> Response:
    """The response in the error format of the path, whether or not it has a route. The code is kept, to be counted."""
    request.scope["state"]["problem"] = failure.code
    prefix = "/" + request.scope["path"][1:].partition("/")[0]
    media_type, render = FORMATS.get(prefix, (MEDIA_TYPE, problem_details))
    return Response(render(failure, request.scope), failure.status, failure.headers, media_type)


def problem_details(failure: Failure, scope: Scope) -> bytes:
    """Problem details (RFC 9457)."""
    fields = {name: getattr(failure, name) for name in ("type", "title", "status", "detail", "code")}
    fields |= {"instance": scope["path"][:200], "request_id": request_id(scope)}
    return orjson.dumps(fields | {"errors": [_fault(fault) for fault in failure.faults]})


def inference_error(failure: Failure, scope: Scope) -> bytes:
    """An error of the Open Inference Protocol."""
    return orjson.dumps({"error": failure.detail})


# The error format of all paths below a prefix, where it is not problem details: media type and renderer.
FORMATS: Final = {INFERENCE: ("application/json", inference_error)}


def _fault(fault: Fault) -> dict[str, str]:
    shown = {"pointer": fault.pointer, "code": fault.code, "expected": fault.expected, "got": fault.got}
    return shown | ({"hint": fault.hint} if fault.hint else {})


async def on_service_error(request: Request, error: Exception) -> Response:
    """The response to an error that the service raises."""
    assert isinstance(error, ServiceError)
    drop_tracebacks(error)
    return problem(error, request)


async def on_memory_error(request: Request, error: Exception) -> Response:
    """The response where an allocation failed although the estimate of the request fitted into memory."""
    drop_tracebacks(error)
    return problem(MemoryLimit.failed(), request)


async def on_http_exception(request: Request, error: Exception) -> Response:
    """The response where no route matches, or to what a dependency or an added route raises."""
    assert isinstance(error, HTTPException)
    headers = dict(error.headers or {})
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        fault = Fault("", f"{headers.get('Allow', '')} at {request.url.path[:100]}", request.method[:20])
        return problem(MethodNotAllowed(fault, headers=headers), request)
    if error.status_code == HTTPStatus.NOT_FOUND:
        return problem(NotFound(Fault("", "a path that exists", request.url.path[:100])), request)
    title = HTTPStatus(error.status_code).phrase
    code = title.lower().replace(" ", "_")
    failure = Failure("about:blank", title, error.status_code, str(error.detail), code, (), headers)
    return _respond(failure, request)


async def on_validation_error(request: Request, error: Exception) -> Response:
    """The response to parameters of an operation or a dependency that FastAPI finds invalid."""
    assert isinstance(error, RequestValidationError)
    faults = []
    for found in error.errors():
        pointer = "".join(f"/{step}" for step in found["loc"])
        faults.append(Fault(pointer, found["msg"], describe(found["input"]), code=InvalidValue.code))
    return problem(InvalidRequest(*faults), request)
