"""The API document (OpenAPI 3.1): what FastAPI generates, and the parts that FastAPI cannot know.

Clients are generated from it, so every schema that becomes a type has a name, and no other schema has one.
"""

from __future__ import annotations

from typing import Any, Final, get_args

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from service.attention import spec
from service.http.auth import OPEN
from service.schemas.arrays import ElementType
from service.schemas.inference import Datatype, InferenceError, InferenceRequest
from service.schemas.problem import Problem
from service.schemas.request import AttentionRequest, Encoding

REFERENCE = "#/components/schemas/{model}"
# FastAPI's own description of errors that this service answers as problems.
UNUSED = ("HTTPValidationError", "ValidationError")
SECURITY: Final = "bearer"
# Sets of names that become types, each with what it is.
ENUMS: Final[dict[str, tuple[Any, str]]] = {
    "Layout": (spec.Layout, "Axes of an array, in order: b batch, h heads, l tokens, d features."),
    "FloatType": (spec.DType, "A floating-point type."),
    "ElementType": (ElementType, "The type of an array's elements."),
    "Backend": (spec.Backend, "The backend that computes the request."),
    "Normalization": (spec.Normalization, "How scores become weights."),
    "IncludedOutput": (spec.Output, "An output that can be requested in addition to output and metadata."),
    "Encoding": (Encoding, "How JSON holds arrays."),
    "TensorDatatype": (Datatype, "Type of the elements of a tensor in the Open Inference Protocol."),
}


def build(app: FastAPI) -> dict[str, Any]:
    """The document, complete; made once."""
    if app.openapi_schema is None:
        document = get_openapi(
            title=app.title,
            version=app.version,
            summary=app.summary,
            description=app.description,
            routes=app.routes,
            tags=app.openapi_tags,
            servers=app.servers,
            license_info=app.license_info,
            separate_input_output_schemas=False,
        )
        _add_security(document)
        _add_models(document)
        _name_enums(document)
        _drop_titles(document)
        app.openapi_schema = document
    return app.openapi_schema


def _add_security(document: dict[str, Any]) -> None:
    """Declare API keys as optional, and no key for the health checks."""
    document["security"] = [{}, {SECURITY: []}]
    for path in OPEN:
        document["paths"][path]["get"]["security"] = []
    document["components"]["securitySchemes"] = {
        SECURITY: {"type": "http", "scheme": "bearer", "description": "An API key, if the server requires one."}
    }


def _add_models(document: dict[str, Any]) -> None:
    """Add models that FastAPI does not see, and drop its validation errors, which no operation answers with."""
    schemas = document["components"]["schemas"]
    for model in (Problem, InferenceError, AttentionRequest, InferenceRequest):
        described = model.model_json_schema(ref_template=REFERENCE)
        schemas.update(described.pop("$defs", {}))
        schemas[model.__name__] = described
    for name in UNUSED:
        schemas.pop(name, None)
    for path in document["paths"].values():
        for operation in path.values():
            if _refers_to_unused(operation["responses"].get("422")):
                del operation["responses"]["422"]


def _refers_to_unused(response: dict[str, Any] | None) -> bool:
    return response is not None and any(name in str(response) for name in UNUSED)


def _name_enums(document: dict[str, Any]) -> None:
    """Replace sets of names wherever they stand by references to one type each."""
    names = {get_args(kind): name for name, (kind, _) in ENUMS.items()}

    def replaced(node: Any) -> Any:
        if isinstance(node, list):
            return [replaced(item) for item in node]
        if not isinstance(node, dict):
            return node
        if isinstance(node.get("enum"), list):
            rest = {key: value for key, value in node.items() if key not in ("enum", "type", "title")}
            return {"$ref": REFERENCE.format(model=names[tuple(node["enum"])])} | rest
        return {key: replaced(value) for key, value in node.items()}

    schemas = document["components"]["schemas"]
    schemas.update({name: replaced(schema) for name, schema in schemas.items()})
    for name, (kind, description) in ENUMS.items():
        schemas[name] = {"type": "string", "enum": list(get_args(kind)), "description": description}


def _drop_titles(document: dict[str, Any]) -> None:
    """pydantic derives them from the names, and says nothing more."""
    for schema in document["components"]["schemas"].values():
        schema.pop("title", None)
        for field in schema.get("properties", {}).values():
            field.pop("title", None)
            if field.get("default", "") is None:  # it means absent; generators would want a value
                del field["default"]
    for path in document["paths"].values():
        for operation in path.values():
            for parameter in operation.get("parameters", ()):
                parameter["schema"].pop("title", None)
