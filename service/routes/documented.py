"""What the API document says of every operation alike: the problems it can answer with, and examples."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any

from service.codecs import CODECS
from service.errors import error_classes
from service.http.problems import MEDIA_TYPE
from service.schemas.problem import Problem

EXAMPLES = "examples.json"
JSON = "application/json"


def problems(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Responses for these statuses, each naming the codes it comes with."""
    found: dict[int | str, dict[str, Any]] = {}
    for status in statuses:
        kinds = [kind for kind in error_classes().values() if kind.status == status]
        lines = "\n".join(f"- `{kind.code}`: {' '.join((kind.__doc__ or '').split())}" for kind in kinds)
        found[status] = {
            "description": lines,
            "content": {MEDIA_TYPE: {"schema": {"$ref": f"#/components/schemas/{Problem.__name__}"}}},
        }
    return found


PROBLEMS = problems(400, 401, 406, 408, 413, 415, 422, 500, 503, 504)


def tensor_body() -> dict[str, Any]:
    """The request body of an operation on tensors, beside what FastAPI says of it.

    The examples are taken from the notebooks that the tests hold the service to.
    """
    text = files("service.routes").joinpath(EXAMPLES).read_text(encoding="utf-8")
    return {"requestBody": {"content": {JSON: {"examples": json.loads(text)}} | _binary("request")}}


def tensor_answer() -> dict[int | str, dict[str, Any]]:
    """The answer of an operation on tensors, beside its JSON model."""
    return {200: {"content": _binary("answer")}}


def _binary(what: str) -> dict[str, Any]:
    """The binary media types of a body."""
    description = f"The {what}: tensors under the names of the fields, nested ones dotted; the rest as JSON text."
    schema = {"type": "string", "format": "binary", "description": description}
    return {name: {"schema": schema} for name in CODECS if name != JSON}
