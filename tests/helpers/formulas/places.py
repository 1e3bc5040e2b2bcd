"""Wrong outputs that have no name: right numbers in other places, and scores that another function caps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np

from tests.helpers.formulas.attention import Answer, Attention
from tests.helpers.formulas.table import Mistake, unnamed

# Right numbers in other places, or of other entries, in the place of the right ones or added to them.
# These are the facts and the known mistakes that say so.
PLACES: Final = (
    *("moved", "permuted", "reordered", "elsewhere"),
    *("heads.permuted", "heads.reversed", "output.packed", "output.unmoved"),
)


def at(change: Callable[[Attention, np.ndarray], np.ndarray | None]) -> Mistake:
    def made(a: Attention) -> Answer | None:
        changed = change(a, a.answer()[0])
        return None if changed is None else (changed, None)

    return made


def _order(a: Attention, length: int) -> np.ndarray:
    """Another order of so many things: shifted, reversed, in pairs, or any."""
    n = np.arange(length)
    shifted = (n + int(a.random.integers(1, length))) % length
    kinds = shifted, n[::-1], np.minimum(n ^ 1, length - 1), a.random.permutation(length)
    found = kinds[a.random.integers(4)]
    return shifted if (found == n).all() else found


def _added(out: np.ndarray, other: np.ndarray) -> np.ndarray | None:
    """The right numbers with others; None if the others are the same, so that all are doubled, which has a name."""
    apart = np.abs(other - out).max(initial=0.0)
    return out + other if apart > np.abs(out).max(initial=0.0) / 64 else None


def _any_rows(a: Attention, out: np.ndarray) -> np.ndarray:
    return out.reshape(-1, out.shape[3])[a.random.permutation(out[..., 0].size)].reshape(out.shape)


# mypy infers no type for a lambda with a default.
for _axis, (_what, _needs) in enumerate(
    (("batch entries", ("batches",)), ("heads", ("heads",)), ("rows", ()), ("features", ()))
):
    unnamed(f"other {_what}", PLACES, *_needs)(
        at(lambda a, out, axis=_axis: out.take(_order(a, out.shape[axis]), axis=axis))  # type: ignore[misc]
    )
    unnamed(f"other {_what} added", PLACES, *_needs)(
        at(lambda a, out, axis=_axis: _added(out, out.take(_order(a, out.shape[axis]), axis=axis)))  # type: ignore[misc]
    )
unnamed("any rows", PLACES)(at(_any_rows))
unnamed("any rows added", PLACES)(at(lambda a, out: _added(out, _any_rows(a, out))))
unnamed("rows of the last tile added", PLACES, "square")(
    at(lambda a, out: out + np.where(np.arange(out.shape[2])[:, None] >= 16, np.roll(out, 16, axis=2), 0))
)


@unnamed("half of the features of another row", PLACES)
def _half_features(a: Attention) -> Answer:
    out = a.answer()[0]
    half = out.shape[3] // 2
    return np.concatenate(
        [out[..., :half], np.roll(out[..., half:], int(a.random.integers(1, 4)), axis=2)], axis=3
    ), None


@unnamed("half of the features of another head", PLACES, "heads")
def _half_of_head(a: Attention) -> Answer:
    out = a.answer()[0]
    half = out.shape[3] // 2
    return np.concatenate([out[..., :half], np.roll(out[..., half:], 1, axis=1)], axis=3), None


@unnamed("rows and features swapped in memory", PLACES)
def _swapped(a: Attention) -> Answer:
    out = a.answer()[0]
    return np.ascontiguousarray(out.swapaxes(2, 3)).reshape(out.shape), None


@unnamed("heads and rows swapped in memory", PLACES, "heads", "ungrouped")
def _swapped_heads(a: Attention) -> Answer:
    out = a.answer()[0]
    return np.ascontiguousarray(out.swapaxes(1, 2)).reshape(out.shape), None


# A cap that is another function: told if the logsumexp or the weights are sent.
CAPS: Final[dict[str, Callable[[np.ndarray, float], np.ndarray]]] = {
    "clipped": lambda x, cap: np.clip(x, -cap, cap),
    "x / (1 + |x|)": lambda x, cap: x / (1 + np.abs(x) / cap),
    "arctangent": lambda x, cap: cap * np.arctan(x / cap),
    "another cap": lambda x, cap: 2 * cap * np.tanh(x / cap / 2),
}


def capped_by(a: Attention, function: Callable[[np.ndarray, float], np.ndarray]) -> dict[str, np.ndarray]:
    """Output, logsumexp and weights with another function in the place of cap · tanh(x / cap)."""
    assert a.cap is not None
    scores = function(a.products() * a.scale, a.cap) + sum(a.added.values())
    output, total = a.answer(scores)
    assert total is not None
    with np.errstate(invalid="ignore"):
        weights = np.where(a.seen(), np.exp(scores - np.where(np.isneginf(total), 0, total)[..., None]), 0)
    return {"output": output, "logsumexp": total, "attention_weights": weights}
