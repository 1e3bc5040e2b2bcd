"""What npz and safetensors have in common: tensors under dotted names, beside a JSON text with all other fields."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
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
MAX_TENSORS: Final = 200
# Bytes of the JSON text: reading it takes many times as much.
MAX_TEXT: Final = 2**21


def request_fields(tensors: Mapping[str, np.ndarray], text: bytes | None) -> Decoded:
    """The fields of a request from its tensors and its JSON text.

    Errors: FieldConflict for a field given twice, TooDeep, TooLarge, and those of the text.
    """
    if text is not None and len(text) > MAX_TEXT:
        raise TooLarge.at("", f"{REQUEST} of at most {MAX_TEXT} bytes", str(len(text)))
    decoded = json.decode(text) if text else Decoded({}, frozenset())
    add_dotted(decoded.fields, tensors)
    return decoded


def add_dotted(fields: dict[str, Any], values: Mapping[str, Any]) -> None:
    """Add values to fields: `projection.query.weight` becomes a field of an object in an object.

    Errors: FieldConflict for a field given twice, TooDeep.
    """
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


def check_count(count: int) -> None:
    """Refuse more tensors than any request has. Errors: InvalidRequest."""
    if count > MAX_TENSORS:
        raise InvalidRequest.at("", f"at most {MAX_TENSORS} tensors", str(count))


def answer_tensors(answer: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, np.ndarray]]:
    """The tensors of an answer under dotted names."""
    for name, value in answer.items():
        if isinstance(value, np.ndarray):
            yield prefix + name, value
        elif isinstance(value, Mapping) and name != "metadata":
            yield from answer_tensors(value, f"{prefix}{name}.")


class AnswerText:
    """The JSON text of an answer without its tensors, in chunks. Labels make it long, so it is never joined.

    It may be iterated several times: formats say its length before they write it.
    """

    def __init__(self, answer: Mapping[str, Any], tensors: Iterable[str]) -> None:
        without = {name.partition(".")[0] for name in tensors}
        self._fields = {name: value for name, value in answer.items() if name not in without}
        self._start = list(islice(json.chunks(self._fields), 2))

    def __iter__(self) -> Iterator[Chunk]:
        return iter(self._start) if len(self._start) == 1 else json.chunks(self._fields)


def booleans(data: memoryview, name: str) -> np.ndarray:
    """Bytes of 0 and 1 as booleans, without a copy. Errors: InvalidTensors for other bytes."""
    octets = np.frombuffer(data, np.uint8)
    if octets.size and octets.max() > 1:
        raise InvalidTensors.at("", f"bytes of 0 and 1 in {quote(name)}", "others")
    return octets.view(np.bool_)


def whole_words(array: np.ndarray) -> np.ndarray:
    """The array itself if its elements are aligned, else a copy: numbers that lie across words are far slower."""
    return array if array.flags.aligned else array.copy()
