"""The same API in OpenAPI 3.0, for generators of clients that do not read 3.1 or know no unions with arrays."""

from __future__ import annotations

from typing import Any

NULL = {"type": "null"}


def plain(document: dict[str, Any]) -> dict[str, Any]:
    """A document derived from one in OpenAPI 3.1.

    Null is left out, as it means that a field is absent; what is one of several is any value.
    """
    found: dict[str, Any] = _converted(document)
    found["openapi"] = "3.0.3"
    del found["components"]["schemas"]["NestedTensor"]  # which no field is any more
    del found["info"]["summary"]
    found["info"]["license"] = {"name": "Apache-2.0", "url": "https://www.apache.org/licenses/LICENSE-2.0"}
    return found


def _converted(node: Any) -> Any:
    if isinstance(node, list):
        return [_converted(item) for item in node]
    if not isinstance(node, dict):
        return node
    if isinstance(node.get("anyOf"), list):
        return _without_union(node)
    rest = {key: _converted(value) for key, value in node.items()}
    if isinstance(rest.get("$ref"), str) and len(rest) > 1:  # 3.0 ignores what stands beside a reference
        return {"allOf": [{"$ref": rest.pop("$ref")}]} | rest
    if rest.get("contentEncoding") == "base64":
        del rest["contentEncoding"]
        rest["format"] = "byte"
    return rest


def _without_union(node: dict[str, Any]) -> dict[str, Any]:
    """The one option beside null; any value where there are more."""
    rest = {key: _converted(value) for key, value in node.items() if key != "anyOf" and value is not None}
    options = [option for option in node["anyOf"] if option != NULL]
    if len(options) > 1:
        return rest
    (option,) = options
    return ({"allOf": [option]} if "$ref" in option else _converted(option)) | rest
