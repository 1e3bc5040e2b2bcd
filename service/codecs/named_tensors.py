"""What binary formats have in common: named tensors beside a JSON text with everything else."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import numpy as np

from service.codecs import json
from service.codecs.chunks import Chunk
from service.codecs.decoded import Decoded
from service.errors import FieldConflict, InvalidRequest, InvalidTensors, TooDeep, TooLarge, child, quote

# The name of the JSON text in a request, and in an answer.
REQUEST: Final = "request"
RESPONSE: Final = "response"
# More than any request has.
MAX_MEMBERS: Final = 200
# Bytes of the JSON text: reading it takes many times as much.
MAX_TEXT: Final = 2**21


def nested(tensors: Mapping[str, np.ndarray], request: bytes | None) -> Decoded:
    """The fields of a request from its tensors, whose names are dotted, and its JSON text.

    Errors: FieldConflict for a field given twice, TooDeep, TooLarge, and those of the text.
    """
    if request is not None and len(request) > MAX_TEXT:
        raise TooLarge.at("", f"{REQUEST} of at most {MAX_TEXT} bytes", str(len(request)))
    fields, untyped = json.decode(request) if request else Decoded({}, frozenset())
    place(fields, tensors)
    return Decoded(fields, untyped)


def place(fields: dict[str, Any], values: Mapping[str, Any]) -> None:
    """Put values where their dotted names say. Errors: FieldConflict for a field given twice, TooDeep."""
    for name, value in values.items():
        if name.count(".") >= json.MAX_DEPTH:
            raise TooDeep.at(child("", name), f"at most {json.MAX_DEPTH} levels", "more")
        *path, last = name.split(".")
        inner, pointer = fields, ""
        for step in path:
            pointer = child(pointer, step)
            inner = inner.setdefault(step, {})
            if not isinstance(inner, dict):
                raise FieldConflict.at(pointer, "an object", f"something else beside {quote(name)}")
        if last in inner:
            raise FieldConflict.at(child(pointer, last), "each field once", "it twice")
        inner[last] = value


def flattened(answer: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, np.ndarray]]:
    """The tensors of an answer under dotted names."""
    for name, value in answer.items():
        if isinstance(value, np.ndarray):
            yield prefix + name, value
        elif isinstance(value, Mapping) and name != "metadata":
            yield from flattened(value, f"{prefix}{name}.")


class Rest:
    """The JSON text with what is no tensor, in chunks, as often as it is iterated. It is long only where labels are."""

    def __init__(self, answer: Mapping[str, Any]) -> None:
        self._plain = {name: value for name, value in answer.items() if not _has_tensors(value)}
    def __iter__(self) -> Iterator[Chunk]:
        return json.chunks(self._plain)


def booleans(data: memoryview, name: str) -> np.ndarray:
    """Bytes of 0 and 1 as booleans, a view. Errors: InvalidTensors."""
    octets = np.frombuffer(data, np.uint8)
    if octets.size and octets.max() > 1:
        raise InvalidTensors.at("", f"bytes of 0 and 1 in {quote(name)}", "others")
    return octets.view(np.bool_)


def _has_tensors(value: Any) -> bool:
    return isinstance(value, np.ndarray) or (
        isinstance(value, Mapping) and any(isinstance(item, np.ndarray) for item in value.values())
    )


def too_many(count: int) -> InvalidRequest:
    """The error for more members than any request has."""
    return InvalidRequest.at("", f"at most {MAX_MEMBERS} members", str(count))
