"""What is wrong with a body that simdjson refused, and where: Python's own parser reads it once more."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import count, islice
from typing import Any, Final

from attention_service.codecs.decoded import Body
from attention_service.codecs.json import limits
from attention_service.codecs.json.limits import MAX_DEPTH, has_too_many_lists, has_too_many_values
from attention_service.errors import (
    DuplicateKey,
    Fault,
    InvalidJSON,
    Overflow,
    ServiceError,
    TooDeep,
    child,
    error_classes,
    quote,
)

# Faults of one body that are reported together.
MAX_FAULTS: Final = 10
BLANK: Final = re.compile(rb"\s*+\Z")
HALF_PAIR: Final = re.compile("[\ud800-\udfff]")


def explain(body: Body, reason: str) -> ServiceError:
    """The error for a body that simdjson refused with `reason`, with a pointer to each fault."""
    if "DEPTH_ERROR" in reason:
        return TooDeep.at("", f"at most {MAX_DEPTH} levels", "more")
    if BLANK.match(body):
        return InvalidJSON.at("", "an object", "an empty body")
    if has_too_many_lists(body) or has_too_many_values(body):
        return _without_pointer(reason, f"the place is looked for in bodies of at most {limits.MAX_SEARCHED} values")
    try:
        found = list(islice(_faults(_document(str(body, "utf-8")), ""), MAX_FAULTS))
    except UnicodeDecodeError as error:
        return InvalidJSON.at("", "UTF-8", f"byte 0x{body[error.start]:02x} at offset {error.start}")
    except json.JSONDecodeError as error:
        return InvalidJSON.at("", "JSON", f"{error.msg} at line {error.lineno} column {error.colno}")
    except RecursionError:
        return TooDeep.at("", f"at most {MAX_DEPTH} levels", "more")
    if not found:
        return _without_pointer(reason)
    code = found[0].code
    return error_classes()[code](*(fault for fault in found if fault.code == code))


def _without_pointer(reason: str, hint: str = "") -> InvalidJSON:
    return InvalidJSON.at("", "JSON as RFC 8259 defines it", quote(reason.partition(":")[0]), hint)


class _Pairs(list[tuple[str, Any]]):
    """The keys and values of an object, duplicates kept."""


def _document(text: str) -> Any:
    """A JSON text with None in the place of numbers, and faults in the place of the first `MAX_FAULTS` wrong ones."""
    numbers = count(MAX_FAULTS, -1)

    def fault(kind: type[ServiceError], expected: str, got: str, hint: str = "") -> Fault | None:
        return Fault("", expected, got, hint, kind.code) if next(numbers) > 0 else None

    def parse_constant(token: str) -> Fault | None:
        hint = "in a bias, null is minus infinity" if token.startswith("-") else ""
        return fault(InvalidJSON, "a finite number", token, hint)

    def parse_float(token: str) -> Fault | None:
        fits = math.isfinite(float(token))
        return None if fits else fault(Overflow, "a number that float64 can hold", quote(token))

    def parse_int(token: str) -> Fault | None:
        fits = len(token) < 19 or (len(token) <= 20 and -(2**63) <= int(token) < 2**64)
        return None if fits else fault(Overflow, "an integer of at most 64 bits", quote(token))

    return json.loads(
        text, parse_constant=parse_constant, parse_float=parse_float, parse_int=parse_int, object_pairs_hook=_Pairs
    )


def _faults(value: Any, pointer: str) -> Iterator[Fault]:
    """The faults inside a value, and one for each key that stands twice, all with their pointers."""
    if isinstance(value, Fault):
        yield replace(value, pointer=pointer)
    elif isinstance(value, str) and HALF_PAIR.search(value):
        yield Fault(pointer, "Unicode text", "half a surrogate pair", code=InvalidJSON.code)
    elif isinstance(value, _Pairs):
        seen: set[str] = set()
        for key, item in value:
            if HALF_PAIR.search(key):  # which no pointer can name
                yield Fault(pointer, "keys of Unicode text", "half a surrogate pair", code=InvalidJSON.code)
                continue
            if key in seen:
                yield Fault(child(pointer, key), "each key once", "the same key again", code=DuplicateKey.code)
            seen.add(key)
            yield from _faults(item, child(pointer, key))
    elif isinstance(value, list):
        for i, item in enumerate(value):
            if item is not None:
                yield from _faults(item, child(pointer, i))
