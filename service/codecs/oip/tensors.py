"""One tensor of the Open Inference Protocol: its name, datatype and shape, its data within or after the JSON."""

from __future__ import annotations

import math
from collections.abc import Container, Mapping
from typing import Any, Final, NamedTuple

import ml_dtypes
import numpy as np

from service.attention.arrays import cast
from service.codecs.named_tensors import booleans
from service.codecs.sizes import MAX_RANK, is_shape
from service.errors import InvalidTensors, Overflow, child, describe, quote, shape

DTYPES: Final[dict[str, np.dtype]] = {
    "BOOL": np.dtype(np.bool_),
    "UINT8": np.dtype("<u1"),
    "UINT16": np.dtype("<u2"),
    "UINT32": np.dtype("<u4"),
    "INT8": np.dtype("<i1"),
    "INT16": np.dtype("<i2"),
    "INT32": np.dtype("<i4"),
    "INT64": np.dtype("<i8"),
    "FP16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "FP32": np.dtype("<f4"),
    "FP64": np.dtype("<f8"),
}
DATATYPES: Final = {dtype: name for name, dtype in DTYPES.items()}
# Strings: labels of tokens.
BYTES: Final = "BYTES"
# Of one request, as each takes about a hundred bytes, but five in a body.
MAX_STRINGS: Final = 2**19
BINARY_SIZE: Final = "binary_data_size"
# The only field in which null has a meaning: minus infinity.
BIAS: Final = "bias"


class Tail:
    """The bytes after the JSON, which tensors take one after the other. taken: how many are gone."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self.taken = 0

    def take(self, size: int, pointer: str) -> memoryview:
        """The next bytes. Errors: InvalidTensors where there are fewer."""
        left = len(self._data) - self.taken
        if size > left:
            hint = "" if len(self._data) else "the header Inference-Header-Content-Length says where the JSON ends"
            raise InvalidTensors.at(pointer, f"at most the {left} bytes that are left after the JSON", str(size), hint)
        self.taken += size
        return self._data[self.taken - size : self.taken]

    def end(self) -> None:
        """Errors: InvalidTensors where something is left over."""
        if self.taken != len(self._data):
            raise InvalidTensors.at("", f"{self.taken} bytes after the JSON, as its inputs say", str(len(self._data)))


class Strings:
    """Counts the strings of one request, before they are made."""

    def __init__(self) -> None:
        self._left = MAX_STRINGS

    def count(self, head: Head, pointer: str) -> None:
        """Errors: InvalidTensors where all of them are too many."""
        if head.datatype == BYTES:
            self._left -= math.prod(head.sizes)
            if self._left < 0:
                raise InvalidTensors.at(pointer, f"at most {MAX_STRINGS} strings in a request", shape(head.sizes))


class Head(NamedTuple):
    """What a tensor is called, which type its elements have, how long its axes are."""

    name: str
    datatype: str
    sizes: tuple[int, ...]


def head_of(name: Any, datatype: Any, sizes: Any, pointer: str) -> Head:
    """The head of an input. Errors: InvalidTensors."""
    if not isinstance(name, str) or not name:
        raise InvalidTensors.of(f"{pointer}/name", "the name of an input", name)
    if not isinstance(datatype, str) or (datatype not in DTYPES and datatype != BYTES):
        raise InvalidTensors.of(f"{pointer}/datatype", f"one of {', '.join(DTYPES)}, {BYTES}", datatype)
    head = Head(name, datatype, _sizes(sizes, f"{pointer}/shape"))
    if datatype == BYTES and 0 in head.sizes:  # as lists, the other axes would be as long as they say
        raise InvalidTensors.at(f"{pointer}/shape", "at least one string", shape(head.sizes))
    return head


def check_own(parameters: Container[str], pointer: str) -> None:
    """Errors: InvalidTensors for a tensor whose data is elsewhere."""
    if "shared_memory_region" in parameters:
        raise InvalidTensors.at(f"{pointer}/parameters", "data in the request", "shared memory")


def read(entry: Any, pointer: str, tail: Tail, strings: Strings) -> tuple[str, Any]:
    """Name and value of an input: an array, or strings as nested lists. Errors: InvalidTensors, Overflow."""
    if not isinstance(entry, dict):
        raise InvalidTensors.of(pointer, "an object with name, shape, datatype and data", entry)
    head = head_of(entry.get("name"), entry.get("datatype"), entry.get("shape"), pointer)
    strings.count(head, f"{pointer}/shape")
    parameters = parameters_of(entry, pointer)
    check_own(parameters, pointer)
    if BINARY_SIZE not in parameters:
        return head.name, _listed(entry.get("data"), head, f"{pointer}/data")
    if "data" in entry:
        raise InvalidTensors.at(pointer, f"data or {BINARY_SIZE}", "both")
    return head.name, _binary(parameters[BINARY_SIZE], head, tail, f"{pointer}/parameters/{BINARY_SIZE}")


def parameters_of(entry: Mapping[str, Any], pointer: str) -> dict[str, Any]:
    """The parameters of an input, an output or a request. Errors: InvalidTensors."""
    parameters = entry.get("parameters")
    if parameters is None:
        return {}
    if not isinstance(parameters, dict):
        raise InvalidTensors.of(f"{pointer}/parameters", "an object", parameters)
    return parameters


def _sizes(given: Any, pointer: str) -> tuple[int, ...]:
    sizes = given.tolist() if isinstance(given, np.ndarray) else given
    if not isinstance(sizes, list) or not is_shape(sizes):
        got = quote(str(sizes)) if isinstance(sizes, list) else describe(given)
        raise InvalidTensors.at(pointer, f"at most {MAX_RANK} lengths of axes, none negative", got)
    return tuple(sizes)


def _binary(size: Any, head: Head, tail: Tail, pointer: str) -> Any:
    """A tensor from the bytes after the JSON."""
    if type(size) is not int or size < 0:
        raise InvalidTensors.of(pointer, "a number of bytes", size)
    if head.datatype != BYTES:
        _check_size(size, head, pointer)
    return from_bytes(tail.take(size, pointer), head, pointer)


def from_bytes(data: memoryview, head: Head, pointer: str) -> Any:
    """A tensor from its bytes, a view where it lies as its type wants to. Errors: InvalidTensors."""
    if head.datatype == BYTES:
        return _labels(data, head, pointer)
    _check_size(len(data), head, pointer)
    dtype = DTYPES[head.datatype]
    flat = booleans(data, head.name) if dtype == np.bool_ else np.frombuffer(data, dtype)
    # It may begin at any byte. Numbers that lie across words are computed with far more slowly than copied once.
    return (flat if flat.flags.aligned else flat.copy()).reshape(head.sizes)


def _check_size(size: int, head: Head, pointer: str) -> None:
    needed = math.prod(head.sizes) * DTYPES[head.datatype].itemsize
    if size != needed:
        raise InvalidTensors.at(pointer, f"{needed} bytes of {head.datatype} {shape(head.sizes)}", str(size))


def _labels(data: memoryview, head: Head, pointer: str) -> Any:
    """Strings that stand each after four bytes with its length."""
    found: list[str] = []
    at = 0
    needed = math.prod(head.sizes)
    while at + 4 <= len(data) and len(found) <= needed:
        end = at + 4 + int.from_bytes(data[at : at + 4], "little")
        if end > len(data):
            break
        found.append(text(data[at + 4 : end], pointer))
        at = end
    if at != len(data) or len(found) != needed:
        raise InvalidTensors.at(pointer, f"strings {shape(head.sizes)}, each after its length", f"{len(found)} of them")
    return nested(found, head)


def text(data: bytes | memoryview, pointer: str) -> str:
    """A string. Errors: InvalidTensors."""
    try:
        return str(data, "utf-8")
    except UnicodeDecodeError:
        raise InvalidTensors.at(pointer, "strings in UTF-8", "other bytes") from None


def nested(texts: list[Any], head: Head) -> Any:
    """Strings in lists, as the shape says; there are as many as it needs, at least one."""
    for size in reversed(head.sizes[1:]):
        texts = [texts[at : at + size] for at in range(0, len(texts), size)]
    return texts if head.sizes else texts[0]


def _listed(data: Any, head: Head, pointer: str) -> Any:
    """A tensor from JSON: one flat list, or lists nested as the shape says."""
    if data is None:
        raise InvalidTensors.at(pointer, f"data, or {BINARY_SIZE} among the parameters", "neither")
    plain = _plain(data, head.name, head.datatype, pointer)
    check_count(plain.size, head, pointer)
    if plain.ndim > 1 and plain.shape != head.sizes:
        raise InvalidTensors.at(pointer, f"a flat list, or one nested as {shape(head.sizes)}", shape(plain.shape))
    if head.datatype == BYTES:
        return nested(plain.reshape(-1).tolist(), head)
    return typed(plain, DTYPES[head.datatype], pointer).reshape(head.sizes)


def check_count(count: int, head: Head, pointer: str) -> None:
    """Errors: InvalidTensors for other than as many elements as the shape needs."""
    needed = math.prod(head.sizes)
    if count != needed:
        raise InvalidTensors.at(pointer, f"{needed} elements of shape {shape(head.sizes)}", str(count))


def _plain(data: Any, name: str, datatype: str, pointer: str) -> np.ndarray:
    """The elements, of the kind that the datatype wants but in JSON's own types. Errors: InvalidTensors."""
    wanted, kinds = _wanted(datatype)
    if isinstance(data, list):
        data = _listable(data, name, datatype)
    if not isinstance(data, np.ndarray) or (data.size and data.dtype.kind not in kinds):
        raise InvalidTensors.of(pointer, f"{wanted} for {datatype}", data)
    return data


def _wanted(datatype: str) -> tuple[str, str]:
    """What the elements are, in words and as kinds of NumPy."""
    if datatype == BYTES:
        return "strings", "O"
    if datatype == "BOOL":
        return "true or false", "b"
    return ("integers", "iu") if "INT" in datatype else ("numbers", "iuf")


def _listable(data: list[Any], name: str, datatype: str) -> Any:
    """What the JSON codec left as a list: strings, nothing at all, or a bias with null. All else stays as it is."""
    try:
        if name == BIAS and datatype != BYTES:
            return np.array(_filled(data))
        array = np.array(data, dtype=object)  # else each string would take as much memory as the longest of them
    except (ValueError, TypeError):  # ragged, or something else within
        return data
    strings = datatype == BYTES and all(isinstance(item, str) for item in array.flat)
    return array if strings or array.size == 0 else data


def _filled(value: Any) -> Any:
    """Minus infinity for null. Errors: TypeError for what is no number."""
    if isinstance(value, list):
        return [_filled(item) for item in value]
    if isinstance(value, bool) or not isinstance(value, int | float | None):
        raise TypeError
    return -math.inf if value is None else value


def typed(plain: np.ndarray, dtype: np.dtype, pointer: str) -> np.ndarray:
    """The elements in their own type. Errors: Overflow for what the type cannot hold."""
    if dtype.kind in "iu" and plain.size:
        limits = np.iinfo(dtype)
        bad = (plain < limits.min) | (plain > limits.max)
        if bad.any():
            index = int(np.argmax(bad.reshape(-1)))
            raise Overflow.of(child(pointer, index), f"an integer of {dtype.name}", int(plain.reshape(-1)[index]))
    if dtype.itemsize == 8 or dtype.kind not in "fV":  # V: bfloat16
        return plain.astype(dtype, copy=False)
    return cast(plain.astype(np.float64, copy=False), dtype, pointer, minus_infinity=True)
