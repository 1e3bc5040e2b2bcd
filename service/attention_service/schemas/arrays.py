"""Arrays inside pydantic models: they pass as ndarrays, and the API document describes them as JSON.

A codec has already turned every well-formed array into an ndarray. What still is a list is wrong (or a bias with null
in it), and only then is it looked at number by number, to say which one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from contextlib import suppress
from typing import Annotated, Any, Final, Literal, NamedTuple

import numpy as np
from pydantic import BaseModel, Field, PlainValidator, RootModel
from pydantic_core import PydanticCustomError
from typing_extensions import TypeAliasType

from attention_service.attention.arrays import is_float, is_number
from attention_service.errors import describe

# More axes than any field has; deeper lists are not worth a closer look.
MAX_RANK = 8
# Characters of all labels of one side: an answer has them in one piece.
MAX_LABELS: Final = 2**22
# All integers up to it are numbers of float64.
MAX_WHOLE: Final = 2**53
HALF_PAIR: Final = re.compile("[\ud800-\udfff]")
# The hint for a mask of 0 and 1: libraries do not agree which of them hides.
FLAGS = "if 1 means takes part, send true for 1 and false for 0; else the other way round"
# The hint for a text that says minus infinity, as R writes it.
HIDING = "in a bias, null is minus infinity"

ElementType = Literal[
    "bool",
    "int8",
    "uint8",
    "int16",
    "uint16",
    "int32",
    "uint32",
    "int64",
    "uint64",
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e4m3fnuz",
    "float16",
    "bfloat16",
    "float32",
    "float64",
]


class EncodedTensor(BaseModel):
    """A typed array."""

    dtype: ElementType
    shape: list[Annotated[int, Field(ge=0)]] = Field(description="Length of each axis.")
    data: str = Field(
        description="Base64, little-endian, row-major; bool takes a byte.",
        json_schema_extra={"contentEncoding": "base64"},
    )


class NestedTensor(RootModel[list[Any]]):
    """Nested lists."""


# How the API document describes arrays.
Tensor = TypeAliasType("Tensor", EncodedTensor | NestedTensor)
IntegerOrTensor = TypeAliasType("IntegerOrTensor", int | EncodedTensor | NestedTensor)
NumberOrTensor = TypeAliasType("NumberOrTensor", float | EncodedTensor | NestedTensor)
Labels = TypeAliasType(
    "Labels",
    Annotated[list[Any], Field(description="A string per token, or a list of them per batch entry.")],
)


class ProtocolTensor(NamedTuple):
    """What the Open Inference Protocol says of a field that is an array: its datatype, and its axes in layout ld."""

    datatype: str
    rank: int


def invalid_array(expected: str, got: str, at: str = "", hint: str = "") -> PydanticCustomError:
    """The error for a list that is no array, at a place in it. `validate` reads the four texts."""
    texts = {"expected": expected, "got": got, "at": at, "hint": hint}
    return PydanticCustomError("invalid_array", "{expected}", texts)


def _array_of(element: str, *types: type) -> Callable[[Any], np.ndarray]:
    """A validator for arrays whose elements have these types; `element` names them, like "a number"."""

    def check(value: Any) -> np.ndarray:
        if isinstance(value, np.ndarray):
            return value
        if not isinstance(value, list):
            raise invalid_array(f"an array (lists, or dtype, shape and data), each element {element}", describe(value))
        _check(value, _shape(value), element, types, "")
        return np.array(value)

    return check


def _check(value: Any, shape: tuple[int, ...], element: str, types: tuple[type, ...], at: str) -> None:
    """Refuse a list that is no array of this shape. Errors: PydanticCustomError for the first place where it is not."""
    if not shape:
        if not isinstance(value, types) or isinstance(value, bool) != (bool in types):
            is_flag = types == (bool,) and isinstance(value, int) and value in (0, 1)
            is_hiding = isinstance(value, str) and value.lower() in ("-inf", "-infinity")
            raise invalid_array(element, describe(value), at, (is_flag and FLAGS) or (is_hiding and HIDING) or "")
        return
    if not isinstance(value, list):
        raise invalid_array(f"a row of {shape[0]}, as the first", describe(value), at)
    if not value:
        raise invalid_array("at least one element", "none", at)
    if len(value) != shape[0]:
        raise invalid_array(f"a row of {shape[0]}, as the first", f"a row of {len(value)}", at)
    for i, item in enumerate(value):
        _check(item, shape[1:], element, types, f"{at}/{i}")


def _shape(value: Any) -> tuple[int, ...]:
    """The length of a list, of its first element, and so on."""
    lengths: tuple[int, ...] = ()
    while isinstance(value, list):
        lengths += (len(value),)
        if len(lengths) > MAX_RANK:
            raise invalid_array(f"at most {MAX_RANK} axes", "more")
        value = value[0] if value else None
    return lengths


_numbers = _array_of("a number", int, float)
_booleans = _array_of("true or false", bool)
_listed_integers = _array_of("an integer", int)


def _integer_lists(value: Any) -> np.ndarray:
    """An array of integers, also one of floats that are whole: R and Octave write no others."""
    array = _listed_integers(value)
    if is_float(array.dtype) and (np.abs(array) <= MAX_WHOLE).all() and (array == np.trunc(array)).all():
        return array.astype(np.int64)
    return array


def _integers(value: Any) -> np.ndarray:
    is_integer = type(value) is int or (type(value) is float and value.is_integer() and abs(value) < 2**63)
    return np.array(int(value)) if is_integer else _integer_lists(value)


def _number_or_numbers(value: Any) -> float | np.ndarray:
    if isinstance(value, np.ndarray):
        return float(value) if value.ndim == 0 and is_number(value.dtype) else value
    if isinstance(value, list):
        return _numbers(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise PydanticCustomError("number", "a number, or an array of numbers")
    with suppress(OverflowError):
        if math.isfinite(value):
            return float(value)
    raise PydanticCustomError("finite_number", "a finite number")


def _biases(value: Any) -> np.ndarray:
    return _numbers(_with_number_for_null(value, -math.inf) if isinstance(value, list) else value)


def _numbers_or_null(value: Any) -> np.ndarray:
    return _numbers(_with_number_for_null(value, math.nan) if isinstance(value, list) else value)


def _with_number_for_null(value: Any, number: float) -> Any:
    if isinstance(value, list):
        return [_with_number_for_null(item, number) for item in value]
    return number if value is None else value


def _past(value: Any) -> np.ndarray:
    """Numbers, or lists without any: a past of length 0."""
    if isinstance(value, list):
        # As objects, where a long string does not make all elements as long.
        with suppress(ValueError):
            if np.array(value, dtype=object).size == 0:
                return np.array(value, dtype=np.float64)
    return _numbers(value)


def _labels(value: Any) -> tuple[Any, ...]:
    """One list of strings, or one per batch entry."""
    if not isinstance(value, list):
        raise invalid_array("an array of strings", describe(value))
    nested, characters = bool(value) and isinstance(value[0], list), 0
    for i, item in enumerate(value):
        if nested and not isinstance(item, list):
            raise invalid_array("an array of strings", describe(item), f"/{i}")
        for j, label in enumerate(item if nested else [item]):
            at = f"/{i}/{j}" if nested else f"/{i}"
            if not isinstance(label, str):
                raise invalid_array("a string", describe(label), at)
            characters += len(label)
            if characters > MAX_LABELS:
                raise invalid_array(f"labels of at most {MAX_LABELS} characters in all", "more", at)
            if not label.isascii() and HALF_PAIR.search(label):  # only Python has such strings
                raise invalid_array("Unicode text", "half a surrogate pair", at)
    return tuple(tuple(row) for row in value) if nested else tuple(value)


# The types of fields, by their elements and by their axes in layout ld, which the Open Inference Protocol tells.
Matrix = Annotated[np.ndarray, PlainValidator(_numbers, json_schema_input_type=Tensor), ProtocolTensor("FP32", 2)]
Vector = Annotated[np.ndarray, PlainValidator(_numbers, json_schema_input_type=Tensor), ProtocolTensor("FP32", 1)]
Gate = Annotated[np.ndarray, PlainValidator(_numbers, json_schema_input_type=Tensor), ProtocolTensor("FP32", 3)]
Past = Annotated[np.ndarray, PlainValidator(_past, json_schema_input_type=Tensor), ProtocolTensor("FP32", 3)]
Bias = Annotated[np.ndarray, PlainValidator(_biases, json_schema_input_type=Tensor), ProtocolTensor("FP32", 2)]
NumbersOrNull = Annotated[np.ndarray, PlainValidator(_numbers_or_null, json_schema_input_type=Tensor)]
Mask = Annotated[np.ndarray, PlainValidator(_booleans, json_schema_input_type=Tensor), ProtocolTensor("BOOL", 2)]
KeyMask = Annotated[np.ndarray, PlainValidator(_booleans, json_schema_input_type=Tensor), ProtocolTensor("BOOL", 1)]
Integers = Annotated[
    np.ndarray, PlainValidator(_integer_lists, json_schema_input_type=Tensor), ProtocolTensor("INT64", 1)
]
IntegerMatrix = Annotated[
    np.ndarray, PlainValidator(_integer_lists, json_schema_input_type=Tensor), ProtocolTensor("INT64", 2)
]
IntegerOrIntegers = Annotated[
    np.ndarray, PlainValidator(_integers, json_schema_input_type=IntegerOrTensor), ProtocolTensor("INT64", 1)
]
NumberOrNumbers = Annotated[
    float | np.ndarray,
    PlainValidator(_number_or_numbers, json_schema_input_type=NumberOrTensor),
    ProtocolTensor("FP32", 1),
]
TokenLabels = Annotated[
    tuple[str, ...] | tuple[tuple[str, ...], ...],
    PlainValidator(_labels, json_schema_input_type=Labels),
    ProtocolTensor("BYTES", 1),
]
