"""What is wrong with a body that simdjson refused, and where: Python's own parser reads it once more."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from itertools import islice
from typing import Any, Final

from service.codecs.decoded import Body
from service.codecs.json import limits
from service.codecs.json.limits import MAX_DEPTH, has_too_many_lists, has_too_many_values
from service.errors import DuplicateKey, Fault, InvalidJSON, Overflow, ServiceError, TooDeep, child, quote

# Faults of one body that are reported together.
MAX_FAULTS: Final = 10
BLANK: Final = re.compile(rb"\s*+\Z")


def explain(body: Body, reason: str) -> ServiceError:
    """The error for a body that simdjson refused with `reason`, with a pointer to each fault."""
    if "DEPTH_ERROR" in reason:
        return TooDeep.at("", f"at most {MAX_DEPTH} levels", "more")
    if BLANK.match(body):
        return InvalidJSON.at("", "an object", "an empty body")
    if has_too_many_lists(body) or has_too_many_values(body):
        return _without_pointer(reason, f"the place is looked for in bodies of at most {limits.MAX_SEARCHED} values")
    hooks = _Hooks()
    try:
        document = json.loads(
            str(body, "utf-8"),
            parse_constant=hooks.constant,
            parse_float=hooks.float,
            parse_int=hooks.int,
            object_pairs_hook=_Pairs,
        )
        found = list(islice(_errors(document, ""), MAX_FAULTS))
    except UnicodeDecodeError as error:
        return InvalidJSON.at("", "UTF-8", f"byte 0x{body[error.start]:02x} at offset {error.start}")
    except json.JSONDecodeError as error:
        return InvalidJSON.at("", "JSON", f"{error.msg} at line {error.lineno} column {error.colno}")
    except RecursionError:
        return TooDeep.at("", f"at most {MAX_DEPTH} levels", "more")
    if not found:
        return _without_pointer(reason)
    kind = type(found[0])
    return kind(*(fault for error in found if type(error) is kind for fault in error.faults))


def _without_pointer(reason: str, hint: str = "") -> InvalidJSON:
    return InvalidJSON.at("", "JSON as RFC 8259 defines it", quote(reason.partition(":")[0]), hint)


class _Pairs(list[tuple[str, Any]]):
    """The keys and values of an object, duplicates kept."""


class _Hooks:
    """What Python's parser puts in the place of numbers: None, or an error for the first `MAX_FAULTS` wrong ones."""

    def __init__(self) -> None:
        self._left = MAX_FAULTS

    def constant(self, token: str) -> ServiceError | None:
        return self._error(InvalidJSON, "a finite number", token)

    def float(self, token: str) -> ServiceError | None:
        fits = math.isfinite(float(token))
        return None if fits else self._error(Overflow, "a number that float64 can hold", quote(token))

    def int(self, token: str) -> ServiceError | None:
        fits = len(token) < 19 or (len(token) <= 20 and -(2**63) <= int(token) < 2**64)
        return None if fits else self._error(Overflow, "an integer of at most 64 bits", quote(token))

    def _error(self, kind: type[ServiceError], expected: str, got: str) -> ServiceError | None:
        self._left -= 1
        return kind.at("", expected, got) if self._left >= 0 else None


def _errors(value: Any, pointer: str) -> Iterator[ServiceError]:
    """The errors inside a value, and one for each key that stands twice, all with their pointers."""
    if isinstance(value, ServiceError):
        (fault,) = value.faults
        yield type(value)(Fault(pointer, fault.expected, fault.got))
    elif isinstance(value, _Pairs):
        seen: set[str] = set()
        for key, item in value:
            if key in seen:
                yield DuplicateKey.at(child(pointer, key), "each key once", "the same key again")
            seen.add(key)
            yield from _errors(item, child(pointer, key))
    elif isinstance(value, list):
        for i, item in enumerate(value):
            if item is not None:
                yield from _errors(item, child(pointer, i))
