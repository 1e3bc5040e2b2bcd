"""Fields as pydantic models, and pydantic's errors as errors of this API."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Final, Literal, TypeVar, get_args, get_origin

import numpy as np
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from attention_service.errors import (
    Fault,
    InvalidArray,
    InvalidValue,
    MissingField,
    UnknownField,
    child,
    describe,
    invalid_request,
    quote,
)
from attention_service.schemas.names import advice, near, nearest

Model = TypeVar("Model", bound=BaseModel)

# Faults of one request that are reported together.
MAX_FAULTS = 10
# Words of pydantic's errors, and what is said in their place.
SHORTER: Final = (
    ("a valid integer", "an integer"),
    ("a valid ", "a "),
    ("greater than or equal to", "at least"),
    ("less than or equal to", "at most"),
)


def is_field(name: str, model: type[BaseModel]) -> bool:
    """True for the name of a field of a model, or a dotted name within one."""
    return name.partition(".")[0] in model.model_fields


def misplaced(model: type[BaseModel], unread: Mapping[str, tuple[str, str]]) -> list[Fault]:
    """A fault for each field of a model that stands where none is read, MAX_FAULTS at most. unread: as of `Decoded`"""
    found = [
        Fault(pointer, f"{quote(name)} in {place}", "it where no field is read", code=UnknownField.code)
        for name, (pointer, place) in unread.items()
        if is_field(name, model)
    ]
    return found[:MAX_FAULTS]


def validate(model: type[Model], fields: dict[str, Any], unread: Mapping[str, tuple[str, str]] | None = None) -> Model:
    """The fields as a model. unread: as of `Decoded`

    Errors: UnknownField for fields that stand where none is read. InvalidValue, UnknownField or InvalidArray with one
    fault for each error that pydantic found; InvalidRequest if these are of several classes.
    """
    if faults := misplaced(model, unread or {}):
        raise UnknownField(*faults)
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        errors = error.errors(include_url=False)[:MAX_FAULTS]
    raise invalid_request(*(_fault(model, details) for details in errors))


def _fault(model: type[BaseModel], details: ErrorDetails) -> Fault:
    pointer = ""
    for step in details["loc"]:
        pointer = child(pointer, step)
    context = details.get("ctx", {})
    pointer += context.get("at", "")  # of an error of the whole object
    given, hint = details["input"], ""
    match details["type"]:
        case "extra_forbidden":
            name = str(details["loc"][-1])
            known = _model_at(model, details["loc"][:-1])
            hint = getattr(known, "elsewhere", {}).get(name) or advice(name, known.model_fields)
            return Fault(pointer, "a known field", quote(name), hint, UnknownField.code)
        case InvalidArray.code | InvalidValue.code:
            return Fault(pointer, context["expected"], context["got"], context["hint"], details["type"])
        case "literal_error":
            expected = f"one of {context['expected']}"
            hint = near(given, re.findall("'([^']*)'", context["expected"])) if isinstance(given, str) else ""
        case "missing":
            return Fault(pointer, "this field", "none", code=MissingField.code)
        case "list_type":
            expected = "a list"
            field = _model_at(model, details["loc"][:-1]).model_fields[str(details["loc"][-1])]
            hint = _list_of(given, field.annotation) if isinstance(given, str) else ""
        case "model_type":
            expected = f"an object with {', '.join(_model_at(model, details['loc']).model_fields)}"
            hint = _window_for(given) if pointer == "/window" else ""
        case "bool_type":
            expected = "true or false"
        case "string_pattern_mismatch":  # of the device
            expected = "auto, cpu, cuda or cuda:N"
        case _:
            expected = _in_short(details["msg"])
    return Fault(pointer, expected, describe(given), hint, InvalidValue.code)


def _in_short(message: str) -> str:
    """What a message of pydantic says is expected."""
    expected = re.sub("^(Input|List|String) should (be|have) ", "", message)
    for words, shorter in SHORTER:
        expected = expected.replace(words, shorter)
    return expected


def _list_of(given: str, annotation: Any) -> str:
    """The hint for a name where a list of such names is expected."""
    choices = _names_in(annotation)
    name = given if given in choices else nearest(given, choices)
    return f"write [{json.dumps(name)}]" if name else ""


def _names_in(annotation: Any) -> list[str]:
    """All names that a field may hold, by its type."""
    if get_origin(annotation) is Literal:
        return list(get_args(annotation))
    return [name for part in get_args(annotation) for name in _names_in(part)]


def _window_for(given: Any) -> str:
    """The hint for a window that is no object: what to write for a number, and for left and right as in FlashAttention.

    A number alone stands for keys of one side in some libraries, of both in JAX, so it is not guessed.
    """
    if isinstance(given, np.ndarray) and given.shape == (2,) and given.dtype.kind in "iu":
        given = given.tolist()
    sides = given if isinstance(given, list) and len(given) == 2 else [given]
    if not all(type(side) is int and abs(side) < 2**63 for side in sides):
        return ""
    bounded = {name: side for name, side in zip(("left", "right"), sides, strict=False) if side >= 0}
    if not bounded:
        return "leave window out"
    if len(sides) == 2:
        return f"write {json.dumps(bounded)}"
    before, both = json.dumps({"left": given, "right": 0}), json.dumps({"left": given, "right": given})
    return f"write {before} for the key at the query and {given} before it, {both} for {given} on both sides"


def _model_at(model: type[BaseModel], loc: tuple[int | str, ...]) -> type[BaseModel]:
    """The model of the object at this location inside `model`."""
    for step in loc:
        if isinstance(step, int):  # an element of a list, whose model its field has said
            continue
        annotation = model.model_fields[step].annotation
        options = getattr(annotation, "__args__", (annotation,))
        model = next(option for option in options if isinstance(option, type) and issubclass(option, BaseModel))
    return model
