"""JSON bodies as fields. Numbers go from the bytes into arrays without becoming Python objects on the way.

simdjson reads the document, and copies the numbers of an array, however nested, into one flat buffer. The shape comes
from the lengths of its lists. A list that hides among numbers, as in [1, [2]], shows in neither, so opening brackets
are counted: if shapes and lists account for all of the body's, nothing is hidden. Else a string holds a bracket, or a
list is hidden, and the elements of each array are looked at one by one.

Where simdjson is not installed, `standard_library` stands in for it.
"""

from __future__ import annotations

import math
import re
from contextlib import suppress
from functools import cached_property
from typing import Any, Final

import numpy as np

from attention_service.codecs import typed_arrays
from attention_service.codecs.decoded import Body, Decoded, NotQuick
from attention_service.codecs.json import limits, long_numbers
from attention_service.codecs.json.faults import explain
from attention_service.codecs.json.limits import (
    MAX_DEPTH,
    MAX_KEYS,
    MAX_LENGTH,
    MAX_LISTS,
    MAX_OBJECTS,
    SMALL,
    count,
    has_too_many_lists,
    has_too_many_values,
    list_count,
)
from attention_service.codecs.json.parser import simdjson
from attention_service.errors import (
    DuplicateKey,
    InvalidArray,
    InvalidJSON,
    InvalidValue,
    TooDeep,
    TooLarge,
    child,
    describe,
    quote,
)

# Elements of a list that is read as it is, whatever else the body holds: names of outputs, a few labels.
FEW: Final = 64
NUMBERS: Final = (bool, int, float)
PLAIN: Final = frozenset((str, int, float, bool, type(None)))
BYTE_ORDER_MARK: Final = re.compile(rb"\xef\xbb\xbf|\xff\xfe|\xfe\xff")
# Turn the text of booleans into bytes: deleting AROUND_BITS leaves the f of each `false` and the t of each `true`,
# which BITS maps to 0 and 1.
BITS: Final = bytes.maketrans(b"ft", b"\0\1")
AROUND_BITS: Final = b"[],alserue"
# Keys and lists that are read within a few milliseconds.
QUICK: Final = 2**14
# The parser of the last body that was small or decoded quickly. A new one would have its memory cleared by the system:
# half of the time of a body of 2 MB.
_spare: Final[list[Any]] = []


def decode(body: Body, *, quickly: bool = False) -> Decoded:
    """The fields of the JSON object that a body holds, with each rectangle of numbers or booleans as an ndarray.

    So it is within objects, and within objects in a list, as the Open Inference Protocol has its tensors. Integers
    give int64, other numbers float64, and typed arrays {dtype, shape, data} what they say. A list that is ragged,
    empty or mixed stays a list; the schema of its field says what is wrong with it.

    quickly: raise NotQuick for a body with many keys, lists or exponents, and for one that has faults or must be read
    twice

    Errors: InvalidJSON, DuplicateKey, TooDeep, InvalidValue (too many keys), InvalidArray (too long a row), Overflow (a
    number beyond 64 bits), TooLarge (too many lists that are no rectangles).
    """
    if BYTE_ORDER_MARK.match(body):
        raise InvalidJSON.at("", "UTF-8 without a byte-order mark", "a byte-order mark")
    keeps_parser = quickly or len(body) <= SMALL
    parser, document = _parsed(body, quickly=quickly, spare=keeps_parser)
    if not isinstance(document, simdjson.Object):
        kind = "an array" if isinstance(document, simdjson.Array) else describe(document)
        raise InvalidJSON.at("", "an object", kind)
    reader = _Reader(body, quickly=quickly)
    fields = reader.object(document, "", 1)
    if reader.brackets != count(body, b"["):
        if quickly:
            raise NotQuick
        del fields  # before its arrays are made once more
        reader = _Reader(body, check_elements=True)
        fields = reader.object(document, "", 1)
    if keeps_parser and not _spare:
        del document  # while it is there, its parser parses nothing else
        _spare.append(parser)
    return Decoded(fields, frozenset(reader.untyped))


def _parsed(body: Body, *, quickly: bool, spare: bool) -> tuple[Any, Any]:
    """A parser and the document that it makes of a body. spare: with the last one. Errors: as of `decode`."""
    text = body
    if long_numbers.may_have_many(body):
        if quickly:
            raise NotQuick
        text = long_numbers.shortened(body)
    try:
        parser = _spare.pop() if spare else simdjson.Parser()
    except IndexError:
        parser = simdjson.Parser()
    try:
        return parser, parser.parse(text)
    except (ValueError, RuntimeError) as error:
        reason = str(error)
    del parser  # it takes many times the memory of the body
    if quickly:
        raise NotQuick
    raise explain(body, reason)


class _Reader:
    """Turns a document of simdjson into fields.

    check_elements: look for lists among the elements of each array; quickly: as in `decode`
    brackets: how many opening brackets the arrays and lists account for
    untyped: the top-level fields whose arrays came as lists, and the pointers of such arguments of a call
    """

    def __init__(self, body: Body, *, check_elements: bool = False, quickly: bool = False) -> None:
        self._body = body
        self._quickly = quickly
        self._left = QUICK if quickly else math.inf  # keys and lists
        self._check_elements = check_elements
        self._objects = 0
        self.brackets = 0
        self.untyped: list[str] = []

    def object(self, found: simdjson.Object, pointer: str, depth: int) -> dict[str, Any]:
        """The keys and values of an object. Errors: those of `decode`."""
        self._objects += 1
        if self._objects > MAX_OBJECTS:
            raise TooLarge.at(pointer, f"at most {MAX_OBJECTS} objects", "more")
        if len(found) > MAX_KEYS:
            raise InvalidValue.at(pointer, f"at most {MAX_KEYS} keys", str(len(found)))
        if depth > MAX_DEPTH:
            raise TooDeep.at(pointer, f"at most {MAX_DEPTH} levels", "more")
        self._spend(1 + len(found))
        fields: dict[str, Any] = {}
        for key in found.keys():  # noqa: SIM118  (it is no dict)
            if key in fields:
                raise DuplicateKey.at(child(pointer, key), "each key once", "the same key again")
            if "\0" in key:  # simdjson looks for the part before it
                raise InvalidJSON.at(child(pointer, key), "keys without NUL characters", quote(key))
            value: Any = found[key]
            kind = type(value)
            if kind is simdjson.Array:
                if depth == 1 or pointer == "/arguments":
                    self.untyped.append(key if depth == 1 else child(pointer, key))
                matrix = None if self._check_elements else self._matrix(value)
                fields[key] = self._array(value, child(pointer, key), depth) if matrix is None else matrix
            else:
                fields[key] = self._fields(value, child(pointer, key), depth) if kind is simdjson.Object else value
        return fields

    def _matrix(self, found: simdjson.Array) -> np.ndarray | None:
        """A matrix that begins with a float, as most arrays do; None for any other, and if rows differ in length."""
        rows = len(found)
        first: Any = found[0] if rows else None
        if rows > MAX_LENGTH or type(first) is not simdjson.Array:
            return None
        columns = len(first)
        if not 0 < columns <= MAX_LENGTH or type(first[0]) is not float:
            return None
        self._spend(rows + 1)
        try:
            matrix = np.frombuffer(found.as_buffer(of_type="d")).reshape(rows, columns)
            if set(map(len, found)) != {columns}:
                return None
        except (TypeError, ValueError):  # another value, rows of other lengths, or a hidden list
            return None
        self.brackets += rows + 1
        return matrix

    def _spend(self, items: int) -> None:
        """Count keys and lists that are about to be read. Errors: NotQuick."""
        self._left -= items
        if self._left < 0:
            raise NotQuick

    def _fields(self, found: simdjson.Object, pointer: str, depth: int) -> Any:
        """An object in an object: a typed array as ndarray, any other as its fields."""
        fields = self.object(found, pointer, depth + 1)
        return typed_arrays.decode(fields, pointer) if fields.keys() == typed_arrays.KEYS else fields

    def _array(self, found: simdjson.Array, pointer: str, depth: int) -> np.ndarray | list[Any]:
        """An array of JSON: an ndarray if it is a rectangle of numbers or booleans, else a list."""
        shape, first = _shape(found, pointer)
        lists = list_count(shape)
        self._spend(lists)
        if type(first) is simdjson.Object and len(shape) == 1 and shape[0] <= MAX_KEYS:
            items = [item for item in found if isinstance(item, simdjson.Object)]
            if len(items) == shape[0]:
                self.brackets += 1
                return [self.object(item, child(pointer, i), depth + 1) for i, item in enumerate(items)]
        array = None
        if isinstance(first, NUMBERS) and _fits(found, shape, check_elements=self._check_elements):
            array = _booleans(found, shape) if isinstance(first, bool) else _numbers(found, shape, first)
        del first  # a copy of a text, which may be as long as the body
        if array is None:
            return self._list(found, pointer)
        self.brackets += lists
        return array

    def _list(self, found: simdjson.Array, pointer: str) -> list[Any]:
        """An array of JSON as a Python list. Errors: InvalidArray, TooLarge, TooDeep."""
        items: list[Any]
        if len(found) <= FEW and PLAIN.issuperset(map(type, found)):
            self.brackets += 1
            items = found.as_list()
            return items
        if self._quickly:
            raise NotQuick
        too_many_values, too_many_lists = self._exceeded
        if too_many_values:
            hint = f"the place is looked for in bodies of at most {limits.MAX_SEARCHED} values"
            raise InvalidArray.at(pointer, "a rectangle of numbers or booleans", "another array", hint)
        if too_many_lists:
            expected = f"at most {MAX_LISTS} arrays and objects around anything but a rectangle of numbers or booleans"
            raise TooLarge.at(pointer, expected, "more", "typed arrays have no such limit")
        items = found.as_list()
        self.brackets += _count_lists(items, pointer)
        return items

    @cached_property
    def _exceeded(self) -> tuple[bool, bool]:
        """Which limits the body exceeds: counted once, as it may be long, and hold very many lists."""
        return has_too_many_values(self._body), has_too_many_lists(self._body)


def _shape(found: simdjson.Array, pointer: str) -> tuple[tuple[int, ...], Any]:
    """The lengths of an array, of its first element, and so on; and the first value that is no array.

    Errors: InvalidArray, TooDeep.
    """
    shape: tuple[int, ...] = ()
    value: Any = found
    while type(value) is simdjson.Array:
        length = len(value)
        if length > MAX_LENGTH:
            raise _too_long(pointer)
        shape += (length,)
        if len(shape) > MAX_DEPTH:
            raise TooDeep.at(pointer, f"at most {MAX_DEPTH} levels", "more")
        value = value[0] if length else None
    return shape, value


def _too_long(pointer: str) -> InvalidArray:
    return InvalidArray.at(pointer, f"at most {MAX_LENGTH} elements in one row of JSON", "more")


def _fits(found: Any, shape: tuple[int, ...], *, check_elements: bool) -> bool:
    """True if all rows of an array have the lengths that the shape says.

    The innermost rows may still hold strings or objects, which no buffer takes, and lists unless `check_elements`.
    """
    if len(shape) == 1:
        return not check_elements or simdjson.Array not in set(map(type, found))
    try:
        if set(map(len, found)) != {shape[1]}:
            return False
    except TypeError:  # a number has no length
        return False
    if len(shape) == 2 and not check_elements:
        return True
    return all(_fits(row, shape[1:], check_elements=check_elements) for row in found)


def _numbers(found: simdjson.Array, shape: tuple[int, ...], first: float) -> np.ndarray | None:
    """A copy of the numbers of an array: int64, or float64 if one is no such integer; None if there is no buffer."""
    if isinstance(first, int):
        with suppress(TypeError, ValueError):  # a number that is no such integer
            return np.frombuffer(found.as_buffer(of_type="i"), np.int64).reshape(shape)
    try:
        return np.frombuffer(found.as_buffer(of_type="d")).reshape(shape)
    except (TypeError, ValueError):  # another value, or a hidden list
        return None


def _booleans(found: simdjson.Array, shape: tuple[int, ...]) -> np.ndarray | None:
    """The booleans of an array, read from its text as simdjson has no buffer of them; None if it holds other values."""
    text: bytes = found.mini
    flat = np.frombuffer(text.translate(BITS, AROUND_BITS), np.uint8)
    if flat.max() > 1 or text.count(b"[") != list_count(shape):
        return None
    return flat.view(np.bool_).reshape(shape)


def _count_lists(items: list[Any], pointer: str) -> int:
    """The number of lists in a list, with itself. Errors: InvalidArray, TooDeep."""
    count = 0
    level = [items]
    for _ in range(MAX_DEPTH):
        if any(len(row) > MAX_LENGTH for row in level):
            raise _too_long(pointer)
        count += len(level)
        level = [item for row in level for item in row if isinstance(item, list)]
        if not level:
            return count
    raise TooDeep.at(pointer, f"at most {MAX_DEPTH} levels", "more")
