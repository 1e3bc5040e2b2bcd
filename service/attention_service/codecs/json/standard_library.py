"""What the reader uses of simdjson, by Python's own json module: for versions of Python that simdjson has no wheel for.

The C scanner of the json module makes lists and numbers of Python; `Object` and `Array` give them the methods of
simdjson's. It refuses what simdjson refuses, which the json module would accept: numbers that float64 or 64 bits cannot
hold, and halves of surrogate pairs. It takes some ten times as long.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from itertools import chain
from typing import Any, Final

import numpy as np

from attention_service.codecs.decoded import Body
from attention_service.codecs.json.limits import count
from attention_service.errors import TooLarge

# The beginning of a text up to the first escaped half of a surrogate pair, which stands alone. Every character is
# looked at once.
LONE_SURROGATE: Final = re.compile(
    r"(?:[^\\]++|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F]|\\u(?![dD][89a-fA-F])|\\[^u])*+\\u"
)
# Bytes of memory for a list and its element in another, for an object without keys, and for a key that is new.
LIST: Final = 121
OBJECT: Final = 161
KEY: Final = 250
# Bytes of memory that the lists, objects and keys of one body may take. A key takes 8 bytes of the body, a list two.
MAX_CONTAINER_BYTES: Final = 2**29


class Object:
    """A JSON object. Keys may stand twice; `[key]` is the value of the first."""

    __slots__ = ("_values", "pairs")

    def __init__(self, pairs: list[tuple[str, Any]]) -> None:
        self.pairs = pairs
        self._values: dict[str, Any] | None = None

    def __len__(self) -> int:
        return len(self.pairs)

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def keys(self) -> list[str]:
        """All keys, in the order of the text."""
        return [key for key, _ in self.pairs]

    def __getitem__(self, key: str) -> Any:
        if self._values is None:
            self._values = dict(reversed(self.pairs))
        return _wrapped(self._values[key])


class Array:
    """A JSON array."""

    __slots__ = ("_items",)

    def __init__(self, items: list[Any]) -> None:
        self._items = items

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Any]:
        return map(_wrapped, self._items)

    def __getitem__(self, index: int) -> Any:
        return _wrapped(self._items[index])

    def as_list(self) -> list[Any]:
        """A copy as lists and dicts, without recursion, as it may be deep."""
        copy = list(self._items)
        unread: list[list[Any] | dict[str, Any]] = [copy]
        while unread:
            parent: Any = unread.pop()
            for place, value in enumerate(parent) if type(parent) is list else list(parent.items()):
                if type(value) is list:
                    parent[place] = value = list(value)
                    unread.append(value)
                elif type(value) is Object:
                    parent[place] = value = dict(value.pairs)
                    unread.append(value)
        return copy

    def as_buffer(self, *, of_type: str) -> np.ndarray:
        """The numbers in an array, however nested: int64 ("i") or float64 ("d"). Errors: TypeError, ValueError."""
        rows = self._rows()
        if not set(map(type, chain.from_iterable(rows))) <= ({int} if of_type == "i" else {int, float}):
            raise TypeError("an element that is no such number")
        numbers = chain.from_iterable(rows)
        try:
            return np.fromiter(numbers, np.int64 if of_type == "i" else np.float64, sum(map(len, rows)))
        except OverflowError as error:
            raise ValueError("an integer that int64 cannot hold") from error

    @property
    def mini(self) -> bytes:
        """The text of an array of booleans, however nested, without spaces; `null` for any other."""
        try:
            is_boolean = set(map(type, chain.from_iterable(self._rows()))) == {bool}
        except TypeError:
            is_boolean = False
        return json.dumps(self._items if is_boolean else None, separators=(",", ":")).encode()

    def _rows(self) -> list[list[Any]]:
        """The innermost lists. Errors: TypeError (some lists are deeper than others)."""
        rows = [self._items]
        while rows[0] and type(rows[0][0]) is list:
            rows = list(chain.from_iterable(rows))
            if set(map(type, rows)) != {list}:
                raise TypeError("a value among lists")
        return rows


class Parser:
    """Reads bodies."""

    def parse(self, body: Body) -> Any:
        """The document in a body. Errors: ValueError, RuntimeError (too deep), TooLarge."""
        if container_bytes(body) > MAX_CONTAINER_BYTES:
            expected = "fewer arrays, objects and keys"
            raise TooLarge.at("", expected, "more", "arrays in base64, npz or safetensors have no such limit")
        text = str(body, "utf-8")
        try:
            document = DECODER.decode(text)
        except RecursionError as error:
            raise RuntimeError("DEPTH_ERROR: too many arrays or objects within one another") from error
        if "\\u" in text and LONE_SURROGATE.match(text):
            raise ValueError("STRING_ERROR: half a surrogate pair")
        return _wrapped(document)


def container_bytes(body: Body) -> int:
    """Upper bound of the memory that the lists, objects and keys of a body take as objects of Python, in bytes."""
    return LIST * count(body, b"[") + OBJECT * count(body, b"{") + KEY * count(body, b":")


def _wrapped(value: Any) -> Any:
    return Array(value) if type(value) is list else value


def _integer(token: str) -> int:
    number = int(token)
    if not -(2**63) <= number < 2**64:
        raise ValueError("BIGINT_ERROR: an integer beyond 64 bits")
    return number


def _float(token: str) -> float:
    number = float(token)
    if math.isinf(number):
        raise ValueError("NUMBER_ERROR: a number beyond float64")
    return number


def _constant(token: str) -> None:
    raise ValueError(f"NUMBER_ERROR: {token}")


DECODER: Final = json.JSONDecoder(
    object_pairs_hook=Object, parse_int=_integer, parse_float=_float, parse_constant=_constant
)
