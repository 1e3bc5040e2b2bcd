"""The same API in OpenAPI 3.0, for generators of clients that do not read 3.1 or know no unions with arrays."""

from __future__ import annotations

import json
from typing import Any

NULL = {"type": "null"}


def plain(document: dict[str, Any]) -> dict[str, Any]:
    """A document derived from one in OpenAPI 3.1.

    Null is left out, as it means that a field is absent; what is one of several is any value. A request that extends
    another one has the fields of both, as 3.0 cannot say that these are all.
    """
    found: dict[str, Any] = _converted(_flat(document))
    found["openapi"] = "3.0.3"
    del found["components"]["schemas"]["NestedTensor"]  # which no field is any more
    del found["info"]["summary"]
    found["info"]["license"] = {"name": "Apache-2.0", "url": "https://www.apache.org/licenses/LICENSE-2.0"}
    return found


def _flat(document: dict[str, Any]) -> dict[str, Any]:
    """A document whose requests have all of their fields themselves, and no others."""
    schemas = dict(document["components"]["schemas"])
    paths = json.loads(json.dumps(document["paths"]))
    for operation in (operation for path in paths.values() for operation in path.values()):
        for content in operation.get("requestBody", {}).get("content", {}).values():
            if "unevaluatedProperties" in content["schema"]:
                del content["schema"]["unevaluatedProperties"]
                name = content["schema"]["$ref"].rpartition("/")[2]
                schemas[name] = merged(schemas[name], document) | {"additionalProperties": False}
    return document | {"paths": paths, "components": document["components"] | {"schemas": schemas}}


def merged(schema: dict[str, Any], document: dict[str, Any]) -> dict[str, Any]:
    """A schema with the fields of those that it extends."""
    fields: dict[str, Any] = {}
    for base in schema.get("allOf", ()):
        fields |= document["components"]["schemas"][base["$ref"].rpartition("/")[2]]["properties"]
    rest = {key: value for key, value in schema.items() if key != "allOf"}
    return rest | {"properties": fields | schema["properties"]} if fields else rest


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
    return {"allOf": [option]} | rest if "$ref" in option and rest else _converted(option) | rest
