"""What comes back: arrays brought to the axes that the request used, and the metadata."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from service.attention import shapes
from service.attention.arrays import all_finite, wider
from service.attention.plan import Notice, Plan
from service.attention.spec import ROW_STATISTICS, SCORE_MATRICES, STAGES
from service.errors import Overflow

# Returned in the computing type; all else in the plan's own.
COMPUTED = frozenset({*STAGES, *ROW_STATISTICS, "received"})
# Where a masked score, or the logsumexp of a row that sees nothing, is -inf by definition.
MAY_BE_MINUS_INFINITY = frozenset({"masked_scores", "logsumexp"})


class Computed(NamedTuple):
    """What a backend returns for a plan, heads before tokens.

    arrays: only what the plan includes: `output` (b, q, out), or (b, h, q, e) where the layout has heads; score
            matrices (b, h, q, k), logsumexp and entropy (b, h, q), received (b, h, k), cut as the plan's selection
            says, h being 1 where heads are averaged; with top_k attention_weights (b, h, q, top_k) and `top_indices`;
            query, key, value, head_outputs and present_* (b, h, l, d)
    kernel: the name of the code path that ran
    finite: whether it is known that every number is, so that nobody needs to look
    """

    arrays: dict[str, np.ndarray]
    fully_masked_rows: int
    backend: str
    device: str
    kernel: str
    notices: tuple[Notice, ...] = ()
    finite: bool = False


class Metadata(NamedTuple):
    """What was done, exactly. The counts are over b·h·q."""

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
    """An answer: arrays named and shaped as the API says, and what was done.

    arrays: `top_weights` is a dict of indices and values; everything else is an ndarray
    facts: the metadata, by name
    """

    __slots__ = ("arrays", "facts")

    def __init__(self, arrays: dict[str, Any], facts: dict[str, Any]) -> None:
        self.arrays = arrays
        self.facts = facts

    @property
    def nbytes(self) -> int:
        """Memory of all arrays."""
        return sum(
            sum(part.nbytes for part in value.values()) if isinstance(value, dict) else value.nbytes
            for value in self.arrays.values()
        )

    @property
    def metadata(self) -> Metadata:
        """What was done."""
        return Metadata(**self.facts)

    @property
    def output(self) -> np.ndarray:
        """The output, in the layout of the request."""
        output: np.ndarray = self[OUTPUT]
        return output

    def __getitem__(self, name: str) -> Any:
        """An array by its name in `include`."""
        return self.arrays[name]


OUTPUT = "output"


def make_result(plan: Plan, computed: Computed) -> Result:
    """Errors: Overflow for a returned number that its type cannot hold (-inf from masking aside)."""
    arrays: dict[str, Any] = {}
    for name, array in computed.arrays.items():
        arrays[name] = _to_wire(name, array if computed.finite else _typed(name, array, plan), plan)
    if "top_indices" in arrays:
        arrays["top_weights"] = {"indices": arrays.pop("top_indices"), "values": arrays.pop("attention_weights")}
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
    """The error for a result that its type cannot hold."""
    expected = f"inputs whose {name} are finite in {plan.dtype_name}"
    return Overflow.at("", expected, "numbers too large for it", wider(plan.dtype))


def _typed(name: str, array: np.ndarray, plan: Plan) -> np.ndarray:
    """The array in the type that it is returned in. Errors: Overflow."""
    if name == "top_indices":
        return array
    typed = array if name in COMPUTED else array.astype(plan.dtype, copy=False)
    # NaN is the largest of numbers. In the order of its memory nothing of an array is copied.
    good = typed.max() < np.inf if name in MAY_BE_MINUS_INFINITY else all_finite(typed.ravel("K"))
    if not good:
        raise overflow(plan, name)
    return typed


def _to_wire(name: str, array: np.ndarray, plan: Plan) -> np.ndarray:
    """Drop the axes that the request does not show, and put the others in its order."""
    if name == OUTPUT:
        whole: np.ndarray = array[0, 0] if plan.single_query else shapes.from_canonical(array, plan.layout)
        return whole
    names, chosen = plan.score_axes.names, plan.selection
    has_heads = "h" in names and not (chosen.average_heads and name in ("attention_weights", "top_indices", "received"))
    if name.startswith("present_"):
        has_heads = True
    shown: np.ndarray = array if has_heads else array[:, 0]
    shown = shown if "b" in names else shown[0]
    ranked = name == "top_indices" or (name == "attention_weights" and chosen.top_k is not None)
    if (name in SCORE_MATRICES or ranked) and plan.single_query:
        shown = shown[..., 0, :]
    elif name in SCORE_MATRICES and not ranked and plan.score_axes.swapped:
        shown = shown.swapaxes(-1, -2)
    return shown
