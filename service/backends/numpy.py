"""The NumPy backend: the definition, written out (Vaswani et al. 2017, section 3.2.1).

Shapes in comments: b batch, h heads, g key/value heads, q and k tokens, d and e features.
"""

from __future__ import annotations

import numpy as np

from service.attention.operands import Operand
from service.attention.plan import Notice, Plan
from service.attention.projections import DenseMap
from service.attention.result import Computed, overflow
from service.attention.shapes import join_heads, split_heads

ZERO_SUM = Notice("zero_sum", "the visible scores of some rows sum to 0: their weights and outputs are 0")


# Overflow is found by looking at the numbers, with an error that says what to do; a warning would add nothing.
@np.errstate(over="ignore", invalid="ignore", divide="ignore", under="ignore")
def execute(plan: Plan) -> Computed:
    """Every number on the way, each as a whole matrix."""
    query = _heads(plan.operands.query, plan.sizes.num_heads)  # b h q d
    key = _heads(plan.operands.key, plan.sizes.num_kv_heads)  # b g k d
    value = _heads(plan.operands.value, plan.sizes.num_kv_heads)  # b g k e
    scores = _grouped_matmul(query, key.swapaxes(-1, -2))  # b h q k
    scaled = scores * plan.dtype.type(plan.scale)
    visible = _visible(plan)
    masked = _masked(scaled, visible, plan)
    weights, logsumexp, notices = _normalize(masked, visible, plan)
    head_outputs = _grouped_matmul(weights, value)  # b h q e
    arrays = {
        "attention_weights": weights,
        "scores": scores,
        "scaled_scores": scaled,
        "masked_scores": masked,
        "logsumexp": logsumexp,
        "query": query,
        "key": key,
        "value": value,
        "head_outputs": head_outputs,
    }
    return Computed(
        arrays={"output": _output(head_outputs, plan)} | {name: arrays[name] for name in sorted(plan.include)},
        fully_masked_rows=_fully_masked_rows(visible, plan),
        backend="numpy",
        device="cpu",
        kernel="dense",
        notices=notices,
    )


def _heads(operand: Operand, heads: int) -> np.ndarray:
    """The operand as (b, heads, l, d), projected if it has a map."""
    return operand.array if operand.map is None else split_heads(_apply(operand.map, operand.array), heads)


def _apply(linear: DenseMap, tokens: np.ndarray) -> np.ndarray:
    """y = x Wᵀ + bias over the last axis: (b, l, in) -> (b, l, out)."""
    mapped: np.ndarray = tokens @ linear.weight.T
    return mapped if linear.bias is None else mapped + linear.bias


def _grouped_matmul(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """(b, h, q, x) @ (b, g, x, y) -> (b, h, q, y), where head n of the left meets head n // (h // g) of the right."""
    b, h, q, x = left.shape
    g, y = right.shape[1], right.shape[-1]
    if h != g:
        left, right = left.reshape(b, g, h // g, q, x), right[:, :, None]
    product: np.ndarray = left @ right
    return product.reshape(b, h, q, y)


def _visible(plan: Plan) -> np.ndarray | None:
    """Which scores take part, broadcasting to (b, h, q, k); None where all do."""
    parts = []
    if plan.mask is not None:
        parts.append(plan.mask)
    if plan.bias is not None and np.isneginf(plan.bias).any():
        parts.append(~np.isneginf(plan.bias))
    if plan.query_offset is not None:
        rows = np.arange(plan.sizes.query_length)[:, None] + plan.query_offset[:, None, None, None]  # b 1 q 1
        parts.append(np.arange(plan.sizes.key_length) <= rows)
    visible = None
    for part in parts:
        visible = part if visible is None else visible & part
    return visible


def _masked(scaled: np.ndarray, visible: np.ndarray | None, plan: Plan) -> np.ndarray:
    """Scores with the bias added, and -inf where they are hidden, whatever was there."""
    biased = scaled if plan.bias is None else scaled + plan.bias
    finite = np.isfinite(biased)
    if not finite.all() and (visible is None or not (finite | ~visible).all()):
        raise overflow(plan, "scores")
    return biased if visible is None else np.where(visible, biased, plan.dtype.type(-np.inf))


def _normalize(
    masked: np.ndarray, visible: np.ndarray | None, plan: Plan
) -> tuple[np.ndarray, np.ndarray, tuple[Notice, ...]]:
    """Weights (b, h, q, k) and logsumexp (b, h, q). A row that sees nothing has weights 0 and logsumexp -inf."""
    if plan.normalization == "sum":
        counted = masked if visible is None else np.where(visible, masked, plan.dtype.type(0))
        total = counted.sum(axis=-1, keepdims=True)
        if not np.isfinite(total).all():
            raise overflow(plan, "sums of scores")
        weights = np.divide(counted, total, out=np.zeros_like(counted), where=total != 0)
        unseen = False if visible is None else ~np.broadcast_to(visible, masked.shape).any(axis=-1, keepdims=True)
        return weights, total[..., 0], (ZERO_SUM,) if ((total == 0) & ~np.asarray(unseen)).any() else ()
    largest = masked.max(axis=-1, keepdims=True)
    shifted = masked - np.where(np.isneginf(largest), plan.dtype.type(0), largest)
    exponentials = np.exp(shifted, out=shifted)
    total = exponentials.sum(axis=-1, keepdims=True)  # at least 1, or 0 where nothing is visible
    weights = np.divide(exponentials, total, out=exponentials, where=total != 0)
    return weights, (largest + np.log(total))[..., 0], ()


def _output(head_outputs: np.ndarray, plan: Plan) -> np.ndarray:
    """Join the heads, unless the layout shows them, and apply the output map."""
    if "h" in plan.layout:
        return head_outputs
    joined = join_heads(head_outputs)
    return joined if plan.operands.output_map is None else _apply(plan.operands.output_map, joined)


def _fully_masked_rows(visible: np.ndarray | None, plan: Plan) -> int:
    """Rows of b·h·q that see no key."""
    if visible is None:
        return 0
    rows = ~visible.any(axis=-1)  # each axis full or 1
    sizes = plan.sizes
    return int(np.broadcast_to(rows, (sizes.batch_size, sizes.num_heads, sizes.query_length)).sum())
