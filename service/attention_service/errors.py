"""The exceptions that become error responses: one class for each problem code.

ServiceError
├── BadRequest            400  the head or the body cannot be parsed
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
├── InvalidRequest        422  the body was parsed, but is not a valid request
│   ├── MissingField      422
│   ├── UnknownField      422
│   ├── FieldConflict     422
│   ├── InvalidValue      422
│   ├── InvalidArray      422
│   ├── ShapeMismatch     422
│   ├── Overflow          422
│   ├── UnknownBackend    422
│   └── UnknownLayer      422
├── InternalError         500  a defect of the service
├── Busy                  503
├── LayerUnavailable      503
└── TimeLimit             504

`status`, `code` and `title` are attributes of the class and part of the API: clients may switch on `code`. The
docstring of a class describes its code at /problems/{code} and in the API document. `faults` of an instance say what is
wrong with one request: a JSON pointer, what was expected, and what came instead.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Self

import numpy as np

# Characters that are quoted of an offending value: a response must not grow with the body that caused it.
QUOTE_LENGTH = 40


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that is wrong with a request.

    pointer:  JSON pointer (RFC 6901) to the place, "" for the body as a whole
    expected: what would have been valid
    got:      what came instead, at most a few dozen characters
    hint:     how to correct it, if `expected` and `got` do not say so
    code:     the code of an error class: one response may hold faults with different codes
    """

    pointer: str
    expected: str
    got: str
    hint: str = ""
    code: str = ""

    def sentence(self) -> str:
        """The fault as one sentence."""
        place = f"{self.pointer}: " if self.pointer else ""
        text = f"{place}expected {self.expected}, got {self.got}"
        return f"{text} ({self.hint})" if self.hint else text


class ServiceError(Exception):
    """Base class of all errors that have an HTTP status. faults: what is wrong; headers: added to the response"""

    status: ClassVar[int] = 500
    code: ClassVar[str] = "internal_error"
    title: ClassVar[str] = "The service failed"

    def __init__(self, *faults: Fault, headers: dict[str, str] | None = None) -> None:
        self.faults = tuple(replace(fault, code=fault.code or self.code) for fault in faults)
        self.headers = headers or {}
        super().__init__("; ".join(fault.sentence() for fault in self.faults) or self.title)

    def __reduce__(self) -> tuple[Any, ...]:
        """How it is pickled: made of its faults, not of its sentence, as exceptions are."""
        return partial(type(self), headers=self.headers), self.faults

    @classmethod
    def description(cls) -> str:
        """What the problem code means, in one line."""
        return " ".join((cls.__doc__ or "").split())

    @classmethod
    def at(
        cls, pointer: str, expected: str, got: str, hint: str = "", *, headers: dict[str, str] | None = None
    ) -> Self:
        """An error with one fault. `got` is not quoted: for text of the client use `of`, or `quote` it before."""
        return cls(Fault(pointer, expected, got, hint), headers=headers)

    @classmethod
    def of(cls, pointer: str, expected: str, value: object, hint: str = "") -> Self:
        """An error with one fault, whose `got` describes `value`."""
        return cls.at(pointer, expected, describe(value), hint)


class BadRequest(ServiceError):
    """The head or the body of the request could not be parsed."""

    status, code, title = 400, "bad_request", "The body cannot be parsed"


class InvalidJSON(BadRequest):
    """The body is not JSON (RFC 8259). It must be UTF-8, without a byte-order mark, and without NaN and Infinity."""

    code, title = "invalid_json", "The body is not valid JSON"


class DuplicateKey(BadRequest):
    """An object has two values for the same key."""

    code, title = "duplicate_key", "A key is given twice"


class TooDeep(BadRequest):
    """Arrays or objects are nested too deeply: more than 32 levels in JSON."""

    code, title = "too_deep", "The body is nested too deeply"


class InvalidTensors(BadRequest):
    """The body is not valid in the binary format of its media type, or its headers contradict its data."""

    code, title = "invalid_tensors", "The body is not valid in its binary format"


class Unauthorized(ServiceError):
    """The server requires an API key, and the request has no valid one in `Authorization: Bearer …`."""

    status, code, title = 401, "unauthorized", "A key is needed"


class NotFound(ServiceError):
    """There is no operation with this path, or no model or problem code of this name."""

    status, code, title = 404, "not_found", "There is nothing at this path"


class MethodNotAllowed(ServiceError):
    """The path does not support this method. The header `Allow` lists the methods that it supports."""

    status, code, title = 405, "method_not_allowed", "This path does not answer this method"


class NotAcceptable(ServiceError):
    """The service cannot write the response in any media type of `Accept`."""

    status, code, title = 406, "not_acceptable", "No acceptable media type can be written"


class TooSlow(ServiceError):
    """The sender was more than `ATTENTION_READ_TIMEOUT` seconds behind `ATTENTION_READ_RATE` bytes per second.

    Or arriving bodies filled their part of the memory, and this one was slow for what it held.
    """

    status, code, title = 408, "too_slow", "The request took too long to arrive"


class TooLarge(ServiceError):
    """The request is larger than this server allows."""

    status, code, title = 413, "too_large", "The request is too large"


class BodyTooLarge(TooLarge):
    """The body is larger than `ATTENTION_MAX_BODY_BYTES`."""

    code, title = "body_too_large", "The body is too large"
    ways_out: ClassVar[str] = (
        "send npz or safetensors, which take less than JSON; name a stored layer in place of its weights; "
        "or raise ATTENTION_MAX_BODY_BYTES"
    )


class MemoryLimit(TooLarge):
    """The request needs more memory than `ATTENTION_MEMORY_LIMIT` allows, or than the machine has left."""

    code, title = "memory_limit", "The answer would need too much memory"

    @classmethod
    def failed(cls) -> MemoryLimit:
        """The error for an allocation that failed although the memory was granted."""
        hint = "send a smaller request, or try again when other requests are done"
        return cls.at("", "enough free memory", "an allocation that failed", hint)


class UnsupportedMediaType(ServiceError):
    """The service does not read the media type in `Content-Type`."""

    status, code, title = 415, "unsupported_media_type", "This media type cannot be read"


class UnsupportedEncoding(UnsupportedMediaType):
    """The body has a `Content-Encoding`, gzip for example. The service does not decompress bodies."""

    code, title = "unsupported_encoding", "This encoding cannot be read"


class HeadTooLarge(ServiceError):
    """The head of the request (its target and headers) is larger than 64 KiB."""

    status, code, title = 431, "head_too_large", "The head of the request is too large"


class InvalidRequest(ServiceError):
    """The body was parsed, but is not a valid request. Also the code of a response whose faults have several codes."""

    status, code, title = 422, "invalid_request", "The request is not valid"


class MissingField(InvalidRequest):
    """A required field is missing."""

    code, title = "missing_field", "A field is missing"


class UnknownField(InvalidRequest):
    """The service has no field of this name."""

    code, title = "unknown_field", "A field is not known"


class FieldConflict(InvalidRequest):
    """Two fields exclude each other, or a field needs another one that is missing."""

    code, title = "field_conflict", "Fields contradict each other"


class InvalidValue(InvalidRequest):
    """A value has the wrong type or is out of range."""

    code, title = "invalid_value", "A value is not valid"


class InvalidArray(InvalidRequest):
    """An array is ragged or empty, or one of its elements is not a finite number (in masks: not a boolean)."""

    code, title = "invalid_array", "An array is not valid"


class ShapeMismatch(InvalidRequest):
    """The shapes of two fields, or the shape of a field and an option, do not match."""

    code, title = "shape_mismatch", "Shapes do not fit"


class Overflow(InvalidRequest):
    """A number is too large for the type that it is computed or returned in."""

    code, title = "overflow", "A number is too large for its type"


class UnknownBackend(InvalidRequest):
    """The backend or the device of the request is not available in this installation."""

    code, title = "unknown_backend", "The backend is not available"


class UnknownLayer(InvalidRequest):
    """The service has no stored layer of this name, or no stored layers at all."""

    code, title = "unknown_layer", "The layer is not known"


class InternalError(ServiceError):
    """A defect of the service. The log has the details, under the request id of the response."""


class Busy(ServiceError):
    """The service has no capacity for the request at the moment, or is starting or stopping.

    `Retry-After` says after how many seconds to try again.
    """

    status, code, title = 503, "busy", "The server is busy"


class LayerUnavailable(ServiceError):
    """The files of the layer are being replaced, or are not those of a layer. `GET /layers` says what is wrong.

    They are read again a second later.
    """

    status, code, title = 503, "layer_unavailable", "The layer cannot be used"


class TimeLimit(ServiceError):
    """The computation took longer than `ATTENTION_TIME_LIMIT` and was stopped."""

    status, code, title = 504, "time_limit", "The computation took too long"


def error_classes(base: type[ServiceError] = ServiceError) -> dict[str, type[ServiceError]]:
    """All error classes below this one by their code, in the order of the tree above."""
    classes: dict[str, type[ServiceError]] = {}
    for kind in base.__subclasses__():
        classes |= {kind.code: kind} | error_classes(kind)
    return classes


def invalid_request(*faults: Fault) -> ServiceError:
    """The error with these faults: of their class if all of them have the same code, else InvalidRequest."""
    codes = {fault.code for fault in faults}
    kind = error_classes()[codes.pop()] if len(codes) == 1 else InvalidRequest
    return kind(*faults)


def drop_tracebacks(error: BaseException | None) -> None:
    """Drop the tracebacks of a handled error and of its causes, so that their frames are freed at once.

    The future of a worker thread refers to its error, the error to the frames of its traceback, and a frame to the
    future: without this the request body, which the frames hold, stays until the next garbage collection.
    """
    while error is not None:
        error.__traceback__ = None
        error = error.__context__


def describe(value: object) -> str:
    """A short description of a value, like `number 3` or `array of 5`, whatever its size."""
    match value:
        case None:
            return "null"
        case bool():
            return f"boolean {str(value).lower()}"
        case int() if abs(value) >= 2**63:
            return f"an integer of {value.bit_length()} bits"
        case int() | float():
            return f"number {value}"
        case complex():
            return f"complex number {value}"
        case str():
            return f"string {quote(value)}"
        case np.ndarray():
            return f"{_kind(value)} of shape {shape(value.shape)}"
        case list() | tuple():
            return f"array of {len(value)}"
        case dict():
            return f"object with {len(value)} key{'' if len(value) == 1 else 's'}"
    return type(value).__name__


def child(pointer: str, key: str | int) -> str:
    """`pointer` extended by a key or an index, escaped as in RFC 6901; a long key is cut."""
    text = str(key)
    if len(text) > QUOTE_LENGTH:
        text = text[:QUOTE_LENGTH] + "…"
    return f"{pointer}/{text.replace('~', '~0').replace('/', '~1')}"


def quote(text: str, limit: int = QUOTE_LENGTH) -> str:
    """The text in quotes, control characters escaped, cut to `limit` characters."""
    shown = ascii(text[:limit])
    return f"{shown[:limit]}…" if len(text) > limit or len(shown) > limit + 2 else shown


def shape(sizes: tuple[Any, ...]) -> str:
    """A shape as text, `(2, 3)` or `(3,)`. A size may be text: `·` or a letter for an axis of any length."""
    inner = ", ".join(str(size) for size in sizes)
    return f"({inner},)" if len(sizes) == 1 else f"({inner})"


def _kind(array: np.ndarray) -> str:
    known = {"b": "booleans", "i": "integers", "u": "integers", "c": "complex numbers"}.get(array.dtype.kind)
    name = array.dtype.name
    others = "codes of " + name if name.startswith(("float4", "float6", "float8")) else "elements of " + name
    return known or ("numbers" if name in ("float16", "bfloat16", "float32", "float64") else others)
