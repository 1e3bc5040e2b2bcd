"""Gradients: what a request differentiates, and by which cotangents.

A cotangent is the gradient of a loss with respect to an output of attention. The backward pass turns it into the
gradients of the same loss with respect to fields of the request.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Final, get_args

import numpy as np

from attention_service.attention.arrays import cast
from attention_service.attention.outputs import OUTPUTS, outputs_of
from attention_service.attention.roles import Roles
from attention_service.attention.score_term import Frame
from attention_service.attention.shapes import canonical
from attention_service.attention.spec import AttentionSpec, Gradient, Layout, Operand, Parameter, field_types
from attention_service.errors import FieldConflict, MissingField, ShapeMismatch, shape

PREFIX: Final = "grad_"
# Fields of a request that have gradients, some of them objects of arrays.
FIELDS: Final = tuple(name.removeprefix(PREFIX) for name in get_args(Gradient))
_OPERAND: Final = Operand | None
_PARAMETER: Final = Parameter | None


def gradient_names() -> tuple[str, ...]:
    """The dotted names of all gradients that a response may have: one for each array."""
    hints = field_types(AttentionSpec)
    return tuple(PREFIX + name for field in FIELDS for name in _array_names(hints[field], field))


def _array_names(hint: Any, place: str) -> Iterator[str]:
    """The dotted names of a field, or of the arrays in it. hint: its type"""
    kinds: list[Any] = [kind for kind in get_args(hint) if is_dataclass(kind)]
    if not kinds:
        yield place
    for name, inner in field_types(kinds[0]).items() if kinds else ():
        if inner in (_OPERAND, _PARAMETER) or any(map(is_dataclass, get_args(inner))):
            yield from _array_names(inner, f"{place}.{name}")


@dataclass(frozen=True, slots=True)
class FieldGradient:
    """A gradient that is returned.

    field: the dotted name of the field, like projection.query.weight; shape: its shape, () for one number
    is_operand: True if it is returned in the type of the request, False in the type that is computed in
    """

    field: str
    shape: tuple[int, ...]
    is_operand: bool

    @property
    def name(self) -> str:
        """The name in the response, before it is split at the dots."""
        return PREFIX + self.field


@dataclass(frozen=True, eq=False, slots=True)
class Gradients:
    """What the backward pass of a plan computes.

    wanted: the gradients that are returned
    output: the cotangent of the output, (b, h, q, e) if the layout has heads, else (b, q, out); None for zeros
    logsumexp: the cotangent of the natural logsumexp, (b, h, q); None for zeros
    """

    wanted: tuple[FieldGradient, ...]
    output: np.ndarray | None = None
    logsumexp: np.ndarray | None = None

    def wants(self, field: str) -> bool:
        """True if the gradient of a field, by its dotted name, or of a part of the field is returned."""
        return any(f"{gradient.field}.".startswith(f"{field}.") for gradient in self.wanted)

    def named(self, name: str) -> FieldGradient | None:
        """The gradient that a response has under this name; None for any other name."""
        return next((gradient for gradient in self.wanted if gradient.name == name), None)


def make_gradients(
    spec: AttentionSpec, roles: Roles, layout: Layout, frame: Frame, dtype: np.dtype, *, single_query: bool
) -> Gradients | None:
    """What a request differentiates; None if it asks for no gradient.

    Errors: MissingField for no cotangent, or for the gradient of a field that was not sent; FieldConflict,
    InvalidArray, ShapeMismatch, Overflow.
    """
    if not spec.has_gradients:
        return None
    present = {name for name in FIELDS if getattr(spec, name) is not None}
    asked = {name.removeprefix(PREFIX) for name in spec.include if name not in OUTPUTS}
    for name in sorted(asked - present):
        raise MissingField.at(f"/{name}", f"the field {name}, as include has {PREFIX}{name}", "none")
    if spec.gradients == "all":
        asked = present
    has_cotangent = spec.grad_output is not None or spec.grad_logsumexp is not None
    if not asked and not outputs_of("gradients") & set(spec.include):
        field = "grad_output" if spec.grad_output is not None else "grad_logsumexp"
        hint = 'write "gradients": "all", or name some in include, like grad_query'
        raise FieldConflict.at(f"/{field}", "gradients that are asked for", "none of them", hint)
    if not has_cotangent:
        hint = "the gradient of a loss with respect to the output; random numbers show mistakes that ones hide"
        raise MissingField.at("/grad_output", "grad_output or grad_logsumexp beside gradients", "neither", hint)
    if spec.grad_logsumexp is not None and spec.normalization != "softmax":
        expected = f"no grad_logsumexp beside normalization {spec.normalization}"
        raise FieldConflict.at("/grad_logsumexp", expected, "both")
    wanted: list[FieldGradient] = []
    for name in FIELDS:
        found = list(_leaves(getattr(spec, name), name, name)) if name in asked else []
        if not found and PREFIX + name in spec.include:
            raise MissingField.at(f"/{name}", f"an array in {name}, as include has {PREFIX}{name}", "none")
        wanted += found
    output = _output_cotangent(spec, roles, layout, dtype, single_query=single_query)
    return Gradients(tuple(wanted), output, _logsumexp_cotangent(spec, frame))


def _leaves(value: Any, place: str, field: str) -> Iterator[FieldGradient]:
    """The gradients of a field, of each array in it if it is an object."""
    if not is_dataclass(value):
        array = np.asarray(value)
        yield FieldGradient(place, array.shape, field_types(AttentionSpec)[field] == _OPERAND)
        return
    kind: Any = type(value)
    declared = field_types(kind)
    for inner in fields(value):
        item = getattr(value, inner.name)
        if is_dataclass(item):
            yield from _leaves(item, f"{place}.{inner.name}", field)
        elif isinstance(item, np.ndarray):
            yield FieldGradient(f"{place}.{inner.name}", item.shape, declared[inner.name] == _OPERAND)


def _output_cotangent(
    spec: AttentionSpec, roles: Roles, layout: Layout, dtype: np.dtype, *, single_query: bool
) -> np.ndarray | None:
    """The cotangent of the output with the axes of `Gradients.output`. Errors: those of `cast`, ShapeMismatch."""
    given = spec.grad_output
    if given is None:
        return None
    h, _, b, q, _, _, e = roles.sizes
    features = e if "h" in layout else h * e if roles.output_map is None else roles.output_map.features
    lengths = {"b": b, "h": h, "l": q, "d": features}
    axes = layout.replace("l", "") if single_query else layout
    wanted = tuple(lengths[axis] for axis in axes)
    if given.shape != wanted:
        raise ShapeMismatch.of("/grad_output", f"{shape(wanted)}, as output", given)
    array = cast(given, dtype, "/grad_output")
    if single_query:
        array = array.reshape(*(lengths[axis] for axis in layout))
    return canonical(array, layout, h if "h" in layout else None)


def _logsumexp_cotangent(spec: AttentionSpec, frame: Frame) -> np.ndarray | None:
    """The cotangent of the logsumexp, (b, h, q). Errors: those of `cast`, ShapeMismatch."""
    given = spec.grad_logsumexp
    if given is None:
        return None
    lengths = frame.sizes.by_letter
    axes = "".join(axis for axis in "bh" if axis in frame.axes) + "q"
    wanted = tuple(lengths[axis] for axis in axes)
    if given.shape != wanted:
        raise ShapeMismatch.of("/grad_logsumexp", f"{shape(wanted)}, as logsumexp", given)
    full = tuple(lengths[axis] for axis in "bhq")
    return cast(given, frame.dtype, "/grad_logsumexp").reshape(full)
