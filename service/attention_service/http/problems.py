"""Error responses: problem details (RFC 9457), or errors of the Open Inference Protocol below /v2."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from http import HTTPStatus

import orjson
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from attention_service.errors import (
    Fault,
    InternalError,
    InvalidValue,
    MemoryLimit,
    MethodNotAllowed,
    NotFound,
    ServiceError,
    describe,
    drop_tracebacks,
)
from attention_service.observability.requests import record_of

MEDIA_TYPE = "application/problem+json"
# The Open Inference Protocol.
INFERENCE = "/v2"


def problem(error: ServiceError, request: Request) -> Response:
    """The response to a request that failed with an error of the service."""
    detail = str(error) if error.faults else f"{error.title}."
    uri = f"/problems/{error.code}"
    return error_response(request, error.status, error.code, error.title, detail, uri, error.faults, error.headers)


def error_response(
    request: Request,
    status: int,
    code: str,
    title: str,
    detail: str,
    uri: str = "about:blank",
    faults: Sequence[Fault] = (),
    headers: Mapping[str, str] | None = None,
) -> Response:
    """An error response in the format of the path, whether or not it has a route. Its code is kept, to be counted.

    uri: identifies the code
    """
    record = record_of(request.scope)
    record.code = code
    path: str = request.scope["path"]
    if path == INFERENCE or path.startswith(f"{INFERENCE}/"):
        return Response(orjson.dumps({"error": detail}), status, headers, "application/json")
    fields = {
        "type": uri,
        "title": title,
        "status": status,
        "detail": detail,
        "code": code,
        "instance": path[:200],
        "request_id": record.request_id,
        "errors": [{name: text for name, text in asdict(fault).items() if text or name != "hint"} for fault in faults],
    }
    return Response(orjson.dumps(fields), status, headers, MEDIA_TYPE)


async def on_service_error(request: Request, error: Exception) -> Response:
    """The response to an error of the service, or to an allocation that failed although memory was granted."""
    drop_tracebacks(error)
    return problem(error if isinstance(error, ServiceError) else MemoryLimit.failed(), request)


async def on_defect(request: Request, error: Exception) -> Response:
    """The response to any other exception, which `Entry` logs."""
    return problem(InternalError(), request)


async def on_http_exception(request: Request, error: Exception) -> Response:
    """The response if no route matches, or if a dependency or an added route raises HTTPException."""
    assert isinstance(error, HTTPException)
    headers = dict(error.headers or {})
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        allowed = headers.get("Allow", "").split(", ")
        if "GET" in allowed and "HEAD" not in allowed:  # it is answered wherever GET is
            headers["Allow"] = ", ".join([*allowed, "HEAD"])
        expected = f"{headers.get('Allow', '')} at {request.url.path[:100]}"
        return problem(MethodNotAllowed.at("", expected, request.method[:20], headers=headers), request)
    if error.status_code == HTTPStatus.NOT_FOUND:
        return problem(NotFound.at("", "a path that exists", request.url.path[:100]), request)
    title = HTTPStatus(error.status_code).phrase
    code = title.lower().replace(" ", "_")
    return error_response(request, error.status_code, code, title, str(error.detail), headers=headers)


async def on_validation_error(request: Request, error: Exception) -> Response:
    """The response to parameters of an operation or a dependency that FastAPI finds invalid."""
    assert isinstance(error, RequestValidationError)
    faults = []
    for found in error.errors():
        pointer = "".join(f"/{step}" for step in found["loc"])
        faults.append(Fault(pointer, found["msg"], describe(found["input"])))
    return problem(InvalidValue(*faults), request)
