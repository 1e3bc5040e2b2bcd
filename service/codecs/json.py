"""JSON (RFC 8259). Numbers go from the bytes into arrays without becoming Python objects on the way.

simdjson reads the document and gives every array of numbers as one flat buffer. The buffer forgets nesting, so the
shape is taken from the document. What simdjson refuses is read a second time, slowly, only to say what is wrong and
where.
"""

from __future__ import annotations

import json
import math
import re
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any, Final

import numpy as np
import orjson
import simdjson

from service.codecs import encoded
from service.codecs.decoded import Body, Decoded, Part
from service.errors import (
    DuplicateKey,
    Fault,
    InvalidArray,
    InvalidJSON,
    InvalidValue,
    Overflow,
    ServiceError,
    TooDeep,
    TooLarge,
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
# Arrays and objects of one body that may become Python objects: each takes some hundred bytes, but two on the wire.
MAX_PLAIN: Final = 2**19
# Values of one body that are looked at one by one to say which is wrong: a second of work at most.
MAX_SEARCHED: Final = 2**22
# Faults of one body that are reported together.
MAX_FAULTS: Final = 10
# Bytes of a body that is read with fewer questions asked, and once more where some must be asked.
SMALL: Final = 2**14
# The same where others need not wait for the second time.
QUICK: Final = 2**21
# Of a list of texts.
FEW: Final = 64
# Bytes of a body after which a parser, which keeps some times as much, is worth keeping for the next one.
SPARE: Final = 2**22
# The parser of each thread that nobody uses; not of those who failed, whose errors may still hold the document.
_spare = threading.local()
Array: Final = simdjson.Array
PLAIN: Final = frozenset((str, int, float, bool, type(None)))
# Bytes that are sent at once.
PIECE: Final = 2**16
# Numbers that are written at once.
AT_ONCE: Final = 2**14
# What makes a NUL character, with which simdjson does not find a key; looking for one byte takes no time.
ESCAPE: Final = b"\\"
BYTE_ORDER_MARK: Final = re.compile(rb"\xef\xbb\xbf|\xff\xfe|\xfe\xff")
BLANK: Final = re.compile(rb"\s*+\Z")


def decode(body: Body, limit: int | None = None) -> Decoded:
    """The object that the body is, with each rectangular array of numbers or booleans as an ndarray.

    So it is within objects, and within objects in an array, as the Open Inference Protocol has its tensors. Integers
    give int64, other numbers float64, and typed arrays {dtype, shape, data} what they say. An array that is
    ragged, empty or mixed stays a list, for whoever knows the field to say what is wrong with it. `limit` is for
    others: nothing is compressed here.

    Errors: InvalidJSON, DuplicateKey, TooDeep, InvalidValue (too many keys), InvalidArray (too long a row), Overflow (a
    number beyond 64 bits), TooLarge (too much that can become no array).
    """
    if len(body) <= SMALL and (decoded := decode_quickly(body)) is not None:
        return decoded
    if BYTE_ORDER_MARK.match(body):
        raise InvalidJSON.at("", "UTF-8 without a byte-order mark", "a byte-order mark")
    parser = _take_parser()
    try:
        document = parser.parse(body)
    except (ValueError, RuntimeError) as error:
        raise explain(body, str(error)) from None
    if not isinstance(document, simdjson.Object):
        kind = "an array" if isinstance(document, simdjson.Array) else describe(document)
        raise InvalidJSON.at("", "an object", kind)
    decoded = _read(document, body)
    del document  # of which nothing is left, or the parser could not be used again
    if len(body) <= SPARE:
        _spare.parser = parser
    return decoded


def decode_quickly(body: Body) -> Decoded | None:
    """The same within a few milliseconds, where that can be: a body of moderate length, with rectangles of numbers,
    short lists of texts, and nothing strange. None for any other.

    The parser holds the interpreter, so that in a thread it would keep others waiting just as long.
    """
    if len(body) > QUICK or _holds(body, ESCAPE) or BYTE_ORDER_MARK.match(body):
        return None
    parser = _take_parser()
    try:
        document = parser.parse(body)
    except (ValueError, RuntimeError):
        return None
    simple = None
    if isinstance(document, simdjson.Object) and len(document) <= MAX_KEYS:
        simple = _read_simple(document, body)
    del document
    _spare.parser = parser
    return simple


def _take_parser() -> simdjson.Parser:
    """This thread's spare one, or a new one; whoever is done with its document may put it back."""
    parser, _spare.parser = getattr(_spare, "parser", None), None
    return parser or simdjson.Parser()


def too_plain(body: Body) -> bool:
    """Whether a text would take far more memory than its length, were it all made Python objects."""
    return len(body) > MAX_PLAIN and _count(body, b"[") + _count(body, b"{") > MAX_PLAIN


def too_many(body: Body) -> bool:
    """Whether a text holds more values than are looked at one by one."""
    return len(body) > MAX_SEARCHED and _count(body, b",") >= MAX_SEARCHED


def _holds(body: Body, character: bytes) -> bool:
    if isinstance(body, memoryview):  # which looks for numbers
        return bool((np.frombuffer(body, np.uint8) == ord(character)).any())
    return character in body


def _count(body: Body, character: bytes) -> int:
    if len(body) <= SMALL and not isinstance(body, memoryview):
        return body.count(character)
    # Bytes look at one after the other: this takes a fourth of the time.
    return int(np.count_nonzero(np.frombuffer(body, np.uint8) == ord(character)))


def encode(answer: Mapping[str, Any], *, base64: bool = False) -> Iterable[Part]:
    """The answer as JSON, arrays straight from their memory: as nested lists, null for what is not finite, or typed.

    A large one is written piece by piece, each in well below a millisecond, so that the first are on their way, and
    others get their turn, while the next is written.
    """
    if base64:
        answer = {name: _typed(value) for name, value in answer.items()}
    for value in answer.values():
        if isinstance(value, np.ndarray) and value.size > AT_ONCE:
            return _large(answer)
    return [orjson.dumps(answer, _contiguous, orjson.OPT_SERIALIZE_NUMPY)]


def _large(answer: Mapping[str, Any]) -> Iterator[bytes]:
    """Pieces of some ten thousand numbers each."""
    return gathered(_members(answer))


def _members(answer: Mapping[str, Any]) -> Iterator[Part]:
    for place, (name, value) in enumerate(answer.items()):
        yield (b"," if place else b"{") + orjson.dumps(name) + b":"
        yield from pieces(value)
    yield b"}"


def gathered(parts: Iterable[Part]) -> Iterator[bytes]:
    """The same bytes in parts that are worth sending."""
    waiting: list[Part] = []
    length = 0
    for part in parts:
        waiting.append(part)
        length += len(part)
        if length >= PIECE:
            yield b"".join(waiting)
            waiting.clear()
            length = 0
    yield b"".join(waiting)


def pieces(value: Any) -> Iterator[Part]:
    """A value as JSON, an array a few rows at a time."""
    if not isinstance(value, np.ndarray) or value.size <= AT_ONCE:
        yield orjson.dumps(value, _contiguous, orjson.OPT_SERIALIZE_NUMPY)
        return
    row = value[0].size
    before = b"["
    if row > AT_ONCE:
        for item in value:
            yield before
            yield from pieces(item)
            before = b","
    else:
        step = AT_ONCE // row
        for start in range(0, len(value), step):
            yield before
            rows = orjson.dumps(value[start : start + step], _contiguous, orjson.OPT_SERIALIZE_NUMPY)
            yield memoryview(rows)[1:-1]  # without its own brackets
            before = b","
    yield b"]"


def _typed(value: Any) -> Any:
    """A value of the answer, arrays in it and in its objects as typed ones."""
    if isinstance(value, Mapping):
        return {name: _typed(item) for name, item in value.items()}
    return encoded.encode(value) if isinstance(value, np.ndarray) else value


def _contiguous(value: Any) -> Any:
    """What orjson can write of what it cannot: it knows neither strides nor bfloat16."""
    if not isinstance(value, np.ndarray):
        raise TypeError(type(value).__name__)
    return np.ascontiguousarray(value if value.dtype.kind != "V" else value.astype(np.float32))  # V: bfloat16


def _read_simple(document: Any, body: Body) -> Decoded | None:
    """The same for a document of plain values, short lists of texts and rectangles of numbers; None for others.

    It is held to the number of opening brackets, as in `_read`.
    """
    fields: dict[str, Any] = {}
    listed = []
    brackets = 0
    for key in document.keys():  # noqa: SIM118  (it is no dict)
        value = document[key]
        kind = type(value)
        if kind is Array:
            found = _simple(value)
            if found is None:
                return None
            fields[key] = found
            listed.append(key)
            brackets += 1 if isinstance(found, list) else _brackets(found.shape)
        elif kind in PLAIN:
            fields[key] = value
        else:
            return None
    if brackets != _count(body, b"[") or len(fields) != len(document):  # a key twice
        return None
    return Decoded(fields, frozenset(listed))


def _simple(found: Any) -> np.ndarray | list[Any] | None:
    """A rectangle of numbers or a short list of texts, unless the brackets around it tell otherwise; else None."""
    shape: tuple[int, ...] = (len(found),)
    try:
        first = found[0]
        if type(first) is str:
            texts: list[Any] | None = found.as_list() if len(found) <= FEW else None
            return texts
        if type(first) is Array:
            columns = len(first)
            shape += (columns,)
            first = first[0]
            if type(first) is Array:
                return _deeper(found)
            for row in found:
                if len(row) != columns:
                    return None
        if type(first) is float:
            return np.frombuffer(found.as_buffer(of_type="d")).reshape(shape)
        return _flat(found, first).reshape(shape) if type(first) is int else None
    except (IndexError, TypeError, ValueError):  # empty; numbers beside arrays; something else among them
        return None


def _deeper(found: Any) -> np.ndarray | None:
    """The same for numbers on three axes or more."""
    try:
        sizes, first = _probe(found, "", "")
    except ServiceError:
        return None
    if isinstance(first, bool) or not isinstance(first, int | float) or not _rectangular(found, sizes):
        return None
    return _numbers(found, sizes, first)


def _brackets(shape: tuple[int, ...]) -> int:
    """How many opening ones an array of this shape has."""
    total = count = 1
    for length in shape[:-1]:
        count *= length
        total += count
    return total


def _read(document: simdjson.Object, body: Body) -> Decoded:
    """The fields of any document.

    An array hidden among numbers, as in `[1, [2]]`, leaves no trace in the flat buffer. It does in the number of
    opening brackets: the shapes and strings found must account for all of them. If they do not, or could not be told,
    those of each array by itself are counted.
    """
    disguised = _holds(body, ESCAPE)  # a bracket may be written as \u005b, and stand for one that is hidden
    reader = _Reader(body, careful=disguised)
    fields = reader.object(document, "", 1)
    if not disguised and reader.brackets != _count(body, b"["):
        del fields  # before all of it is made once more
        reader = _Reader(body, careful=True)
        fields = reader.object(document, "", 1)
    return Decoded(fields, frozenset(reader.listed))


class _Reader:
    """Turns simdjson's view of one document into values.

    body: of a large one, lists that are no arrays are refused
    careful: whether to look for arrays among the numbers of others, where the flat buffer does not show them
    brackets: how many opening ones the values that were read account for
    listed: top-level fields whose arrays came as lists
    """

    def __init__(self, body: Body, *, careful: bool = False) -> None:
        self._body = body
        self._careful = careful
        self.brackets = 0
        self.listed: list[str] = []

    def object(self, found: simdjson.Object, pointer: str, depth: int) -> dict[str, Any]:
        if len(found) > MAX_KEYS:
            raise InvalidValue.at(pointer, f"at most {MAX_KEYS} keys", str(len(found)))
        keys = list(found.keys())
        if depth > MAX_DEPTH:
            raise TooDeep.at(pointer, f"at most {MAX_DEPTH} levels", "more")
        fields: dict[str, Any] = {}
        for key in keys:
            if key in fields:
                raise DuplicateKey.at(child(pointer, key), "each key once", "the same key again")
            try:
                value = found[key]
            except KeyError:  # simdjson does not find a key that holds a NUL character
                raise InvalidJSON.at(child(pointer, key), "keys without NUL characters", quote(key)) from None
            if "[" in key:
                self.brackets += key.count("[")
            if depth == 1 and type(value) is simdjson.Array:
                self.listed.append(key)
            fields[key] = self._value(value, pointer, key, depth)
        return fields

    def _value(self, value: Any, pointer: str, key: str, depth: int) -> Any:
        kind = type(value)
        if kind is simdjson.Array:
            return self._array(value, pointer, key, depth)
        if kind is str:
            self.brackets += value.count("[")
        elif kind is simdjson.Object:
            place = child(pointer, key)
            fields = self.object(value, place, depth + 1)
            return encoded.decode(fields, place) if encoded.is_one(fields) else fields
        return value

    def _array(self, found: simdjson.Array, pointer: str, key: str, depth: int) -> np.ndarray | list[Any]:
        sizes, first = _probe(found, pointer, key)
        if type(first) is simdjson.Object and len(sizes) == 1 and sizes[0] <= MAX_KEYS:
            items = [item for item in found if isinstance(item, simdjson.Object)]
            if len(items) == sizes[0]:
                self.brackets += 1
                place = child(pointer, key)
                return [self.object(item, child(place, i), depth + 1) for i, item in enumerate(items)]
        array = None
        if isinstance(first, bool | int | float) and _rectangular(found, sizes):
            array = _booleans(found, sizes) if isinstance(first, bool) else _numbers(found, sizes, first)
            if self._careful and array is not None and _count(_text(found), b"[") != _brackets(sizes):
                array = None
        if array is None:
            plain = self._plain(found, pointer, key)
            self.brackets += _count_brackets(plain, child(pointer, key))
            return plain
        self.brackets += _brackets(sizes)
        return array

    @cached_property
    def _too_many(self) -> bool:
        """Once for a body, as it is looked at from end to end, and may hold very many lists."""
        return too_many(self._body)

    @cached_property
    def _too_plain(self) -> bool:
        return too_plain(self._body)

    def _plain(self, found: simdjson.Array, pointer: str, key: str) -> list[Any]:
        if self._too_many:
            hint = f"the place is looked for in bodies of at most {MAX_SEARCHED} values"
            raise InvalidArray.at(child(pointer, key), "a rectangle of numbers or booleans", "another array", hint)
        if self._too_plain:
            expected = f"at most {MAX_PLAIN} arrays and objects around anything but a rectangle of numbers or booleans"
            raise TooLarge.at(child(pointer, key), expected, "more", "typed arrays have no such limit")
        plain: list[Any] = found.as_list()
        return plain


def _probe(found: simdjson.Array, pointer: str, key: str) -> tuple[tuple[int, ...], Any]:
    """The lengths met on the way down the first elements, and the first value that is no array."""
    sizes: tuple[int, ...] = ()
    value: Any = found
    while type(value) is simdjson.Array:
        length = len(value)
        if length > MAX_LENGTH:
            raise _too_long(child(pointer, key))
        sizes += (length,)
        if len(sizes) > MAX_DEPTH:
            raise TooDeep.at(child(pointer, key), f"at most {MAX_DEPTH} levels", "more")
        value = value[0] if length else None
    return sizes, value


def _too_long(pointer: str) -> InvalidArray:
    return InvalidArray.at(pointer, f"at most {MAX_LENGTH} elements in one row of JSON", "more")


def _rectangular(found: Any, sizes: tuple[int, ...]) -> bool:
    """Whether every array above the innermost ones holds as many elements as the first of its level.

    These may still be strings or objects, of which no buffer can be made.
    """
    if len(sizes) == 1:
        return True
    try:
        if set(map(len, found)) != {sizes[1]}:
            return False
    except TypeError:  # a number has no length
        return False
    return len(sizes) == 2 or all(_rectangular(row, sizes[1:]) for row in found)


def _numbers(found: simdjson.Array, sizes: tuple[int, ...], first: float) -> np.ndarray | None:
    """The array's own copy of its numbers; None where something else is among them."""
    try:
        flat = _flat(found, first)
    except (TypeError, ValueError):
        return None
    return flat.reshape(sizes) if flat.size == math.prod(sizes) else None


def _flat(found: simdjson.Array, first: float) -> np.ndarray:
    """All numbers in a row: int64, or float64 where one is no integer of this size. Errors: TypeError, ValueError."""
    if isinstance(first, int):
        with suppress(TypeError, ValueError):
            return np.frombuffer(found.as_buffer(of_type="i"), np.int64)
    return np.frombuffer(found.as_buffer(of_type="d"), np.float64)


def _text(found: simdjson.Array) -> bytes:
    text: bytes = found.mini  # type: ignore[assignment]  # its stub says str
    return text


def _booleans(found: simdjson.Array, sizes: tuple[int, ...]) -> np.ndarray | None:
    """The array's booleans; None where something else is among them.

    Read from its text: there is no buffer of them, and of a list with a long string NumPy would make very many.
    """
    text = _text(found)
    if text.translate(None, b"[],truefals"):
        return None
    letters = np.frombuffer(text, np.uint8)
    flat = letters[(letters == ord("t")) | (letters == ord("f"))] == ord("t")  # there is one in each
    return flat.reshape(sizes) if flat.size == math.prod(sizes) else None


def _count_brackets(plain: list[Any], pointer: str) -> int:
    """Opening brackets of a list, those in its strings included. Errors: TooDeep."""
    count = 0
    level = [plain]
    for _ in range(MAX_DEPTH):
        if any(len(items) > MAX_LENGTH for items in level):
            raise _too_long(pointer)
        count += len(level) + sum(item.count("[") for items in level for item in items if isinstance(item, str))
        level = [item for items in level for item in items if isinstance(item, list)]
        if not level:
            return count
    raise TooDeep.at(pointer, f"at most {MAX_DEPTH} levels", "more")


# The second look. Nothing below runs for a body that simdjson reads.


def explain(body: Body, reason: str) -> ServiceError:
    """The error for a body that simdjson refused with `reason`: what is wrong, and where."""
    if "DEPTH_ERROR" in reason:
        return TooDeep.at("", f"at most {MAX_DEPTH} levels", "more")
    if BLANK.match(body):
        return InvalidJSON.at("", "an object", "an empty body")
    if too_plain(body) or too_many(body):
        return _somewhere(reason, f"the place is looked for in bodies of at most {MAX_SEARCHED} values")
    tokens = _Tokens()
    try:
        text = str(body, "utf-8")
        document = json.loads(
            text,
            parse_constant=tokens.constant,
            parse_float=tokens.float,
            parse_int=tokens.int,
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
        return _somewhere(reason)
    kind = strange[0][1].kind
    return kind(*(Fault(place, item.expected, item.got) for place, item in strange if item.kind is kind))


def _somewhere(reason: str, hint: str = "") -> InvalidJSON:
    return InvalidJSON.at("", "JSON as RFC 8259 defines it", quote(reason.partition(":")[0]), hint)


@dataclass(frozen=True, slots=True)
class _Strange:
    """Stands in the second reading for a value that has no place in a request."""

    kind: type[ServiceError]
    expected: str
    got: str


class _Pairs(list[tuple[str, Any]]):
    """The keys and values of an object, duplicates kept."""


class _Tokens:
    """Makes nothing of numbers, and marks of the first that are strange: nobody gets to see more of them."""

    def __init__(self) -> None:
        self._left = MAX_FAULTS

    def constant(self, token: str) -> _Strange | None:
        return self._strange(InvalidJSON, "a finite number", token)

    def float(self, token: str) -> _Strange | None:
        fits = math.isfinite(float(token))
        return None if fits else self._strange(Overflow, "a number that float64 can hold", token)

    def int(self, token: str) -> _Strange | None:
        fits = len(token) < 19 or (len(token) <= 20 and -(2**63) <= int(token) < 2**64)
        return None if fits else self._strange(Overflow, "an integer of at most 64 bits", token)

    def _strange(self, kind: type[ServiceError], expected: str, token: str) -> _Strange | None:
        self._left -= 1
        return _Strange(kind, expected, quote(token) if kind is Overflow else token) if self._left >= 0 else None


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
