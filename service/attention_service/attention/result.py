"""From what a backend computed to the result: arrays in the axes and types of the request, and the metadata."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from attention_service.attention.arrays import all_finite, is_float, wider
from attention_service.attention.outputs import OUTPUT, OUTPUTS, TOP_INDICES, row_of
from attention_service.attention.plan import Notice, Plan
from attention_service.attention.shapes import reordered
from attention_service.attention.visibility import causes
from attention_service.errors import Overflow


class Computed(NamedTuple):
    """What a backend returns for a plan, heads before tokens.

    arrays: `output`, what the plan includes, and with top_k also `top_indices`, with the shapes of `output_shape`
    kernel: the name of the code path that ran
    """

    arrays: dict[str, np.ndarray]
    fully_masked_rows: int
    backend: str
    device: str
    kernel: str
    notices: tuple[Notice, ...] = ()


@dataclass(frozen=True)
class Metadata:
    """The metadata of a result.

    scale: one number, or one for each head if the request has several
    fully_masked_rows: how many of the b·h·q rows see no key
    hidden_by: the bits of the fields of the request that may hide keys; None if the plan does not include hidden_by
    """

    backend: str
    device: str
    dtype: str
    kernel: str
    num_heads: int
    num_kv_heads: int
    batch_size: int
    query_length: int
    key_length: int
    head_dim: int
    value_dim: int
    scale: float | list[float]
    fully_masked_rows: int
    warnings: tuple[Notice, ...]
    hidden_by: Mapping[str, int] | None = None

    @cached_property
    def present(self) -> Mapping[str, Any]:
        """The fields of an answer by name, without `hidden_by` if it is None. Results of one plan may share them."""
        return {name: value for name, value in vars(self).items() if value is not None}


@dataclass(slots=True)
class Result:
    """The result of a request: arrays with the names and axes of the API, and metadata.

    arrays: `top_weights` is a dict of indices and values; everything else is an ndarray
    """

    arrays: dict[str, Any]
    metadata: Metadata

    @property
    def output(self) -> np.ndarray:
        """The output, in the layout of the request."""
        output: np.ndarray = self[OUTPUT]
        return output

    def __getitem__(self, name: str) -> Any:
        """An array by its name in `include`."""
        return self.arrays[name]


def make_result(plan: Plan, computed: Computed) -> Result:
    """The result of a plan. Errors: Overflow for a returned number that its type cannot hold."""
    arrays: dict[str, Any] = {}
    for name, array in computed.arrays.items():
        typed = _typed(name, array, plan)
        if plan.gradients is None or plan.gradients.named(name) is None:
            arrays[name] = reordered(typed, *request_axes(name, plan))
        else:
            _place(arrays, name.split("."), np.asarray(typed))  # also one number
    if TOP_INDICES in arrays:
        arrays["top_weights"] = {"indices": arrays.pop(TOP_INDICES), "values": arrays.pop("attention_weights")}
    return Result(arrays, make_metadata(plan, computed))


def _place(arrays: dict[str, Any], path: list[str], array: np.ndarray) -> None:
    """Put an array into the objects that its path names."""
    *outer, name = path
    for key in outer:
        arrays = arrays.setdefault(key, {})
    arrays[name] = array


def make_metadata(plan: Plan, computed: Computed) -> Metadata:
    """The metadata of what a backend computed."""
    _, masked, backend, device, kernel, notices = computed
    warnings = plan.notices + notices
    bits = causes(plan.terms) if "hidden_by" in plan.selection.include else None
    scale = plan.scale if plan.head_scales is None else plan.head_scales.tolist()
    return Metadata(backend, device, plan.dtype_name, kernel, *plan.sizes, scale, masked, warnings, bits)


def overflow(plan: Plan, name: str) -> Overflow:
    """The error for numbers that their type cannot hold. name: of these numbers, like `scores`"""
    expected = f"inputs that give finite {name} in {plan.dtype_name}"
    return Overflow.at("", expected, "numbers too large for it", wider(plan.dtype))


def _typed(name: str, array: np.ndarray, plan: Plan) -> np.ndarray:
    """The array in the type that it is returned in. Errors: Overflow."""
    typed = array.astype(plan.output_dtype(name), copy=False)
    if not is_float(typed.dtype):
        return typed
    # The maximum is NaN if any number is. ravel("K") copies nothing: it takes the numbers in the order of memory.
    is_row = name in OUTPUTS
    may_be_minus_infinity = is_row and row_of(name).may_be_minus_infinity
    good = typed.max() < np.inf if may_be_minus_infinity else all_finite(typed.ravel("K"))
    if not good:
        raise overflow(plan, name)
    return typed


def request_axes(name: str, plan: Plan) -> tuple[str, str]:
    """The axes of an output as it is computed, and those that the request shows, in their order."""
    if name == OUTPUT:
        shown = plan.layout.replace("l", "") if plan.single_query else plan.layout
        return "bhld" if "h" in plan.layout else "bld", shown
    axes, chosen, row = plan.score_axes, plan.selection, row_of(name)
    has_heads = row.keeps_heads or ("h" in axes and not (row.averaged and chosen.average_heads))
    leading = ("b" if "b" in axes else "") + (row.axes[1] if has_heads else "")
    tail = axes.lstrip("bh") if row.is_score_matrix else row.axes[2:]
    if tail == "kq" and chosen.top_k is not None and row is OUTPUTS["attention_weights"]:
        tail = "qk"  # the rows of top_weights are never columns
    return row.axes, leading + tail
