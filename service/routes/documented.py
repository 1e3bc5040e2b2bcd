"""Parts of the API document that several operations share: problem responses, tensor bodies, examples."""

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
    """Problem responses for these statuses. The description of each lists its problem codes."""
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
    """Error responses of the Open Inference Protocol for these statuses. They have no problem codes."""
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
    """The request body of an operation on tensors, in all media types, as `openapi_extra` for FastAPI.

    The examples come from the notebooks whose results are golden cases of the tests.
    """
    return {"requestBody": {"content": _json(model, _file(EXAMPLES)) | _binary("request"), "required": True}}


def tensor_answer() -> Responses:
    """The 200 response of an operation on tensors, beside its JSON model: an example, and the binary media types."""
    return {200: {"content": {JSON: {"example": _file(ANSWER)}} | _binary("response")}}


def _file(name: str) -> Any:
    return json.loads(files("service.routes").joinpath(name).read_text(encoding="utf-8"))


def inference_body(model: type[BaseModel]) -> dict[str, Any]:
    """The request body of an inference, as `openapi_extra` for FastAPI."""
    summary = "Two queries, three keys, causal: the second query attends to the first two keys"
    examples = {"causal": {"summary": summary, "value": INFERENCE_EXAMPLE}}
    return {"requestBody": {"content": _json(model, examples) | {OCTETS: _octets()}, "required": True}}


def inference_answer() -> Responses:
    """The 200 response of an inference, beside its JSON model: the binary form and its header."""
    description = "Length of the JSON in bytes. The bytes of the binary tensors follow it."
    length = {"description": description, "schema": {"type": "integer", "minimum": 0}}
    return {200: {"content": {OCTETS: _octets()}, "headers": {"Inference-Header-Content-Length": length}}}


def _octets() -> dict[str, Any]:
    description = "JSON of the length in Inference-Header-Content-Length, then the bytes of its binary tensors."
    return {"schema": {"type": "string", "format": "binary", "description": description}}


def _binary(what: str) -> dict[str, Any]:
    """The binary media types. what: request or response"""
    description = f"The {what}: arrays as tensors named like their fields (nested ones dotted), the rest as JSON text."
    schema = {"type": "string", "format": "binary", "description": description}
    return {name: {"schema": schema} for name in CODECS if name != JSON}
