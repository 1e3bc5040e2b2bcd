"""Arrays inside pydantic models: they pass as ndarrays, and are described to the world as JSON.

A codec has already turned every well-formed array into an ndarray. What still is a list is wrong (or a bias with
null in it), and only then is it looked at number by number, to say which one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated, Any

import numpy as np
from pydantic import AfterValidator, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError, core_schema
from typing_extensions import TypeAliasType

from service.errors import describe

# More axes than any field has; deeper lists are not worth a closer look.
MAX_RANK = 8


class _Passed:
    """Lets ndarrays and lists through untouched; the JSON schema says what they are."""

    def __init__(self, schema: JsonSchemaValue) -> None:
        self._schema = schema

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.any_schema()

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return dict(self._schema)


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
            raise fault(f"an array, of which each element is {element}", describe(value))
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


def _integers(value: Any) -> np.ndarray:
    if _is_integer(value):
        return np.array(value)
    return _checked("an integer", _is_integer)(value)


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


Array = TypeAliasType(
    "Array",
    Annotated[
        np.ndarray,
        _Passed(
            {
                "title": "Array",
                "description": "An array as nested lists, rectangular, row-major. Rank and axes: see the field.",
                "type": "array",
                "items": {},
            }
        ),
    ],
)
IntegerOrArray = TypeAliasType(
    "IntegerOrArray",
    Annotated[
        np.ndarray,
        _Passed(
            {
                "title": "IntegerOrArray",
                "description": "One integer, or one per batch entry.",
                "anyOf": [{"type": "integer"}, {"type": "array", "items": {"type": "integer"}, "minItems": 1}],
            }
        ),
    ],
)
Labels = TypeAliasType(
    "Labels",
    Annotated[
        tuple[str, ...] | tuple[tuple[str, ...], ...],
        _Passed(
            {
                "title": "Labels",
                "description": "One label per token, or such a list per batch entry.",
                "anyOf": [
                    {"type": "array", "items": {"type": "string"}},
                    {"type": "array", "items": {"type": "array", "items": {"type": "string"}}},
                ],
            }
        ),
    ],
)

Numbers = Annotated[Array, AfterValidator(_numbers)]
Booleans = Annotated[Array, AfterValidator(_booleans)]
Biases = Annotated[Array, AfterValidator(_biases)]
Integers = Annotated[IntegerOrArray, AfterValidator(_integers)]
CheckedLabels = Annotated[Labels, AfterValidator(_labels)]
