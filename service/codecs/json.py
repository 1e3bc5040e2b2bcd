"""JSON (RFC 8259). Numbers go from the bytes into arrays without becoming Python objects on the way.

simdjson reads the document and gives every array of numbers as one flat buffer. The buffer forgets nesting, so the
shape is taken from the document. What simdjson refuses is read a second time, slowly, only to say what is wrong and
where.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

import numpy as np
import orjson
import simdjson

from service.codecs import encoded
from service.codecs.decoded import Decoded, Part
from service.errors import (
    DuplicateKey,
    Fault,
    InvalidArray,
    InvalidJSON,
    InvalidValue,
    Overflow,
    ServiceError,
    TooDeep,
    child,
    describe,
    quote,
)

# The deepest request is a matrix of 4 axes in an object in an object in an object; simdjson itself stops at 1024.
MAX_DEPTH: Final = 32
# An object is looked up key by key, so their number is bounded; the largest request has about 50.
MAX_KEYS: Final = 200
# simdjson counts no further than this, and cuts what is longer.
MAX_LENGTH: Final = 2**24 - 2
# Faults of one body that are reported together.
MAX_FAULTS: Final = 10
BYTE_ORDER_MARKS: Final = (b"\xef\xbb\xbf", b"\xff\xfe", b"\xfe\xff")


def decode(body: bytes, limit: int | None = None) -> Decoded:
    """The object that the body is, with each rectangular array of numbers or booleans as an ndarray.

    Integers give int64, other numbers float64, and typed arrays {dtype, shape, data} what they say. An array that is
    ragged, empty or mixed stays a list, for whoever knows the field to say what is wrong with it. `limit` is for
    others: nothing is compressed here.

    Errors: InvalidJSON, DuplicateKey, TooDeep, InvalidValue (too many keys), InvalidArray (too long a row), Overflow (a
    number beyond 64 bits).
    """
    if body.startswith(BYTE_ORDER_MARKS):
        raise InvalidJSON.at("", "UTF-8 without a byte-order mark", "a byte-order mark")
    try:
        document = simdjson.Parser().parse(body)
    except (ValueError, RuntimeError) as error:
        raise explain(body, str(error)) from None
    if not isinstance(document, simdjson.Object):
        kind = "an array" if isinstance(document, simdjson.Array) else describe(document)
        raise InvalidJSON.at("", "an object", kind)
    reader = _Reader()
    fields = reader.read(document, body.count(b"["))
    return Decoded(fields, frozenset(reader.listed))


def encode(answer: Mapping[str, Any], *, base64: bool = False) -> list[Part]:
    """The answer as JSON, arrays straight from their memory: as nested lists, null for what is not finite, or typed."""
    ready = {
        name: {part: _writable(item, base64) for part, item in value.items()}
        if isinstance(value, Mapping)
        else _writable(value, base64)
        for name, value in answer.items()
    }
    return [orjson.dumps(ready, option=orjson.OPT_SERIALIZE_NUMPY)]


def _writable(value: Any, base64: bool) -> Any:
    """What orjson can write: it knows contiguous arrays and dataclasses, but not bfloat16."""
    if not isinstance(value, np.ndarray):
        return value
    if base64:
        return encoded.encode(value)
    return np.ascontiguousarray(value if value.dtype.kind != "V" else value.astype(np.float32))  # V: bfloat16


class _Reader:
    """Turns simdjson's view of one document into values.

    A nested array hidden among numbers, as in `[1, [2]]`, leaves no trace in the flat buffer. It does in the number
    of opening brackets: the shapes and strings found must account for all of them. If they do not, the arrays are
    looked at once more, element by element.
    """

    def __init__(self) -> None:
        self._brackets = 0
        self._arrays: list[tuple[dict[str, Any], str, simdjson.Array]] = []
        self.listed: list[str] = []  # top-level fields whose arrays came as lists

    def read(self, document: simdjson.Object, brackets: int) -> dict[str, Any]:
        fields = self._object(document, "", 1)
        if self._brackets != brackets:
            for holder, key, found in self._arrays:
                plain = found.as_list()
                if not _same_nesting(plain, holder[key].shape):
                    holder[key] = plain
        return fields

    def _object(self, found: simdjson.Object, pointer: str, depth: int) -> dict[str, Any]:
        keys = list(found.keys())
        if len(keys) > MAX_KEYS:
            raise InvalidValue.at(pointer, f"at most {MAX_KEYS} keys", str(len(keys)))
        if depth > MAX_DEPTH:
            raise TooDeep.at(pointer, f"at most {MAX_DEPTH} levels", "more")
        fields: dict[str, Any] = {}
        for key in keys:
            place = child(pointer, key)
            if key in fields:
                raise DuplicateKey.at(place, "each key once", "the same key again")
            self._brackets += key.count("[")
            fields[key] = value = self._value(found, key, place, depth)
            if isinstance(value, np.ndarray) and isinstance(source := found[key], simdjson.Array):
                self._arrays.append((fields, key, source))
        return fields

    def _value(self, found: simdjson.Object, key: str, place: str, depth: int) -> Any:
        try:
            value = found[key]
        except KeyError:  # simdjson does not find a key that holds a NUL character
            raise InvalidJSON.at(place, "keys without NUL characters", quote(key)) from None
        if isinstance(value, simdjson.Array):
            if depth == 1:
                self.listed.append(key)
            return self._array(value, place)
        if isinstance(value, simdjson.Object):
            fields = self._object(value, place, depth + 1)
            return encoded.decode(fields, place) if encoded.is_one(fields) else fields
        if isinstance(value, str):
            self._brackets += value.count("[")
        return value

    def _array(self, found: simdjson.Array, pointer: str) -> np.ndarray | list[Any]:
        sizes, first = _probe(found, pointer)
        array = None
        if isinstance(first, bool):
            array = _booleans(found.as_list())
        elif isinstance(first, int | float) and _rectangular(found, sizes):
            array = _numbers(found, sizes, first)
        if array is None:
            plain = found.as_list()
            self._brackets += _count_brackets(plain, pointer)
            return plain
        self._brackets += sum(math.prod(array.shape[:axis]) for axis in range(array.ndim))
        return array


def _probe(found: simdjson.Array, pointer: str) -> tuple[tuple[int, ...], Any]:
    """The lengths met on the way down the first elements, and the first value that is no array."""
    sizes = []
    value: Any = found
    while isinstance(value, simdjson.Array):
        sizes.append(len(value))
        _check_length(sizes[-1], pointer)
        if len(sizes) > MAX_DEPTH:
            raise TooDeep.at(pointer, f"at most {MAX_DEPTH} levels", "more")
        value = value[0] if sizes[-1] else None
    return tuple(sizes), value


def _check_length(length: int, pointer: str) -> None:
    if length > MAX_LENGTH:
        raise InvalidArray.at(pointer, f"at most {MAX_LENGTH} elements in one row of JSON", "more")


def _rectangular(found: simdjson.Array, sizes: tuple[int, ...]) -> bool:
    """Whether every array above the innermost ones holds arrays of the same length."""
    if len(sizes) == 1:
        return True
    rows: list[Any] = list(found)
    if set(map(type, rows)) != {simdjson.Array} or set(map(len, rows)) != {sizes[1]}:
        return False
    return len(sizes) == 2 or all(_rectangular(row, sizes[1:]) for row in rows)


def _numbers(found: simdjson.Array, sizes: tuple[int, ...], first: float) -> np.ndarray | None:
    """The array's own copy of its numbers; None where something else is among them."""
    flat: np.ndarray | None = None
    with suppress(TypeError, ValueError):
        if isinstance(first, int):
            flat = np.frombuffer(found.as_buffer(of_type="i"), np.int64)
    with suppress(TypeError, ValueError):
        if flat is None:
            flat = np.frombuffer(found.as_buffer(of_type="d"), np.float64)
    return flat.reshape(sizes) if flat is not None and flat.size == math.prod(sizes) else None


def _booleans(plain: list[Any]) -> np.ndarray | None:
    """None unless the list is rectangular and holds nothing but booleans."""
    try:
        array = np.array(plain)
    except ValueError:
        return None
    return array if array.dtype == bool else None


def _same_nesting(plain: Any, sizes: tuple[int, ...]) -> bool:
    if not sizes:
        return not isinstance(plain, list)
    return isinstance(plain, list) and all(_same_nesting(item, sizes[1:]) for item in plain)


def _count_brackets(plain: list[Any], pointer: str) -> int:
    """Opening brackets of a list, those in its strings included. Errors: TooDeep."""
    count = 0
    level: list[Any] = [plain]
    for _ in range(MAX_DEPTH):
        lists = [item for item in level if isinstance(item, list)]
        for item in lists:
            _check_length(len(item), pointer)
        count += len(lists) + sum(item.count("[") for item in level if isinstance(item, str))
        level = [inner for item in lists for inner in item]
        if not level:
            return count
    raise TooDeep.at(pointer, f"at most {MAX_DEPTH} levels", "more")


# The second look. Nothing below runs for a body that simdjson reads.


def explain(body: bytes, reason: str) -> ServiceError:
    """The error for a body that simdjson refused with `reason`: what is wrong, and where."""
    if "DEPTH_ERROR" in reason:
        return TooDeep.at("", f"at most {MAX_DEPTH} levels", "more")
    if not body.strip():
        return InvalidJSON.at("", "an object", "an empty body")
    try:
        text = body.decode("utf-8")
        document = json.loads(
            text,
            parse_constant=lambda token: _Strange(InvalidJSON, "a finite number", token),
            parse_float=_float,
            parse_int=_int,
            object_pairs_hook=_Pairs,
        )
        strange = list(islice(_find(document, ""), MAX_FAULTS))
    except UnicodeDecodeError as error:
        return InvalidJSON.at("", "UTF-8", f"byte 0x{body[error.start]:02x} at offset {error.start}")
    except json.JSONDecodeError as error:
        return InvalidJSON.at("", "JSON", f"{error.msg} at line {error.lineno} column {error.colno}")
    except RecursionError:
        return TooDeep.at("", f"at most {MAX_DEPTH} levels", "more")
    if not strange:
        return InvalidJSON.at("", "JSON as RFC 8259 defines it", quote(reason.partition(":")[0]))
    kind = strange[0][1].kind
    return kind(*(Fault(place, item.expected, item.got) for place, item in strange if item.kind is kind))


@dataclass(frozen=True, slots=True)
class _Strange:
    """Stands in the second reading for a value that has no place in a request."""

    kind: type[ServiceError]
    expected: str
    got: str


class _Pairs(list[tuple[str, Any]]):
    """The keys and values of an object, duplicates kept."""


def _float(token: str) -> float | _Strange:
    value = float(token)
    return value if math.isfinite(value) else _Strange(Overflow, "a number that float64 can hold", quote(token))


def _int(token: str) -> int | _Strange:
    fits = len(token) <= 20 and -(2**63) <= int(token) < 2**64
    return int(token) if fits else _Strange(Overflow, "an integer of at most 64 bits", quote(token))


def _find(document: Any, place: str) -> Iterator[tuple[str, _Strange]]:
    """Everything strange in a document, with its pointer."""
    if isinstance(document, _Strange):
        yield place, document
    elif isinstance(document, _Pairs):
        seen: set[str] = set()
        for key, value in document:
            if key in seen:
                yield child(place, key), _Strange(DuplicateKey, "each key once", "the same key again")
            seen.add(key)
            yield from _find(value, child(place, key))
    elif isinstance(document, list):
        for i, value in enumerate(document):
            if isinstance(value, list | _Strange):
                yield from _find(value, child(place, i))
