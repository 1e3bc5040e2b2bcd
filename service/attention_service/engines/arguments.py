"""The arguments of a call: a row each says what it means, and functions read them with errors that name them."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import Any, NamedTuple

import numpy as np

from attention_service.attention.arrays import FLOATS, per_head
from attention_service.codecs.decoded import text_of
from attention_service.engines.call import Fields
from attention_service.engines.tokens import NUMBERS, Tokens, descaled
from attention_service.errors import (
    FieldConflict,
    InvalidArray,
    InvalidValue,
    MissingField,
    ShapeMismatch,
    UnknownField,
    child,
    quote,
)
from attention_service.schemas.names import near


class Row(NamedTuple):
    """What an argument means. versions: that have it, "" for all; neutral: values that are accepted, None for any"""

    text: str
    versions: str = ""
    neutral: tuple[Any, ...] | None = None


class Function(NamedTuple):
    """A function of a library. name: its short one; rows: of its arguments; versions: the library's, "" for one only"""

    name: str
    rows: dict[str, Row]

    @property
    def versions(self) -> str:
        """All versions that its rows name."""
        return "".join(sorted(set("".join(row.versions for row in self.rows.values()))))


def read_functions(text: str) -> dict[str, Function]:
    """The functions of arguments.txt, by their full names.

    The meaning `refused unless VALUE: REASON` refuses all other values, `refused: REASON` any value.
    """
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    heads = [line.split(" = ") for line in lines if " | " not in line]
    found = {name: Function(short, {}) for name, short in heads}
    by_short = {function.name: function for function in found.values()}
    for names, users, meaning in (line.split(" | ") for line in lines if " | " in line):
        match = re.fullmatch(r"refused(?: unless (.*?))?: .*", meaning)
        neutral = None if match is None else tuple(json.loads(value) for value in match.groups() if value)
        for user in users.split():
            short, _, versions = user.partition(":")
            by_short[short].rows.update(dict.fromkeys(names.split(), Row(meaning, versions, neutral)))
    return found


class Arguments:
    """The arguments of one call; those that are None are absent.

    version: of the library, None if unknown; untyped: names of arrays that came as lists, beside those that are lists
    """

    def __init__(
        self, given: Mapping[str, Any], version: int | None = None, untyped: AbstractSet[str] = frozenset()
    ) -> None:
        self.given = {name: value for name, value in given.items() if value is not None}
        self.version = version
        self.untyped = untyped

    @classmethod
    def of(
        cls,
        name: str,
        function: Function,
        given: Mapping[str, Any],
        version: int | None,
        untyped: AbstractSet[str] = frozenset(),
    ) -> Arguments:
        """The arguments, whose names are those of the function. Errors: InvalidValue, UnknownField."""
        is_integer = isinstance(version, int | np.integer)
        if version is not None and not (is_integer and str(version) in list(function.versions)):
            versions = " or ".join(function.versions)
            raise InvalidValue.of("/version", f"{versions}, which have {name}" if versions else "none", version)
        known = {
            one: row
            for one, row in function.rows.items()
            if version is None or not row.versions or str(version) in row.versions
        }
        for argument, value in given.items():
            if argument not in known:
                raise UnknownField.at(
                    child("", argument), f"an argument of {name}", quote(argument), near(argument, known)
                )
            row = known[argument]
            if row.neutral is not None and value is not None and not any(_equal(value, one) for one in row.neutral):
                raise InvalidValue.of(f"/{argument}", f"no {argument}", value, row.text.rpartition(": ")[2])
        return cls(given, version, untyped)

    def agree(self, sizes: Mapping[str, int]) -> None:
        """Refuse numbers that are not what the shapes of arrays say. Errors: FieldConflict and those of `integer`."""
        for name, size in sizes.items():
            if (found := self.integer(name)) not in (None, size):
                raise FieldConflict.at(f"/{name}", f"{size}, as the arrays have it", str(found))

    def __contains__(self, name: str) -> bool:
        return name in self.given

    def is_untyped(self, name: str) -> bool:
        """True if an argument came as lists, within which arrays and lists of arrays are the same."""
        return name in self.untyped or not isinstance(self.given.get(name), np.ndarray)

    def array(self, name: str) -> np.ndarray:
        """An argument that is needed, as an array. Errors: MissingField, InvalidArray."""
        if name not in self.given:
            raise MissingField.at(f"/{name}", "an array", "none")
        found = self.given[name]
        if not isinstance(found, np.ndarray):
            try:
                found = np.array(found)
            except ValueError:
                raise InvalidArray.of(f"/{name}", "an array, not ragged", found) from None
        if found.dtype.kind not in "biu" and found.dtype not in NUMBERS:
            raise InvalidArray.of(f"/{name}", "an array of numbers", self.given[name])
        array: np.ndarray = found
        return array

    def maybe(self, name: str) -> np.ndarray | None:
        """An argument as an array, None if it is absent. Errors: InvalidArray."""
        return self.array(name) if name in self.given else None

    def named(self, name: str) -> tuple[str, np.ndarray]:
        """An argument that is needed with its name. Errors: MissingField, InvalidArray."""
        return name, self.array(name)

    def maybe_named(self, name: str) -> tuple[str, np.ndarray] | None:
        """The same, None if it is absent. Errors: InvalidArray."""
        return self.named(name) if name in self.given else None

    def number(self, name: str) -> float | None:
        """A finite number, None if it is absent. Errors: InvalidArray, ShapeMismatch, InvalidValue."""
        found = self.maybe(name)
        if found is None:
            return None
        if found.size != 1:
            raise ShapeMismatch.of(f"/{name}", "one number", found)
        value = float(found.reshape(()).astype(np.float64)) if found.dtype.kind != "b" else math.nan
        if not math.isfinite(value):
            raise InvalidValue.of(f"/{name}", "a finite number", self.given[name])
        return value

    def integer(self, name: str) -> int | None:
        """An integer, None if it is absent. Errors: InvalidValue and those of `number`."""
        value = self.number(name)
        if value is not None and (value != int(value) or abs(value) > 2**53):
            raise InvalidValue.of(f"/{name}", "an integer", value)
        return None if value is None else int(value)

    def flag(self, name: str, default: bool = False) -> bool:
        """A boolean. Errors: InvalidValue."""
        found = self.given.get(name, default)
        found = found.item() if isinstance(found, np.ndarray) and found.size == 1 else found
        if not isinstance(found, bool):
            raise InvalidValue.of(f"/{name}", "true or false", found)
        return found

    def choice(self, name: str, choices: tuple[str, ...]) -> str:
        """One of these texts, by default the first. Errors: InvalidValue."""
        found = self.given.get(name, choices[0])
        text = text_of(found)
        if text is None or text not in choices:
            raise InvalidValue.of(f"/{name}", " or ".join(choices), found)
        return text

    def sides(self, name: str) -> tuple[int | None, int | None]:
        """The two sides of a window, each an integer or None; None if it is absent. Errors: InvalidValue."""
        found = self.given.get(name, (None, None))
        found = found.tolist() if isinstance(found, np.ndarray) else found
        if not isinstance(found, list | tuple) or len(found) != 2:
            raise InvalidValue.of(f"/{name}", "two integers", self.given[name])
        for n, side in enumerate(found):
            if side is not None and (type(side) is not int or abs(side) >= 2**31):
                raise InvalidValue.of(f"/{name}/{n}", "an integer of 32 bits", side)
        left, right = found
        return left, right


def _equal(value: Any, neutral: Any) -> bool:
    """True for plain values that are equal; an array is equal to none, True to no number."""
    value = value.item() if isinstance(value, np.ndarray) and value.ndim == 0 else value
    is_plain = isinstance(value, str | int | float) and isinstance(neutral, str | int | float)
    return is_plain and isinstance(value, bool) == isinstance(neutral, bool) and bool(value == neutral)


def options(given: Arguments, query: Tokens, *, scale: str, softcap: str, sinks: str) -> tuple[Fields, dict[str, str]]:
    """The fields of a request for three arguments with these names, and the names by field, for errors.

    A cap of 0 or less is none. Errors: InvalidRequest of every kind.
    """
    fields: Fields = {}
    if (factor := given.number(scale)) is not None:
        fields["scale"] = factor
    if (cap := given.number(softcap)) is not None and cap > 0:
        fields["softcap"] = cap
    if (sink := given.maybe(sinks)) is not None:
        sink = sink[0] if sink.ndim == 2 and len(sink) == 1 else sink
        fields["sinks"] = per_head(sink, f"/{sinks}", query.heads, FLOATS["float64"])
    return fields, {"scale": scale, "softcap": softcap, "sinks": sinks}


def scaled(given: Arguments, name: str, tokens: Tokens) -> Tokens:
    """Tokens times one number. Errors: those of `number`."""
    factor = given.number(name)
    return tokens if factor is None else descaled(name, np.array(factor), tokens, tokens.heads)
