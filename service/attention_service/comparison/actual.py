"""The arrays that a kernel returned: checked against the request, and in the axes of a case."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from attention_service.attention.arrays import is_number
from attention_service.attention.gradients import FIELDS as GRADIENT_FIELDS
from attention_service.attention.gradients import PREFIX
from attention_service.attention.outputs import FORWARD, OUTPUT, OUTPUTS, outputs_of, row_of
from attention_service.attention.plan import Plan
from attention_service.attention.result import request_axes
from attention_service.comparison.baseline import FIELDS
from attention_service.errors import FieldConflict, InvalidArray, InvalidValue, MissingField, ShapeMismatch, shape

# Gradients, some of them objects of arrays.
GRADIENTS: Final = (*sorted(outputs_of("gradients")), *(PREFIX + name for name in GRADIENT_FIELDS))
# Bits are no numbers that a kernel rounds.
NAMES: Final = (OUTPUT, *(name for name in FORWARD if not OUTPUTS[name].is_integer), *GRADIENTS)
# What an axis counts, by its letter in the table of outputs and in layouts.
AXES: Final = {
    "b": "batch entry",
    "h": "head",
    "g": "key/value head",
    "q": "row",
    "l": "row",
    "k": "key",
    "n": "key",
    "d": "feature",
    "e": "feature",
}


@dataclass(frozen=True)
class Actual:
    """What a kernel returned.

    as_sent:   float64 arrays by name, in the axes of the request; a logsumexp of base 2 as one of base e. Of some rows
               only: as they came
    canonical: those that mutants change, with axes (b, h, q, …); an output of an output map is (b, 1, q, out)
    """

    as_sent: Mapping[str, np.ndarray]
    canonical: Mapping[str, np.ndarray]


def check_names(actual: Mapping[str, np.ndarray], field: str, *, top_k: int | None) -> None:
    """Errors: InvalidValue for a name that is not in NAMES, FieldConflict for top_k, MissingField for none at all."""
    if not actual:
        raise MissingField.at(f"/{field}", f"at least one of {', '.join(NAMES)}", "none", "leave actual out for power")
    for name in actual:
        if name.partition(".")[0] not in NAMES:
            raise InvalidValue.of(f"/{field}/{name}", f"one of {', '.join(NAMES)}", name)
    if top_k is not None:
        raise FieldConflict.at("/top_k", "no top_k in a comparison", "top_k", "compare attention_weights")


def is_gradient(name: str) -> bool:
    """True for the name of a gradient, or of an array in one."""
    return name.startswith(PREFIX)


def read_actual(
    given: Mapping[str, np.ndarray], plan: Plan, *, base2: bool, field: str = "actual", rows: np.ndarray | None = None
) -> Actual:
    """The arrays of a kernel. plan: includes their names; rows: those that the canonical arrays have, None for all

    Errors: InvalidArray for anything but numbers, ShapeMismatch.
    """
    sent: dict[str, np.ndarray] = {}
    for name, array in given.items():
        check_array(array, shown_shape(name, plan), f"/{field}/{name}")
        sent[name] = array if rows is not None else _as_float(array, is_base2=base2 and name == "logsumexp")
    chosen = plan.selection
    selects = chosen.heads is not None or chosen.queries is not None or chosen.average_heads
    names = [name for name in FIELDS if name in sent and (name == OUTPUT or not selects)]
    found = {name: canonical(sent[name], name, plan) for name in names}
    if rows is not None:
        found = {
            name: _as_float(array[:, :, rows], is_base2=base2 and name == "logsumexp") for name, array in found.items()
        }
    return Actual(sent, found)


def check_array(array: np.ndarray, wanted: tuple[int, ...], pointer: str) -> None:
    """Errors: InvalidArray for anything but numbers, ShapeMismatch. wanted: the shape in a response"""
    if not is_number(array.dtype):
        raise InvalidArray.at(pointer, "numbers", f"{array.dtype} of shape {array.shape}")
    if array.shape != wanted:
        raise ShapeMismatch.of(pointer, f"{shape(wanted)}, as this request returns it", array)


def _as_float(array: np.ndarray, *, is_base2: bool) -> np.ndarray:
    """A copy in float64, a logsumexp in base e."""
    found = array.astype(np.float64)
    if is_base2:
        found *= math.log(2)
    return found


def canonical(array: np.ndarray, name: str, plan: Plan) -> np.ndarray:
    """An array of a response with the axes (b, h, q, …). An output of an output map is (b, 1, q, out)."""
    axes, shown = request_axes(name, plan)
    missing = "".join(letter for letter in axes if letter not in shown)
    have = missing + shown
    found = array.reshape((1,) * len(missing) + array.shape).transpose([have.index(letter) for letter in axes])
    if name != OUTPUT or "h" in axes:
        return found
    b, q, features = found.shape
    heads = 1 if plan.roles.output_map else plan.sizes.num_heads
    return found.reshape(b, q, heads, features // heads).transpose(0, 2, 1, 3)


def axes_of(name: str, plan: Plan, *, as_sent: bool = False) -> tuple[str, ...]:
    """What each axis of an array counts, in canonical order, or as the request has them."""
    canonical_axes = "bhqe" if name == OUTPUT else row_of(name).axes
    letters = request_axes(name, plan)[1] if as_sent else canonical_axes
    chosen = plan.selection
    is_part = {"h": chosen.heads is not None, "q": chosen.queries is not None}
    selects = name != OUTPUT and row_of(name).is_selected
    return tuple(f"selected {AXES[one]}" if selects and is_part.get(one) else AXES[one] for one in letters)


def shown_shape(name: str, plan: Plan) -> tuple[int, ...]:
    """The shape of an output as the request shows it."""
    axes, shown = request_axes(name, plan)
    lengths = dict(zip(axes, plan.output_shape(name), strict=True))
    return tuple(lengths[letter] for letter in shown)
