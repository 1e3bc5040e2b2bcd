"""What npz and safetensors have in common: tensors under dotted names, beside a JSON text with all other fields."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import numpy as np

from attention_service.codecs.decoded import Body, Decoded
from attention_service.codecs.json.limits import MAX_DEPTH
from attention_service.codecs.json.reader import decode
from attention_service.errors import (
    QUOTE_LENGTH,
    FieldConflict,
    InvalidRequest,
    InvalidTensors,
    TooDeep,
    TooLarge,
    child,
    quote,
)

# The name of the JSON text in a request, and in an answer.
REQUEST: Final = "request"
RESPONSE: Final = "response"
# How the text begins that stands for a file which Git LFS keeps elsewhere (Git LFS, docs/spec.md).
LFS: Final = b"version "
# More than any request has.
MAX_TENSORS: Final = 200
# Bytes of the JSON text: reading it takes many times as much.
MAX_TEXT: Final = 2**21


def request_fields(tensors: Mapping[str, np.ndarray | str], text: bytes | None, *, quickly: bool = False) -> Decoded:
    """The fields of a request from its tensors and its JSON text.

    quickly: raise NotQuick for a text that might take more than a few milliseconds

    Errors: FieldConflict for a field given twice, TooDeep, TooLarge, and those of the text.
    """
    if text is not None and len(text) > MAX_TEXT:
        raise TooLarge.at("", f"{quote(REQUEST)} of at most {MAX_TEXT} bytes", str(len(text)))
    decoded = decode(text, quickly=quickly) if text else Decoded({}, frozenset())
    add_dotted(decoded.fields, tensors)
    return decoded


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values by dotted names as fields of a request. Errors: as of `add_dotted`."""
    fields: dict[str, Any] = {}
    add_dotted(fields, values)
    return fields


def add_dotted(fields: dict[str, Any], values: Mapping[str, Any]) -> None:
    """Insert values into `fields`, in place: `projection.query.weight` sets fields["projection"]["query"]["weight"].

    Dicts are made where they are missing. After an error some values may be inserted already.

    Errors: FieldConflict for a field given twice, or a name inside a field that is no object; TooDeep.
    """
    for name, value in values.items():
        if name.count(".") >= MAX_DEPTH:
            raise TooDeep.at(child("", name), f"at most {MAX_DEPTH} levels", "more")
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


def check_not_lfs(body: Body) -> None:
    """Refuse a file that Git LFS has not fetched. Errors: InvalidTensors."""
    if bytes(body[: len(LFS)]) == LFS:
        raise InvalidTensors.at("", "the file itself", "a pointer of Git LFS to it", "git lfs pull fetches the file")


def check_count(count: int, what: str = "tensors") -> None:
    """Refuse more tensors, or names beside them, than any request has. Errors: InvalidRequest."""
    if count > MAX_TENSORS:
        raise InvalidRequest.at("", f"at most {MAX_TENSORS} {what}", str(count))


def unread_names(places: Iterable[tuple[str, Iterable[str]]], where: str) -> dict[str, tuple[str, str]]:
    """`unread` of `Decoded`, of the names at each place. where: fields are read. Errors: as of `check_count`"""
    found: dict[str, tuple[str, str]] = {}
    for pointer, names in places:
        for name in names:
            found.setdefault(name[:QUOTE_LENGTH], (pointer, where))  # no field has a longer name
            check_count(len(found), "names beside the fields")
    return found


def dotted_tensors(fields: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, np.ndarray]]:
    """The arrays of a request or an answer under dotted names, as `add_dotted` reads them."""
    for name, value in fields.items():
        if isinstance(value, np.ndarray):
            yield prefix + name, value
        elif isinstance(value, Mapping) and name != "metadata":  # which has none
            yield from dotted_tensors(value, f"{prefix}{name}.")


def plain_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that are no arrays, nested ones included; an object whose fields are all arrays is left out."""
    found: dict[str, Any] = {}
    for name, value in fields.items():
        if isinstance(value, Mapping):
            inner = plain_fields(value)
            if inner or not value:
                found[name] = inner
        elif not isinstance(value, np.ndarray):
            found[name] = value
    return found


def split_answer(answer: Mapping[str, Any]) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """The tensors of an answer under dotted names, and the fields without tensors."""
    tensors = dict(dotted_tensors(answer))
    without = {name.partition(".")[0] for name in tensors}
    return tensors, {name: value for name, value in answer.items() if name not in without}


def elements(data: memoryview, dtype: np.dtype, name: str) -> np.ndarray:
    """A view of the bytes of a tensor as a vector. Errors: InvalidTensors for booleans other than 0 and 1."""
    octets = np.frombuffer(data, np.uint8)
    if dtype == np.bool_ and octets.size and octets.max() > 1:
        raise InvalidTensors.at("", f"bytes of 0 and 1 in {quote(name)}", "others")
    return octets.view(dtype)


def whole_words(array: np.ndarray) -> np.ndarray:
    """The array itself if its elements are aligned, else a copy, as unaligned numbers are far slower."""
    return array if array.flags.aligned else array.copy()
