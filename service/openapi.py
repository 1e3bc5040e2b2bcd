"""The API document (OpenAPI 3.1), completed where FastAPI does not know what this service does by itself."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from service.schemas.inference import InferenceError
from service.schemas.problem import Problem

REFERENCE = "#/components/schemas/{model}"
# FastAPI's own description of errors that this service answers as problems.
UNUSED = ("HTTPValidationError", "ValidationError")


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
        document["security"] = []  # said, so that generators and linters need not guess
        _add_problems(document)
        app.openapi_schema = document
    return app.openapi_schema


def _add_problems(document: dict[str, Any]) -> None:
    """Describe Problem once, and drop FastAPI's validation errors, which no operation answers with."""
    schemas = document["components"]["schemas"]
    for model in (Problem, InferenceError):
        described = model.model_json_schema(ref_template=REFERENCE)
        schemas.update(described.pop("$defs", {}))
        schemas[model.__name__] = described
    for name in UNUSED:
        schemas.pop(name, None)
    for path in document["paths"].values():
        for operation in path.values():
            content = operation["responses"].get("422", {}).get("content", {})
            if "application/json" in content:
                del operation["responses"]["422"]
