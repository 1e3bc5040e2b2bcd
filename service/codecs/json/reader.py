"""Numbers go from the bytes into arrays without becoming Python objects on the way.

simdjson reads the document and gives every array of numbers as one flat buffer. The buffer forgets nesting, so the
shape is taken from the document. What simdjson refuses is read a second time, slowly, only to say what is wrong and
where.
"""

from __future__ import annotations

import math
import re
import threading
from contextlib import suppress
from functools import cached_property
from typing import Any, Final

import numpy as np
import simdjson

from service.codecs import typed_arrays as encoded
from service.codecs.decoded import Body, Decoded
from service.codecs.json import limits
from service.codecs.json.faults import explain
from service.codecs.json.limits import (
    MAX_DEPTH,
    MAX_KEYS,
    MAX_LENGTH,
    MAX_OBJECTS,
    MAX_PLAIN,
    count,
    holds,
    list_count,
    too_many,
    too_plain,
)
from service.errors import (
    DuplicateKey,
    InvalidArray,
    InvalidJSON,
    InvalidValue,
    ServiceError,
    TooDeep,
    TooLarge,
    child,
    describe,
    quote,
)

# The same where others need not wait for the second time.
QUICK: Final = 2**21
# Of a list of texts.
FEW: Final = 64
# Bytes of memory of a parser that is kept for the next body; and what a parser takes, at most for each byte of a body,
# and for each number beside the body.
SPARE: Final = 2**23
PER_BYTE: Final = 13
PER_VALUE: Final = 24
# The parser of each thread that nobody uses; not of those who failed, whose errors may still hold the document.
_spare = threading.local()
Array: Final = simdjson.Array
PLAIN: Final = frozenset((str, int, float, bool, type(None)))
# What makes a NUL character, with which simdjson does not find a key; looking for one byte takes no time.
ESCAPE: Final = b"\\"
BYTE_ORDER_MARK: Final = re.compile(rb"\xef\xbb\xbf|\xff\xfe|\xfe\xff")


def decode(body: Body, limit: int | None = None) -> Decoded:
    """The object that the body is, with each rectangular array of numbers or booleans as an ndarray.

    So it is within objects, and within objects in an array, as the Open Inference Protocol has its tensors. Integers
    give int64, other numbers float64, and typed arrays {dtype, shape, data} what they say. An array that is
    ragged, empty or mixed stays a list, for whoever knows the field to say what is wrong with it. `limit` is for
    others: nothing is compressed here.

    Errors: InvalidJSON, DuplicateKey, TooDeep, InvalidValue (too many keys), InvalidArray (too long a row), Overflow (a
    number beyond 64 bits), TooLarge (too much that can become no array).
    """
    if len(body) <= limits.SMALL and (decoded := decode_quickly(body)) is not None:
        return decoded
    if BYTE_ORDER_MARK.match(body):
        raise InvalidJSON.at("", "UTF-8 without a byte-order mark", "a byte-order mark")
    parser, reason = _take_parser(), ""
    try:
        document = parser.parse(body)
    except (ValueError, RuntimeError) as error:
        reason = str(error)
    if reason:
        del parser  # which takes many times the memory of the body, as the second reading may
        raise explain(body, reason)
    if not isinstance(document, simdjson.Object):
        kind = "an array" if isinstance(document, simdjson.Array) else describe(document)
        raise InvalidJSON.at("", "an object", kind)
    decoded = _read(document, body)
    del document  # of which nothing is left, or the parser could not be used again
    if len(body) <= SPARE // PER_BYTE:
        _spare.parser = parser
    return decoded


def decode_quickly(body: Body) -> Decoded | None:
    """The same within a few milliseconds, where that can be: a body of moderate length, with rectangles of numbers,
    short lists of texts, and nothing strange. None for any other.

    The parser holds the interpreter, so that in a thread it would keep others waiting just as long.
    """
    if len(body) > QUICK or holds(body, ESCAPE) or BYTE_ORDER_MARK.match(body):
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
    values = SPARE if simple is None else sum(x.size for x in simple.fields.values() if isinstance(x, np.ndarray))
    if len(body) <= SPARE // PER_BYTE or len(body) + PER_VALUE * values <= SPARE:
        _spare.parser = parser
    return simple


def _take_parser() -> simdjson.Parser:
    """This thread's spare one, or a new one; whoever is done with its document may put it back."""
    parser, _spare.parser = getattr(_spare, "parser", None), None
    return parser or simdjson.Parser()


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
            brackets += 1 if isinstance(found, list) else list_count(found.shape)
        elif kind in PLAIN:
            fields[key] = value
        else:
            return None
    if brackets != count(body, b"[") or len(fields) != len(document):  # a key twice
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


def _read(document: simdjson.Object, body: Body) -> Decoded:
    """The fields of any document.

    An array hidden among numbers, as in `[1, [2]]`, leaves no trace in the flat buffer. It does in the number of
    opening brackets: the shapes and strings found must account for all of them. If they do not, or could not be told,
    those of each array by itself are counted.
    """
    disguised = holds(body, ESCAPE)  # a bracket may be written as \u005b, and stand for one that is hidden
    reader = _Reader(body, careful=disguised)
    fields = reader.object(document, "", 1)
    if not disguised and reader.brackets != count(body, b"["):
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
        self._objects = 0

    def object(self, found: simdjson.Object, pointer: str, depth: int) -> dict[str, Any]:
        self._objects += 1
        if self._objects > MAX_OBJECTS:
            raise TooLarge.at(pointer, f"at most {MAX_OBJECTS} objects", "more")
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
        rectangular = isinstance(first, bool | int | float) and _rectangular(found, sizes)
        if rectangular and (not self._careful or count(_text(found), b"[") == list_count(sizes)):
            array = _booleans(found, sizes) if isinstance(first, bool) else _numbers(found, sizes, first)
        if array is None:
            plain = self._plain(found, pointer, key)
            self.brackets += _count_brackets(plain, child(pointer, key))
            return plain
        self.brackets += list_count(sizes)
        return array

    @cached_property
    def _too_many(self) -> bool:
        """Once for a body, as it is looked at from end to end, and may hold very many lists."""
        return too_many(self._body)

    @cached_property
    def _too_plain(self) -> bool:
        return too_plain(self._body)

    def _plain(self, found: simdjson.Array, pointer: str, key: str) -> list[Any]:
        if len(found) <= FEW and all(type(item) in PLAIN for item in found):
            few: list[Any] = found.as_list()  # as in include, beside any number of others
            return few
        if self._too_many:
            hint = f"the place is looked for in bodies of at most {limits.MAX_SEARCHED} values"
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
