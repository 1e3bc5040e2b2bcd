"""Arrays inside pydantic models: they pass as ndarrays, and are described to the world as JSON.

A codec has already turned every well-formed array into an ndarray. What still is a list is wrong (or a bias with
null in it), and only then is it looked at number by number, to say which one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

import numpy as np
from pydantic import BaseModel, Field, PlainValidator, RootModel, WrapValidator
from pydantic_core import PydanticCustomError
from typing_extensions import TypeAliasType

from service.errors import describe

# More axes than any field has; deeper lists are not worth a closer look.
MAX_RANK = 8


ElementType = Literal["bool", "int32", "int64", "float16", "bfloat16", "float32", "float64"]


class EncodedArray(BaseModel):
    """A typed array: the bytes of its elements in base64."""

    dtype: ElementType = Field(description="Type of the elements. bool takes one byte per element.")
    shape: list[Annotated[int, Field(ge=0)]] = Field(description="Length of each axis.")
    data: str = Field(
        description="Base64 of the elements, little-endian and row-major, exactly as many bytes as the shape needs.",
        json_schema_extra={"contentEncoding": "base64"},
    )


class NestedArray(RootModel[list[Any]]):
    """An array as nested lists, rectangular, row-major. Its numbers have no type of their own."""


def fault(expected: str, got: object, at: str = "", *, code: str = "invalid_array") -> PydanticCustomError:
    """An error that carries its pointer and texts along, for `validate` to read."""
    shown = got if isinstance(got, str) else describe(got)
    return PydanticCustomError(code, "{expected}", {"expected": expected, "got": shown, "at": at})


def _checked(element: str, fits: Callable[[Any], bool]) -> Callable[[Any], np.ndarray]:
    """A validator for arrays whose elements are `element`, like "a number"."""

    def check(value: Any) -> np.ndarray:
        if isinstance(value, np.ndarray):
            return value
        if not isinstance(value, list):
            raise fault(f"an array (lists, or dtype, shape and data), each element {element}", describe(value))
        _inspect(value, _sizes(value), element, fits, "")
        return np.array(value)

    return check


def _sizes(value: Any) -> tuple[int, ...]:
    """The lengths met on the way down the first elements."""
    sizes: list[int] = []
    while isinstance(value, list):
        sizes.append(len(value))
        if len(sizes) > MAX_RANK:
            raise fault(f"at most {MAX_RANK} axes", "more")
        value = value[0] if value else None
    return tuple(sizes)


def _inspect(value: Any, sizes: tuple[int, ...], element: str, fits: Callable[[Any], bool], at: str) -> None:
    """Find the first place where a list is no array of this shape. Errors: PydanticCustomError with that place."""
    if not sizes:
        if not fits(value):
            raise fault(element, describe(value), at)
        return
    if not isinstance(value, list):
        raise fault(f"a row of {sizes[0]}, as the first", describe(value), at)
    if not value:
        raise fault("at least one element", "none", at)
    if len(value) != sizes[0]:
        raise fault(f"a row of {sizes[0]}, as the first", f"a row of {len(value)}", at)
    for i, item in enumerate(value):
        _inspect(item, sizes[1:], element, fits, f"{at}/{i}")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_boolean(value: Any) -> bool:
    return isinstance(value, bool)


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _null_to_minus_infinity(value: Any) -> Any:
    if isinstance(value, list):
        return [_null_to_minus_infinity(item) for item in value]
    return -math.inf if value is None else value


_numbers = _checked("a number", _is_number)
_booleans = _checked("true or false", _is_boolean)


def _biases(value: Any) -> np.ndarray:
    return _numbers(_null_to_minus_infinity(value) if isinstance(value, list) else value)


def _cached(value: Any) -> np.ndarray:
    """Numbers, or lists that hold none at all: a past of length 0."""
    if isinstance(value, list):
        # As objects, where a long string does not make all elements as long.
        with suppress(ValueError):
            if np.array(value, dtype=object).size == 0:
                return np.array(value, dtype=np.float64)
    return _numbers(value)


_integer_lists = _checked("an integer", _is_integer)


def _integers(value: Any) -> np.ndarray:
    return np.array(value) if _is_integer(value) else _integer_lists(value)


def _labels(value: Any) -> tuple[Any, ...]:
    """One list of strings, or one per batch entry."""
    if not isinstance(value, list):
        raise fault("an array of strings", describe(value))
    nested = bool(value) and isinstance(value[0], list)
    for i, item in enumerate(value):
        if nested and not isinstance(item, list):
            raise fault("an array of strings", describe(item), f"/{i}")
        for j, label in enumerate(item if nested else [item]):
            if not isinstance(label, str):
                raise fault("a string", describe(label), f"/{i}/{j}" if nested else f"/{i}")
    return tuple(tuple(row) for row in value) if nested else tuple(value)


def _described(name: str, description: str, options: Any) -> Any:
    """A type under this name, which the document says is one of `options`, and which lets everything through.

    What passes here is looked at by the validators below: an ndarray, or what a codec left of one.
    """
    untouched = WrapValidator(lambda value, handler: value)
    return TypeAliasType(name, Annotated[options, untouched, Field(description=description)])


if TYPE_CHECKING:
    Array: TypeAlias = np.ndarray
    IntegerOrArray: TypeAlias = np.ndarray
    Labels: TypeAlias = tuple[str, ...] | tuple[tuple[str, ...], ...]
else:
    Array = _described("Array", "An array. The field describes its axes.", EncodedArray | NestedArray)
    IntegerOrArray = _described("IntegerOrArray", "One integer, or an array of them.", int | EncodedArray | NestedArray)
    Labels = _described("Labels", "One string per token, or one list of strings per batch entry.", list[Any])


def _as(described: Any, check: Callable[[Any], Any]) -> Any:
    """A type whose values `check` takes as they come, and which the document describes as another."""
    return Annotated[described, PlainValidator(check, json_schema_input_type=described)]


if TYPE_CHECKING:
    Numbers: TypeAlias = np.ndarray
    CachedNumbers: TypeAlias = np.ndarray
    Booleans: TypeAlias = np.ndarray
    Biases: TypeAlias = np.ndarray
    Integers: TypeAlias = np.ndarray
    IntegerLists: TypeAlias = np.ndarray
    CheckedLabels: TypeAlias = Labels
else:
    Numbers = _as(Array, _numbers)
    CachedNumbers = _as(Array, _cached)
    Booleans = _as(Array, _booleans)
    Biases = _as(Array, _biases)
    Integers = _as(IntegerOrArray, _integers)
    IntegerLists = _as(Array, _integer_lists)
    CheckedLabels = _as(Labels, _labels)
