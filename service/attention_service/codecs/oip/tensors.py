"""The input tensors of the Open Inference Protocol, in JSON, in typed fields, or as bytes."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Mapping
from typing import Any, Final, NamedTuple

import numpy as np

from attention_service.attention.arrays import cast, within
from attention_service.codecs.element_types import PROTOCOL_TYPES
from attention_service.codecs.named_tensors import elements, whole_words
from attention_service.codecs.shapes import BESIDE_0, MAX_RANK, shape_as_given, shape_of
from attention_service.errors import FieldConflict, InvalidTensors, shape

DATATYPES: Final = {dtype: name for name, dtype in PROTOCOL_TYPES.items()}
# Strings: labels of tokens.
BYTES: Final = "BYTES"
# Of one request, as each takes about a hundred bytes, but five in a body.
MAX_STRINGS: Final = 2**19
# Labels are (l,) or (b, l).
LABEL_AXES: Final = 2
# The only field in which null has a meaning: minus infinity.
BIAS: Final = "bias"


class Head(NamedTuple):
    """The name, datatype and shape of an input; its place in the request."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    pointer: str

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)


# The head of an input; its data as bytes, or elements as JSON has them; the place of the data in the request.
Input = tuple[Head, Any, str]


def head_of(name: Any, datatype: Any, lengths: Any, parameters: Container[str], pointer: str) -> Head:
    """The head of an input, checked. Errors: InvalidTensors."""
    if not isinstance(name, str) or not name:
        raise InvalidTensors.of(f"{pointer}/name", "the name of an input", name)
    if not isinstance(datatype, str) or (datatype not in PROTOCOL_TYPES and datatype != BYTES):
        raise InvalidTensors.of(f"{pointer}/datatype", f"one of {', '.join(PROTOCOL_TYPES)}, {BYTES}", datatype)
    found = shape_of(lengths)
    if found is None:
        expected = f"at most {MAX_RANK} lengths of axes{BESIDE_0}"
        raise InvalidTensors.at(f"{pointer}/shape", expected, shape_as_given(lengths))
    if datatype == BYTES and 0 in found:  # as lists, the other axes would be as long as they say
        raise InvalidTensors.at(f"{pointer}/shape", "at least one string", shape(found))
    if datatype == BYTES and len(found) > LABEL_AXES:  # each string would be as many lists
        raise InvalidTensors.at(f"{pointer}/shape", "strings with one axis or two", shape(found))
    if "shared_memory_region" in parameters:
        raise InvalidTensors.at(f"{pointer}/parameters", "data in the request", "shared memory")
    return Head(name, datatype, found, pointer)


def parameters_of(entry: Mapping[str, Any], pointer: str) -> dict[str, Any]:
    """The parameters of an input, an output or a request. Errors: InvalidTensors."""
    parameters = entry.get("parameters")
    if parameters is None:
        return {}
    if not isinstance(parameters, dict):
        raise InvalidTensors.of(f"{pointer}/parameters", "an object", parameters)
    return parameters


def tensors_of(inputs: Iterable[Input]) -> dict[str, Any]:
    """The inputs of a request by name: arrays, or strings as nested lists.

    Errors: InvalidTensors, Overflow, FieldConflict for a name given twice.
    """
    tensors: dict[str, Any] = {}
    strings = 0
    for head, data, pointer in inputs:
        if head.datatype == BYTES:
            strings += head.size
            if strings > MAX_STRINGS:
                expected = f"at most {MAX_STRINGS} strings in a request"
                raise InvalidTensors.at(f"{head.pointer}/shape", expected, shape(head.shape))
        read = _from_bytes if isinstance(data, memoryview) else _from_elements
        value = read(data, head, pointer)
        if head.name in tensors:
            raise FieldConflict.at(f"{head.pointer}/name", "each input once", "the same name again")
        tensors[head.name] = value
    return tensors


def _from_bytes(data: memoryview, head: Head, pointer: str) -> Any:
    """A tensor from its bytes: a view of them if its elements are aligned there. Errors: InvalidTensors."""
    if head.datatype == BYTES:
        return np.array(_strings(data, head, pointer), dtype=object).reshape(head.shape).tolist()
    dtype = PROTOCOL_TYPES[head.datatype]
    needed = head.size * dtype.itemsize
    if len(data) != needed:
        raise InvalidTensors.at(pointer, f"{needed} bytes of {head.datatype} {shape(head.shape)}", str(len(data)))
    return whole_words(elements(data, dtype, head.name)).reshape(head.shape)


def _strings(data: memoryview, head: Head, pointer: str) -> list[str]:
    """Strings that stand each after four bytes with its length."""
    found: list[str] = []
    at = 0
    while at + 4 <= len(data) and len(found) <= head.size:
        end = at + 4 + int.from_bytes(data[at : at + 4], "little")
        if end > len(data):
            break
        found.append(text(data[at + 4 : end], pointer))
        at = end
    if at != len(data) or len(found) != head.size:
        expected = f"strings {shape(head.shape)}, each after its length"
        raise InvalidTensors.at(pointer, expected, f"{len(found)} of them")
    return found


def text(data: bytes | memoryview, pointer: str) -> str:
    """A string. Errors: InvalidTensors."""
    try:
        return str(data, "utf-8")
    except UnicodeDecodeError:
        raise InvalidTensors.at(pointer, "strings in UTF-8", "other bytes") from None


def _from_elements(data: Any, head: Head, pointer: str) -> Any:
    """A tensor from its elements: flat, or nested as the shape says. Errors: InvalidTensors, Overflow."""
    array = _to_array(data, head) if isinstance(data, list) else data
    wanted, kinds, types = {BYTES: ("strings", "O", (str,)), "BOOL": ("true or false", "b", (bool,))}.get(
        head.datatype, ("integers", "iu", (int,)) if "INT" in head.datatype else ("numbers", "iuf", (int, float))
    )
    if not isinstance(array, np.ndarray) or (array.size and array.dtype.kind not in kinds):
        place, got = _first_other(array, types, pointer)
        raise InvalidTensors.of(place, f"{wanted} for {head.datatype}", got)
    if array.size != head.size:
        raise InvalidTensors.at(pointer, f"{head.size} elements of shape {shape(head.shape)}", str(array.size))
    if array.ndim > 1 and array.shape != head.shape:
        expected = f"a flat list, or one nested as {shape(head.shape)}"
        raise InvalidTensors.at(pointer, expected, shape(array.shape))
    if head.datatype == BYTES:
        return array.reshape(head.shape).tolist()
    return _typed(array, PROTOCOL_TYPES[head.datatype], pointer).reshape(head.shape)


def _first_other(data: Any, types: tuple[type, ...], pointer: str) -> tuple[str, Any]:
    """The place of the first element that is of none of the types, and the element; the data if there is no such."""
    for i, item in enumerate(data if isinstance(data, list) else ()):
        if isinstance(item, list):
            place, found = _first_other(item, types, f"{pointer}/{i}")
            if found is not item:
                return place, found
        elif type(item) not in types:
            return f"{pointer}/{i}", item
    return pointer, data


def _to_array(items: list[Any], head: Head) -> np.ndarray | list[Any]:
    """A list of strings, of nothing, or of a bias with null, as an array; any other list as it is."""
    try:
        array = np.array(items, dtype=object)  # else each string would take as much memory as the longest of them
    except ValueError:  # ragged
        return items
    kinds = set(map(type, array.flat))
    if head.name == BIAS and kinds <= {int, float, type(None)}:
        return np.array([-math.inf if item is None else item for item in array.flat]).reshape(array.shape)
    return array if kinds <= ({str} if head.datatype == BYTES else set()) else items


def _typed(array: np.ndarray, dtype: np.dtype, pointer: str) -> np.ndarray:
    """The elements in the type of their datatype. Errors: InvalidArray, Overflow for what the type cannot hold."""
    if dtype.kind in "iu":
        within(array, int(np.iinfo(dtype).min), int(np.iinfo(dtype).max), pointer)
    if dtype == array.dtype or dtype.itemsize == 8 or dtype.kind not in "fV":  # V: bfloat16
        return array.astype(dtype, copy=False)
    return cast(array.astype(np.float64, copy=False), dtype, pointer, minus_infinity=True)
