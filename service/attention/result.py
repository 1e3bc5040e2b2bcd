"""From what a backend computed to the result: arrays in the axes and types of the request, and the metadata."""

from __future__ import annotations

from typing import Any, Final, NamedTuple, cast

import numpy as np

from service.attention import shapes
from service.attention.arrays import all_finite, wider
from service.attention.outputs import OUTPUTS
from service.attention.plan import Notice, Plan
from service.attention.spec import Output
from service.errors import Overflow

OUTPUT: Final = "output"
# The keys of the largest weights, beside `attention_weights` with top_k.
TOP_INDICES: Final = "top_indices"


class Computed(NamedTuple):
    """What a backend returns for a plan, heads before tokens.

    arrays: `output` (b, q, out), or (b, h, q, e) if the layout has heads; what the plan includes, with the shapes of
            `output_shape`; with top_k also `top_indices`, of the shape of attention_weights
    kernel: the name of the code path that ran
    finite: True if every number is known to be finite, so that the arrays need not be checked
    """

    arrays: dict[str, np.ndarray]
    fully_masked_rows: int
    backend: str
    device: str
    kernel: str
    notices: tuple[Notice, ...] = ()
    finite: bool = False


class Metadata(NamedTuple):
    """What was computed, where and how. fully_masked_rows: of the b·h·q rows"""

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
    scale: float
    fully_masked_rows: int
    warnings: tuple[Notice, ...]


class Result:
    """The result of a request: arrays with the names and axes of the API, and metadata.

    arrays: `top_weights` is a dict of indices and values; everything else is an ndarray
    facts: the metadata, by name
    """

    __slots__ = ("arrays", "facts")

    def __init__(self, arrays: dict[str, Any], facts: dict[str, Any]) -> None:
        self.arrays = arrays
        self.facts = facts

    @property
    def nbytes(self) -> int:
        """Memory of all arrays, in bytes."""
        return sum(
            sum(part.nbytes for part in value.values()) if isinstance(value, dict) else value.nbytes
            for value in self.arrays.values()
        )

    @property
    def metadata(self) -> Metadata:
        """What was computed, where and how."""
        return Metadata(**self.facts)

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
        arrays[name] = _with_request_axes(name, array if computed.finite else _typed(name, array, plan), plan)
    if TOP_INDICES in arrays:
        arrays["top_weights"] = {"indices": arrays.pop(TOP_INDICES), "values": arrays.pop("attention_weights")}
    facts = {
        "backend": computed.backend,
        "device": computed.device,
        "dtype": plan.dtype_name,
        "kernel": computed.kernel,
        **plan.facts,
        "fully_masked_rows": computed.fully_masked_rows,
        "warnings": plan.notices + computed.notices,
    }
    return Result(arrays, facts)


def overflow(plan: Plan, name: str) -> Overflow:
    """The error for numbers that their type cannot hold. name: what they are, like `scores`"""
    expected = f"inputs whose {name} are finite in {plan.dtype_name}"
    return Overflow.at("", expected, "numbers too large for it", wider(plan.dtype))


def _typed(name: str, array: np.ndarray, plan: Plan) -> np.ndarray:
    """The array in the type that it is returned in. Errors: Overflow."""
    if name == TOP_INDICES:
        return array
    row = None if name == OUTPUT else OUTPUTS[cast(Output, name)]
    typed = array if row and row.in_compute_dtype else array.astype(plan.dtype, copy=False)
    # The maximum is NaN if any number is. ravel("K") copies nothing: it takes the numbers in the order of memory.
    good = typed.max() < np.inf if row and row.may_be_minus_infinity else all_finite(typed.ravel("K"))
    if not good:
        raise overflow(plan, name)
    return typed


def _with_request_axes(name: str, array: np.ndarray, plan: Plan) -> np.ndarray:
    """Drop the axes that the request does not show, and put the others in its order."""
    if name == OUTPUT:
        whole: np.ndarray = array[0, 0] if plan.single_query else shapes.from_canonical(array, plan.layout)
        return whole
    axes, chosen = plan.score_axes, plan.selection
    row = OUTPUTS[cast(Output, "attention_weights" if name == TOP_INDICES else name)]
    has_heads = row.keeps_heads or ("h" in axes.names and not (row.averaged and chosen.average_heads))
    shown: np.ndarray = array if has_heads else array[:, 0]
    shown = shown if "b" in axes.names else shown[0]
    if row.is_score_matrix and plan.single_query:
        return shown[..., 0, :]
    has_top_k = row is OUTPUTS["attention_weights"] and chosen.top_k is not None  # these rows are never swapped
    return shown.swapaxes(-1, -2) if row.is_score_matrix and axes.swapped and not has_top_k else shown
