"""What the API document says of every operation alike: the problems it can answer with, and examples."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any

from pydantic import BaseModel

from service.codecs import CODECS
from service.errors import error_classes
from service.http.problems import MEDIA_TYPE
from service.schemas.inference import InferenceError
from service.schemas.problem import Problem

EXAMPLES = "examples.json"
ANSWER = "answer.json"
JSON = "application/json"
OCTETS = "application/octet-stream"

Responses = dict[int | str, dict[str, Any]]


def problems(*statuses: int, media_type: str = MEDIA_TYPE, model: str = Problem.__name__) -> Responses:
    """Responses for these statuses, each naming the codes it comes with."""
    found: Responses = {}
    for status in statuses:
        kinds = [kind for kind in error_classes().values() if kind.status == status]
        lines = "\n".join(f"- `{kind.code}`: {' '.join((kind.__doc__ or '').split())}" for kind in kinds)
        found[status] = {
            "description": lines,
            "content": {media_type: {"schema": {"$ref": f"#/components/schemas/{model}"}}},
        }
    return found


def inference_errors(*statuses: int) -> Responses:
    """The same in the form of the Open Inference Protocol, whose errors have no codes."""
    return problems(*statuses, media_type=JSON, model=InferenceError.__name__)


INFERENCE_EXAMPLE = {
    "id": "first",
    "parameters": {"is_causal": True, "query_offset": 0},
    "inputs": [
        {"name": "query", "shape": [2, 2], "datatype": "FP32", "data": [1, 0, 0, 1]},
        {"name": "key", "shape": [3, 2], "datatype": "FP32", "data": [1, 0, 0, 1, 1, 1]},
        {"name": "value", "shape": [3, 1], "datatype": "FP32", "data": [1, 2, 3]},
    ],
    "outputs": [{"name": "output"}, {"name": "attention_weights"}],
}
PROBLEMS = problems(400, 401, 406, 408, 413, 415, 422, 431, 500, 503, 504)


def _json(model: type[BaseModel], examples: Any) -> dict[str, Any]:
    """JSON content with the schema of a model."""
    return {JSON: {"schema": {"$ref": f"#/components/schemas/{model.__name__}"}, "examples": examples}}


def tensor_body(model: type[BaseModel]) -> dict[str, Any]:
    """The request body of an operation on tensors, beside what FastAPI says of it.

    The examples are taken from the notebooks that the tests hold the service to.
    """
    return {"requestBody": {"content": _json(model, _file(EXAMPLES)) | _binary("request"), "required": True}}


def tensor_answer() -> Responses:
    """The answer of an operation on tensors, beside its JSON model: that to the first example of a request."""
    return {200: {"content": {JSON: {"example": _file(ANSWER)}} | _binary("answer")}}


def _file(name: str) -> Any:
    return json.loads(files("service.routes").joinpath(name).read_text(encoding="utf-8"))


def inference_body(model: type[BaseModel]) -> dict[str, Any]:
    """The request body of an inference, beside what FastAPI says of it."""
    summary = "Two queries, three keys, causal: the second query sees the first two"
    examples = {"causal": {"summary": summary, "value": INFERENCE_EXAMPLE}}
    return {"requestBody": {"content": _json(model, examples) | {OCTETS: _octets()}, "required": True}}


def inference_answer() -> Responses:
    """The answer of an inference, beside its JSON model."""
    length = {"description": "Where the JSON ends and bytes follow.", "schema": {"type": "integer", "minimum": 0}}
    return {200: {"content": {OCTETS: _octets()}, "headers": {"Inference-Header-Content-Length": length}}}


def _octets() -> dict[str, Any]:
    description = "The JSON, as long as the header Inference-Header-Content-Length says, then the bytes of its tensors."
    return {"schema": {"type": "string", "format": "binary", "description": description}}


def _binary(what: str) -> dict[str, Any]:
    """The binary media types of a body."""
    description = f"The {what}: tensors under the names of the fields, nested ones dotted; the rest as JSON text."
    schema = {"type": "string", "format": "binary", "description": description}
    return {name: {"schema": schema} for name in CODECS if name != JSON}
