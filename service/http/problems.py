"""Errors as problem details (RFC 9457): one renderer for all of them."""

from __future__ import annotations

import logging
from http import HTTPStatus

import orjson
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from service.errors import Fault, InternalError, MemoryLimit, MethodNotAllowed, NotFound, ServiceError, kind_of, settle
from service.http.request_id import request_id

MEDIA_TYPE = "application/problem+json"
# The Open Inference Protocol, whose errors have a form of their own.
INFERENCE = "/v2"

logger = logging.getLogger("attention")


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
    found = {
        "type": f"/problems/{kind.code}",
        "title": kind.title,
        "status": kind.status,
        "detail": str(error) if error.faults else f"{kind.title}.",
        "code": kind.code,
        **request,
        "errors": [_fault(fault) for fault in error.faults],
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
    """What the router itself raises: no such path, or no such method on it."""
    assert isinstance(error, HTTPException)
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        allowed = (error.headers or {}).get("Allow", "")
        fault = Fault("", f"{allowed} at {request.url.path[:100]}", request.method[:20])
        return problem(MethodNotAllowed(fault, headers={"Allow": allowed}), request)
    if error.status_code == HTTPStatus.NOT_FOUND:
        return problem(NotFound(Fault("", "a path that exists", request.url.path[:100])), request)
    raise error


async def on_defect(request: Request, error: Exception) -> Response:
    """Anything else that an operation raises."""
    return internal_error(request)


def internal_error(request: Request) -> Response:
    """The answer where the service itself failed; call it while the exception is being handled."""
    logger.exception("request %s failed: a defect of the service", request_id(request.scope))
    return problem(InternalError(), request)
