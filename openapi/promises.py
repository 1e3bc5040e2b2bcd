"""What clients rely on, a line for each promise, so that a broken one shows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from plain import merged

# What is said to people, and that a body has no other fields.
SILENT = ("description", "default", "unevaluatedProperties")


def promises(document: dict[str, Any]) -> set[str]:
    """All that an API document promises."""
    return {*_operations(document), *_types(document)}


def broken(promised: set[str], document: dict[str, Any], changelog: str) -> list[str]:
    """Promises that a document does not keep, but for those whose subject a changelog names in backticks as broken.

    Only headings of `Changed` and `Removed` count.
    """
    parts = [part for part in changelog.split("\n### ") if part.startswith(("Changed", "Removed"))]
    lost = sorted(promised - promises(document))
    return [line for line in lost if not any(f"`{line.partition(': ')[0]}`" in part for part in parts)]


def _operations(document: dict[str, Any]) -> Iterator[str]:
    shared = document["components"].get("responses", {})
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            subject = f"{method.upper()} {path}"
            yield f"{subject}: is {operation['operationId']}"
            for media_type, content in operation.get("requestBody", {}).get("content", {}).items():
                yield f"{subject}: takes {media_type} {_shape(content['schema'])}"
            for status, response in operation["responses"].items():
                response = shared[response["$ref"].rpartition("/")[2]] if "$ref" in response else response
                for media_type, content in response.get("content", {}).items():
                    yield f"{subject}: answers {status} {media_type} {_shape(content['schema'])}"


def _types(document: dict[str, Any]) -> Iterator[str]:
    for name, schema in document["components"]["schemas"].items():
        schema = merged(schema, document)
        for value in schema.get("enum", ()):
            yield f"{name}: may be {value}"
        for field, content in schema.get("properties", {}).items():
            yield f"{name}.{field}: is {_shape(content)}"
            needed = "always there" if field in schema.get("required", ()) else "optional"
            yield f"{name}.{field}: is {needed}"


def _shape(schema: dict[str, Any]) -> str:
    """A schema without what it says to people."""
    return json.dumps({key: value for key, value in schema.items() if key not in SILENT}, sort_keys=True)
