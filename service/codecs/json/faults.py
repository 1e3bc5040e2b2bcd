"""The second look at a body that simdjson refused: what is wrong, and where."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

from service.codecs.decoded import Body
from service.codecs.json import limits
from service.codecs.json.limits import MAX_DEPTH, too_many, too_plain
from service.errors import DuplicateKey, Fault, InvalidJSON, Overflow, ServiceError, TooDeep, child, quote

# Faults of one body that are reported together.
MAX_FAULTS: Final = 10
BLANK: Final = re.compile(rb"\s*+\Z")


def explain(body: Body, reason: str) -> ServiceError:
    """The error for a body that simdjson refused with `reason`: what is wrong, and where."""
    if "DEPTH_ERROR" in reason:
        return TooDeep.at("", f"at most {MAX_DEPTH} levels", "more")
    if BLANK.match(body):
        return InvalidJSON.at("", "an object", "an empty body")
    if too_plain(body) or too_many(body):
        return _somewhere(reason, f"the place is looked for in bodies of at most {limits.MAX_SEARCHED} values")
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
