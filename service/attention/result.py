"""What comes back: arrays brought to the axes that the request used, and the metadata."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from service.attention import shapes
from service.attention.arrays import wider
from service.attention.plan import Notice, Plan
from service.attention.spec import SCORE_MATRICES
from service.errors import Overflow

# Where a masked score, or the logsumexp of a row that sees nothing, is -inf by definition.
MAY_BE_MINUS_INFINITY = frozenset({"masked_scores", "logsumexp"})


@dataclass(frozen=True, slots=True)
class Computed:
    """What a backend returns for a plan, heads before tokens.

    arrays: `output` (b, q, out), or (b, h, q, e) where the layout has heads; score matrices (b, h, q, k);
            query, key, value, head_outputs (b, h, l, d); logsumexp (b, h, q); only what the plan includes
    kernel: the name of the code path that ran
    """

    arrays: dict[str, np.ndarray]
    fully_masked_rows: int
    backend: str
    device: str
    kernel: str
    notices: tuple[Notice, ...] = ()


@dataclass(frozen=True, slots=True)
class Metadata:
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


@dataclass(frozen=True, slots=True)
class Result:
    """An answer: arrays named and shaped as the API says, and the metadata."""

    arrays: dict[str, np.ndarray]
    metadata: Metadata


def make_result(plan: Plan, computed: Computed) -> Result:
    """Errors: Overflow for a returned number that is not finite (-inf from masking aside)."""
    arrays = {name: _to_wire(name, array, plan) for name, array in computed.arrays.items()}
    for name, array in arrays.items():
        good = np.isfinite(array)
        if not good.all() and not (name in MAY_BE_MINUS_INFINITY and (good | np.isneginf(array)).all()):
            raise overflow(plan, name)
    sizes = plan.sizes
    metadata = Metadata(
        backend=computed.backend,
        device=computed.device,
        dtype=plan.dtype.name,
        kernel=computed.kernel,
        num_heads=sizes.num_heads,
        num_kv_heads=sizes.num_kv_heads,
        batch_size=sizes.batch_size,
        query_length=sizes.query_length,
        key_length=sizes.key_length,
        head_dim=sizes.head_dim,
        value_dim=sizes.value_dim,
        scale=plan.scale,
        fully_masked_rows=computed.fully_masked_rows,
        warnings=plan.notices + computed.notices,
    )
    return Result(arrays, metadata)


def overflow(plan: Plan, name: str) -> Overflow:
    """The error for a result that the computing type cannot hold."""
    expected = f"inputs whose {name} are finite in {plan.dtype.name}"
    return Overflow.at("", expected, "numbers too large for it", wider(plan.dtype))


def _to_wire(name: str, array: np.ndarray, plan: Plan) -> np.ndarray:
    """Drop the axes that the request does not show, and put the others in its order."""
    if name == "output":
        whole: np.ndarray = array[0, 0] if plan.single_query else shapes.from_canonical(array, plan.layout)
        return whole
    names = plan.score_axes.names
    shown: np.ndarray = array if "h" in names else array[:, 0]
    shown = shown if "b" in names else shown[0]
    if name in SCORE_MATRICES and plan.single_query:
        shown = shown[..., 0, :]
    elif name in SCORE_MATRICES and plan.score_axes.swapped:
        shown = shown.swapaxes(-1, -2)
    return shown
