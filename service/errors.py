"""Every error that a caller can cause, and how it reads on the wire.

ServiceError
├── BadRequest            400  the body cannot be parsed
│   ├── InvalidJSON       400
│   ├── DuplicateKey      400
│   ├── TooDeep           400
│   └── InvalidTensors    400
├── Unauthorized          401
├── NotFound              404
├── MethodNotAllowed      405
├── NotAcceptable         406
├── TooSlow               408
├── TooLarge              413
│   ├── BodyTooLarge      413
│   └── MemoryLimit       413
├── UnsupportedMediaType  415
│   └── UnsupportedEncoding 415
├── HeadTooLarge          431
├── InvalidRequest        422  the body parses and is wrong
│   ├── MissingField      422
│   ├── UnknownField      422
│   ├── FieldConflict     422
│   ├── InvalidValue      422
│   ├── InvalidArray      422
│   ├── ShapeMismatch     422
│   ├── Overflow          422
│   └── UnknownBackend    422
├── InternalError         500  never meant to be seen: a defect of the service
├── Busy                  503
└── TimeLimit             504

`status`, `code` and `title` stand on the class and are part of the API: clients may switch on `code`. What went
wrong in one request stands in `faults`, each with a JSON pointer, what was expected and what came.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, Self

import numpy as np

# Offending values are quoted, never echoed whole: an answer must not grow with the body that caused it.
QUOTE_LENGTH = 40


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that is wrong with a request.

    pointer:  JSON pointer (RFC 6901) to the place, "" for the body as a whole
    expected: what would have been right
    got:      what came, at most a few dozen characters
    hint:     what to do about it, if that is not plain from the two
    code:     the code of the error class, so that several faults of several kinds fit into one answer
    """

    pointer: str
    expected: str
    got: str
    hint: str = ""
    code: str = ""

    def sentence(self) -> str:
        """The fault in words."""
        place = f"{self.pointer}: " if self.pointer else ""
        text = f"{place}expected {self.expected}, got {self.got}"
        return f"{text} ({self.hint})" if self.hint else text


class ServiceError(Exception):
    """Base of all errors with a status; raised with the faults that explain it."""

    status: ClassVar[int] = 500
    code: ClassVar[str] = "internal_error"
    title: ClassVar[str] = "The service failed"

    def __init__(self, *faults: Fault, headers: dict[str, str] | None = None) -> None:
        self.faults = tuple(_coded(fault, self.code) for fault in faults)
        self.headers = headers or {}
        super().__init__("; ".join(fault.sentence() for fault in self.faults) or self.title)

    @classmethod
    def at(cls, pointer: str, expected: str, got: str, hint: str = "") -> Self:
        """The common case: one fault. `got` is text of the service; a caller's own goes through `of` or `quote`."""
        return cls(Fault(pointer, expected, got, hint, cls.code))

    @classmethod
    def of(cls, pointer: str, expected: str, value: object, hint: str = "") -> Self:
        """One fault, whose `got` is described from the value that came."""
        return cls.at(pointer, expected, describe(value), hint)


class BadRequest(ServiceError):
    """The body could not be parsed."""

    status, code, title = 400, "bad_request", "The body cannot be parsed"


class InvalidJSON(BadRequest):
    """The body is not JSON as RFC 8259 defines it (UTF-8, no byte-order mark, no NaN, no Infinity)."""

    code, title = "invalid_json", "The body is not valid JSON"


class DuplicateKey(BadRequest):
    """An object names the same key twice, so that it is unclear which value counts."""

    code, title = "duplicate_key", "A key is given twice"


class TooDeep(BadRequest):
    """Arrays or objects are nested deeper than any request needs."""

    code, title = "too_deep", "The body is nested too deeply"


class InvalidTensors(BadRequest):
    """The body is not the binary format that its media type says, or its headers and its data contradict each other."""

    code, title = "invalid_tensors", "The body is not valid in its binary format"


class Unauthorized(ServiceError):
    """The server has keys, and the request came without one of them in `Authorization: Bearer …`."""

    status, code, title = 401, "unauthorized", "A key is needed"


class NotFound(ServiceError):
    """No operation has this path."""

    status, code, title = 404, "not_found", "There is nothing at this path"


class MethodNotAllowed(ServiceError):
    """The path exists, but not for this method; `Allow` names those it has."""

    status, code, title = 405, "method_not_allowed", "This path does not answer this method"


class NotAcceptable(ServiceError):
    """None of the media types in `Accept` can be written."""

    status, code, title = 406, "not_acceptable", "No acceptable media type can be written"


class TooSlow(ServiceError):
    """The body did not arrive within `ATTENTION_READ_TIMEOUT`, nor with `ATTENTION_READ_RATE`."""

    status, code, title = 408, "too_slow", "The request took too long to arrive"


class TooLarge(ServiceError):
    """The request is larger than this server admits."""

    status, code, title = 413, "too_large", "The request is too large"


class BodyTooLarge(TooLarge):
    """The body has more bytes than `ATTENTION_MAX_BODY_BYTES`."""

    code, title = "body_too_large", "The body is too large"


class MemoryLimit(TooLarge):
    """Computing the answer would need more memory than `ATTENTION_MEMORY_LIMIT`, or than there is."""

    code, title = "memory_limit", "The answer would need too much memory"

    @classmethod
    def failed(cls) -> MemoryLimit:
        """Memory that was to be had, by all that is counted, and was not: for a body, what is in it, or an answer."""
        hint = "less at a time, or the same again when others are done"
        return cls.at("", "a request whose memory can be had", "one for which it could not", hint)


class UnsupportedMediaType(ServiceError):
    """The `Content-Type` is none that the service reads."""

    status, code, title = 415, "unsupported_media_type", "This media type cannot be read"


class UnsupportedEncoding(UnsupportedMediaType):
    """The body is compressed, or encoded in any other way, by its `Content-Encoding`; the service reads it as it is."""

    code, title = "unsupported_encoding", "This encoding cannot be read"


class HeadTooLarge(ServiceError):
    """Target and headers of the request are larger than this server admits."""

    status, code, title = 431, "head_too_large", "The head of the request is too large"


class InvalidRequest(ServiceError):
    """The body was parsed and is wrong; also the code of an answer whose faults are of several kinds."""

    status, code, title = 422, "invalid_request", "The request is not valid"


class MissingField(InvalidRequest):
    """A field that the request needs is absent."""

    code, title = "missing_field", "A field is missing"


class UnknownField(InvalidRequest):
    """A field has a name that the service does not know."""

    code, title = "unknown_field", "A field is not known"


class FieldConflict(InvalidRequest):
    """Fields that exclude each other, or need each other, do not fit."""

    code, title = "field_conflict", "Fields contradict each other"


class InvalidValue(InvalidRequest):
    """A field holds a value of the wrong type or outside its range."""

    code, title = "invalid_value", "A value is not valid"


class InvalidArray(InvalidRequest):
    """An array is ragged, empty, or holds something that is no finite number (for masks: no boolean)."""

    code, title = "invalid_array", "An array is not valid"


class ShapeMismatch(InvalidRequest):
    """The shapes of two fields, or of a field and an option, do not fit."""

    code, title = "shape_mismatch", "Shapes do not fit"


class Overflow(InvalidRequest):
    """A number does not fit into the type that it is computed or returned in."""

    code, title = "overflow", "A number is too large for its type"


class UnknownBackend(InvalidRequest):
    """The backend or device asked for is not available in this installation."""

    code, title = "unknown_backend", "The backend is not available"


class InternalError(ServiceError):
    """A defect of the service. The request id in the answer finds it in the log."""


class Busy(ServiceError):
    """The server is at work for others, and no more may wait, or not ready. `Retry-After` says when that is over."""

    status, code, title = 503, "busy", "The server is busy"


class TimeLimit(ServiceError):
    """The computation took longer than `ATTENTION_TIME_LIMIT` and was stopped."""

    status, code, title = 504, "time_limit", "The computation took too long"


@cache
def error_classes() -> dict[str, type[ServiceError]]:
    """All errors by code, in the order of the tree."""
    found: dict[str, type[ServiceError]] = {}
    waiting: list[type[ServiceError]] = list(ServiceError.__subclasses__())
    while waiting:
        error = waiting.pop(0)
        found[error.code] = error
        waiting[:0] = error.__subclasses__()
    return found


def kind_of(error: ServiceError) -> type[ServiceError]:
    """What an error is for its client: of the kind of its faults, where they are all of one, as it may switch on it."""
    codes = {fault.code for fault in error.faults}
    return error_classes().get(codes.pop(), type(error)) if len(codes) == 1 else type(error)


def drop_tracebacks(error: BaseException | None) -> None:
    """Drop the tracebacks of a handled error so that the frames, which hold the body, are freed at once.

    Futures hold the errors that threads raise, errors the frames that they passed, and frames the futures: a body would
    stay in this cycle until the garbage collector runs.
    """
    while error is not None:
        error.__traceback__ = None
        error = error.__context__


def describe(value: object) -> str:
    """What a value is, in a few words that never grow with it."""
    match value:
        case None:
            return "null"
        case bool():
            return f"boolean {str(value).lower()}"
        case int() if abs(value) >= 2**63:
            return f"an integer of {value.bit_length()} bits"
        case int() | float():
            return f"number {value}"
        case str():
            return f"string {quote(value)}"
        case np.ndarray():
            return f"{_kind(value)} of shape {shape(value.shape)}"
        case list() | tuple():
            return f"array of {len(value)}"
        case dict():
            return f"object with {len(value)} keys"
    return type(value).__name__


def child(pointer: str, key: str | int) -> str:
    """The JSON pointer one step further, the key escaped as RFC 6901 says, and cut if it is absurdly long."""
    text = str(key)
    if len(text) > QUOTE_LENGTH:
        text = text[:QUOTE_LENGTH] + "…"
    return f"{pointer}/{text.replace('~', '~0').replace('/', '~1')}"


def quote(text: str, limit: int = QUOTE_LENGTH) -> str:
    """The text in quotes, control characters escaped, cut to `limit` characters."""
    shown = ascii(text[:limit])
    return f"{shown[:limit]}…" if len(text) > limit or len(shown) > limit + 2 else shown


def shape(sizes: tuple[Any, ...]) -> str:
    """A shape as text: `(2, 3)`, `(3,)`; a `·` or a letter stands for an axis that may have any length."""
    inner = ", ".join(str(size) for size in sizes)
    return f"({inner},)" if len(sizes) == 1 else f"({inner})"


def _kind(array: np.ndarray) -> str:
    return "booleans" if array.dtype == bool else "integers" if array.dtype.kind in "iu" else "numbers"


def _coded(fault: Fault, code: str) -> Fault:
    return fault if fault.code else Fault(fault.pointer, fault.expected, fault.got, fault.hint, code)
