"""Operations whose bodies hold tensors: read by a codec, answered by a codec."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, cast

from fastapi import Request, Response
from fastapi.routing import APIRoute

from service.codecs import CODECS
from service.engine import Timings
from service.http.body import read_body
from service.http.media import answer_type, request_type
from service.http.parts import PartedResponse
from service.schemas.request import AttentionRequest
from service.schemas.validate import validate


class TensorRoute(APIRoute):
    """Documents an operation from its signature as FastAPI does, and reads and writes its bodies with the codecs.

    FastAPI's own handler would make a Python object of every number on both ways. The endpoint takes its body model
    and the request, and returns the fields of the answer.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The handler that FastAPI calls in place of its own."""
        assert self.body_field is not None
        model = cast(type[AttentionRequest], self.body_field.field_info.annotation)
        endpoint = self.endpoint

        async def handle(request: Request) -> Response:
            headers = request.headers
            own = request_type(headers.get("content-type"), CODECS)
            media_type = answer_type(headers.get("accept"), own, CODECS)
            limit = request.app.state.settings.max_body_bytes
            body = await read_body(request, limit)
            timings = request.state.timings = Timings()
            fields, request.state.untyped = CODECS[own].decode(body, limit)
            validated = validate(model, fields)
            timings.step("decode")
            answer = await endpoint(validated, request)
            parts = CODECS[media_type].encode(answer, base64=validated.encoding == "base64")
            timings.step("encode")
            return PartedResponse(parts, media_type, {"Server-Timing": timings.header()})

        return handle
