"""POST /attention/compare."""

from __future__ import annotations

from collections.abc import Mapping

from fastapi import FastAPI, Request, Response

from attention_service.codecs import CODECS, Codec
from attention_service.comparison.run import run_comparison
from attention_service.http.negotiation import request_type, response_type
from attention_service.routes.attention import add_tensor_route, respond
from attention_service.routes.openapi import JSON, compare_body, problems
from attention_service.schemas.compare import CompareReport


async def compare_attention(request: Request) -> Response:
    """Says whether what an attention kernel returned is right, and if not, which mistake it shows.

    The body is a request of `/attention`, with `actual`: what a kernel returned for it. The report is JSON, whatever
    the media type of the body. Without `actual` it says which mistakes the request could show.
    """
    return await respond(request, negotiate_report, run_comparison)


def negotiate_report(headers: Mapping[bytes, bytes]) -> tuple[Codec, Codec]:
    """The decoder of the request, by Content-Type, and JSON. Errors: UnsupportedMediaType, NotAcceptable."""
    own = request_type(headers.get(b"content-type", b"").decode("latin-1"), CODECS)
    return CODECS[own], CODECS[response_type(headers.get(b"accept", b"").decode("latin-1"), JSON, (JSON,))]


def add_routes(app: FastAPI) -> None:
    """Add the operation to the application."""
    add_tensor_route(
        app,
        "/attention/compare",
        compare_attention,
        tags=["attention"],
        operation_id="compareAttention",
        summary="Compare an output with exact attention",
        response_model=CompareReport,
        response_description="The report.",
        responses=problems(400, 401, 406, 408, 413, 415, 422, 431, 500, 503, 504),
        openapi_extra=compare_body(),
    )
