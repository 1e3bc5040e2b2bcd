"""Errors as problem details (RFC 9457): one renderer for all of them."""

from __future__ import annotations

from collections.abc import Iterable
from http import HTTPStatus

import orjson
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from service.errors import (
    Fault,
    InvalidRequest,
    InvalidValue,
    MemoryLimit,
    MethodNotAllowed,
    NotFound,
    ServiceError,
    describe,
    kind_of,
    settle,
)
from service.observability.request_id import request_id

MEDIA_TYPE = "application/problem+json"
# The Open Inference Protocol, whose errors have a form of their own.
INFERENCE = "/v2"


def problem(error: ServiceError, request: Request) -> Response:
    """The answer to a request that failed."""
    kind = kind_of(error)
    path = request.scope["path"]
    request.scope["state"]["problem"] = kind.code  # to be counted
    if is_inference(path):
        return Response(orjson.dumps({"error": str(error)}), kind.status, error.headers, "application/json")
    body = details(error, instance=path[:200], request_id=request_id(request.scope))
    return Response(body, kind.status, error.headers, MEDIA_TYPE)


def details(error: ServiceError, **request: str) -> bytes:
    """An error as problem details; request: what is known of whose it is."""
    kind = kind_of(error)
    detail = str(error) if error.faults else f"{kind.title}."
    return _render(f"/problems/{kind.code}", kind.title, kind.status, detail, kind.code, error.faults, **request)


def _render(
    uri: str, title: str, status: int, detail: str, code: str, faults: Iterable[Fault] = (), **request: str
) -> bytes:
    found = {
        "type": uri,
        "title": title,
        "status": status,
        "detail": detail,
        "code": code,
        **request,
        "errors": [_fault(fault) for fault in faults],
    }
    return orjson.dumps(found)


def is_inference(path: str) -> bool:
    """Whether a path belongs to the Open Inference Protocol."""
    return path == INFERENCE or path.startswith(f"{INFERENCE}/")


def _fault(fault: Fault) -> dict[str, str]:
    shown = {"pointer": fault.pointer, "code": fault.code, "expected": fault.expected, "got": fault.got}
    return shown | ({"hint": fault.hint} if fault.hint else {})


async def on_service_error(request: Request, error: Exception) -> Response:
    """What the service raises by itself."""
    assert isinstance(error, ServiceError)
    settle(error)
    return problem(error, request)


async def on_memory_error(request: Request, error: Exception) -> Response:
    """What failed although its estimate fitted into the memory that there is."""
    settle(error)
    return problem(MemoryLimit.failed(), request)


async def on_http_exception(request: Request, error: Exception) -> Response:
    """What the router raises where no route matches, or what a dependency raises."""
    assert isinstance(error, HTTPException)
    headers = dict(error.headers or {})
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        fault = Fault("", f"{headers.get('Allow', '')} at {request.url.path[:100]}", request.method[:20])
        return problem(MethodNotAllowed(fault, headers=headers), request)
    if error.status_code == HTTPStatus.NOT_FOUND:
        return problem(NotFound(Fault("", "a path that exists", request.url.path[:100])), request)
    title = HTTPStatus(error.status_code).phrase
    body = _render(
        "about:blank",
        title,
        error.status_code,
        str(error.detail),
        title.lower().replace(" ", "_"),
        instance=request.scope["path"][:200],
        request_id=request_id(request.scope),
    )
    return Response(body, error.status_code, headers, MEDIA_TYPE)


async def on_validation_error(request: Request, error: Exception) -> Response:
    """What FastAPI finds wrong with the parameters of an operation or a dependency."""
    assert isinstance(error, RequestValidationError)
    faults = []
    for found in error.errors():
        pointer = "".join(f"/{step}" for step in found["loc"])
        faults.append(Fault(pointer, found["msg"], describe(found["input"]), code=InvalidValue.code))
    return problem(InvalidRequest(*faults), request)
