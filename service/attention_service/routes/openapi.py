"""The API document (OpenAPI 3.1): what FastAPI generates, and the parts that FastAPI cannot know.

Clients are generated from it, so every schema that becomes a type has a name, and no other schema has one.
"""

from __future__ import annotations

import json
from importlib.resources import files
from inspect import cleandoc
from typing import Any, Final, get_args

from fastapi import FastAPI
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel

from attention_service.attention import spec
from attention_service.codecs.table import CODECS
from attention_service.errors import error_classes
from attention_service.http.auth import OPEN, needs_key
from attention_service.http.problems import MEDIA_TYPE
from attention_service.render.heatmap import PNG, SVG
from attention_service.routes.table import OPERATIONS, TensorOperation
from attention_service.schemas.arrays import ElementType
from attention_service.schemas.call import CallOutput
from attention_service.schemas.compare import Certainty, Liberty, LogsumexpBase, Status
from attention_service.schemas.heatmap import Bins, Colours, Stage, Theme
from attention_service.schemas.inference import Datatype, InferenceError, InferenceRequest
from attention_service.schemas.problem import Problem
from attention_service.schemas.request import AttentionRequest, Encoding
from attention_service.settings import Settings

JSON: Final = "application/json"
OCTETS: Final = "application/octet-stream"
REFERENCE = "#/components/schemas/{model}"
SECURITY: Final = "bearer"
# The fields of a request that most people use, which stand before all others.
FIRST: Final = ("query", "key", "value", "input", "is_causal", "mask", "scale", "layout", "include", "dtype")
# Stands where a request is sent, not in its schema: a request that extends another one has more fields.
CLOSED: Final = {"unevaluatedProperties": False}
# Sets of names that become types. The fields that have them describe them.
ENUMS: Final[dict[str, tuple[str, ...]]] = {
    "Layout": get_args(spec.Layout),
    "FloatType": get_args(spec.DType),
    "ElementType": get_args(ElementType),
    "Backend": get_args(spec.Backend),
    "Normalization": get_args(spec.Normalization),
    "Activation": get_args(spec.Activation),
    "NormKind": get_args(spec.NormKind),
    "NormOver": get_args(spec.NormOver),
    "NormPosition": get_args(spec.NormPosition),
    "IncludedOutput": get_args(spec.Included),
    "CallOutput": get_args(CallOutput),
    "WhichGradients": get_args(spec.AllGradients),
    "Encoding": get_args(Encoding),
    "LogsumexpBase": get_args(LogsumexpBase),
    "Liberty": get_args(Liberty),
    "ComparisonStatus": get_args(Status),
    "Certainty": get_args(Certainty),
    "HeatmapStage": get_args(Stage),
    "HeatmapScale": get_args(Colours),
    "HeatmapBins": get_args(Bins),
    "HeatmapTheme": get_args(Theme),
    "TensorDatatype": get_args(Datatype),
    "ProblemCode": tuple(error_classes()),
}


NAMES: Final = {values: name for name, values in ENUMS.items()}
INFERENCE_EXAMPLE: Final = {
    "id": "first",
    "parameters": {"is_causal": True, "query_offset": 0},
    "inputs": [
        {"name": "query", "shape": [2, 2], "datatype": "FP32", "data": [1, 0, 0, 1]},
        {"name": "key", "shape": [3, 2], "datatype": "FP32", "data": [1, 0, 0, 1, 1, 1]},
        {"name": "value", "shape": [3, 1], "datatype": "FP32", "data": [1, 2, 3]},
    ],
    "outputs": [{"name": "output"}, {"name": "attention_weights"}],
}

# Headers that middleware and error handlers add to responses, with their types.
HEADERS: Final = {
    "X-Request-ID": ("string", "The id of the request."),
    "Server-Timing": ("string", "Milliseconds of each step."),
    "Retry-After": ("integer", "Seconds to wait before the next try."),
    "WWW-Authenticate": ("string", "How to authenticate: Bearer."),
}

# Statuses of the problems of operations on tensors.
TENSOR_STATUSES: Final = 400, 401, 406, 408, 413, 415, 422, 431, 500, 503, 504

Responses = dict[int | str, dict[str, Any]]


def problems(*statuses: int, media_type: str = MEDIA_TYPE, model: type[BaseModel] = Problem) -> Responses:
    """Problem responses for these statuses. GET /problems/{code} describes their codes."""
    found: Responses = {}
    for status in statuses:
        kinds = [kind for kind in error_classes().values() if kind.status == status]
        titles = ". ".join(kind.title for kind in kinds if kind.__base__ not in kinds)
        found[status] = {"description": f"{titles}.", "content": {media_type: {"schema": _reference(model)}}}
    return found


def inference_errors(*statuses: int) -> Responses:
    """Error responses of the Open Inference Protocol for these statuses. They have no problem codes."""
    return problems(*statuses, media_type=JSON, model=InferenceError)


def documentation(row: TensorOperation) -> dict[str, Any]:
    """What the API document says of an operation on tensors, as arguments of FastAPI."""
    name = row.operation.__name__
    first, *words = name.split("_")
    body = {"schema": _reference(row.request) | CLOSED, "examples": _file(f"{name}.json")}
    requests = {JSON: body} | _tensors()
    responses = {JSON: {"example": _file(row.example)}} if row.example else {}
    responses |= {media_type: DESCRIBED[media_type] for media_type in row.media_types if media_type != JSON}
    return {
        "tags": ["attention"],
        "operation_id": first + "".join(map(str.capitalize, words)),
        "summary": row.summary,
        "description": cleandoc(row.operation.__doc__ or ""),
        "response_model": row.response,
        "response_class": Response if row.response is None else JSONResponse,
        "response_description": row.returns,
        "responses": problems(*TENSOR_STATUSES) | ({200: {"content": responses}} if responses else {}),
        "openapi_extra": {"requestBody": {"content": requests, "required": True}},
    }


def inference_body() -> dict[str, Any]:
    """The request body of an inference, as `openapi_extra` for FastAPI."""
    summary = "Two queries, three keys, causal: the second query attends to the first two keys"
    examples = {"causal": {"summary": summary, "value": INFERENCE_EXAMPLE}}
    content = {JSON: {"schema": _reference(InferenceRequest), "examples": examples}}
    return {"requestBody": {"content": content | _octets(), "required": True}}


def inference_answer() -> Responses:
    """The 200 response of an inference, beside its JSON model: the binary form and its header."""
    description = "Length of the JSON in bytes. The bytes of the binary tensors follow it."
    length = {"description": description, "schema": {"type": "integer", "minimum": 0}}
    return {200: {"content": _octets(), "headers": {"Inference-Header-Content-Length": length}}}


def _reference(model: type[BaseModel]) -> dict[str, str]:
    return {"$ref": REFERENCE.format(model=model.__name__)}


def _file(name: str) -> Any:
    return json.loads(files("attention_service.routes").joinpath(name).read_text(encoding="utf-8"))


def _binary(description: str) -> dict[str, Any]:
    return {"schema": {"type": "string", "format": "binary", "description": description}}


def _octets() -> dict[str, Any]:
    description = "JSON of the length in Inference-Header-Content-Length, then the bytes of its binary tensors."
    return {OCTETS: _binary(description)}


def _tensors() -> dict[str, Any]:
    """The binary media types of all codecs, which the document describes once."""
    return {name: {"schema": {"type": "string", "format": "binary"}} for name in CODECS if name != JSON}


# Responses that are no JSON. XML is no JSON string, and validators that parse it by its media type would refuse it.
DESCRIBED: Final[dict[str, Any]] = _tensors() | {SVG: {"schema": {}}, PNG: _binary("A PNG image.")}


def build(app: FastAPI) -> dict[str, Any]:
    """The document, complete; made once."""
    if app.openapi_schema is None:
        document = FastAPI.openapi(app)
        document["components"]["headers"] = {
            name: {"description": description, "required": True, "schema": {"type": kind}}
            for name, (kind, description) in HEADERS.items()
        }
        shared: dict[str, Any] = {}
        document["components"]["responses"] = shared
        for path in document["paths"].values():
            for method, operation in path.items():
                if "HTTPValidationError" in str(operation["responses"].get("422")):  # no operation answers so
                    del operation["responses"]["422"]
                _add_headers(operation["responses"], is_tensor_operation=method == "post")
                _share_errors(operation["responses"], shared)
                for parameter in operation.get("parameters", ()):
                    parameter["schema"] = _simplified(parameter["schema"])
        _add_security(document, app.state.settings)
        _add_models(document["components"]["schemas"])
    assert app.openapi_schema is not None
    return app.openapi_schema


def _add_security(document: dict[str, Any], settings: Settings) -> None:
    """Declare API keys: required where the server requires them, else optional, as another server may require them."""
    document["security"] = [{SECURITY: []}] if settings.has_keys else [{}, {SECURITY: []}]
    for path, item in document["paths"].items():
        if path in OPEN or (settings.has_keys and not needs_key(path, settings)):
            item["get"]["security"] = []
    document["components"]["securitySchemes"] = {
        SECURITY: {"type": "http", "scheme": "bearer", "description": "An API key, if the server requires one."}
    }


def _add_headers(responses: dict[str, Any], *, is_tensor_operation: bool) -> None:
    """Name the headers of the responses of an operation; those with tensors have the timings of its steps."""
    for status, response in responses.items():
        names = ["X-Request-ID"]
        names += ["Server-Timing"] if status == "200" and is_tensor_operation else []
        names += ["Retry-After"] if status == "503" else []
        names += ["WWW-Authenticate"] if status == "401" else []
        own = response.setdefault("headers", {})
        own.update({name: {"$ref": f"#/components/headers/{name}"} for name in names})


def _share_errors(responses: dict[str, Any], shared: dict[str, Any]) -> None:
    """Put the error responses of an operation among those that all operations share, and refer to them."""
    for status, response in responses.items():
        if status >= "400":
            (content,) = response["content"].values()
            name = content["schema"]["$ref"].rpartition("/")[2] + status
            shared[name] = response
            responses[status] = {"$ref": f"#/components/responses/{name}"}


def _add_models(schemas: dict[str, Any]) -> None:
    """Add models and named enums that FastAPI does not see; drop its validation errors, which are never sent."""
    requests = [row.request for row in OPERATIONS.values()]
    models: list[type[BaseModel]] = [Problem, InferenceError, *requests, InferenceRequest]
    for model in models:
        described = model.model_json_schema(ref_template=REFERENCE)
        schemas.update(described.pop("$defs", {}))
        schemas[model.__name__] = described
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    schemas.update({name: _simplified(schema) for name, schema in schemas.items()})
    shared = schemas[AttentionRequest.__name__]["properties"]
    schemas[AttentionRequest.__name__]["properties"] = dict(sorted(shared.items(), key=_rank))
    for model in requests:
        schema = schemas[model.__name__]
        del schema["additionalProperties"]
        if issubclass(model, AttentionRequest) and model is not AttentionRequest:
            own = {name: field for name, field in schema["properties"].items() if field != shared.get(name)}
            schema |= {"allOf": [_reference(AttentionRequest)], "properties": own}
    schemas.update({name: {"type": "string", "enum": [*values]} for name, values in ENUMS.items()})


def _rank(field: tuple[str, Any]) -> int:
    """The place of a field among those that most people use, or the one after them."""
    return FIRST.index(field[0]) if field[0] in FIRST else len(FIRST)


def _simplified(schema: Any) -> Any:
    """A schema with references to the named enums and the format of numbers, without titles and null defaults.

    pydantic derives titles from names. A default of null means that the field is absent; generators would want a value.
    A number without a format is float32 in some generated clients, a decimal in others.
    """
    if isinstance(schema, list):
        return [_simplified(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: _simplified(value) for key, value in schema.items() if not _says_nothing(key, value)}
    if found.get("type") == "number":
        found["format"] = "double"
    if isinstance(found.get("const"), str):  # which OpenAPI 3.0 has not
        found["enum"] = [found.pop("const")]
    if isinstance(names := found.pop("enum", None), list):
        del found["type"]
        return {"$ref": REFERENCE.format(model=NAMES[tuple(names)])} | found
    return found


def _says_nothing(key: str, value: Any) -> bool:
    return (key == "title" and isinstance(value, str)) or (key == "default" and value is None)
