"""By which other weights parts were merged, if what came back is right for these: a fact about all rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Final

import numpy as np

from attention_service.backends.base import Backend, Check
from attention_service.comparison.calls.explain import agrees
from attention_service.comparison.calls.moves import Suspect
from attention_service.comparison.calls.question import CallQuestion
from attention_service.comparison.errors import distances
from attention_service.comparison.rules import CORRECT
from attention_service.comparison.wrong import BITS, bits_of, shown
from attention_service.engines.call import Merge
from attention_service.engines.partial import State, merge
from attention_service.schemas.compare import Fact

# Parts that are tried one by one.
MOST: Final = 16


def merge_fact(
    asked: CallQuestion, wrong: list[int], limits: Mapping[str, float], backend: Backend, check: Check
) -> Fact | None:
    """The fact about how parts were merged. wrong: the rows that are, the worst first; limits: of each array"""
    call, sent = asked.call, dict(asked.actual or {})
    assert isinstance(call, Merge)
    right = merge(call.parts, call.base, names=call.names)
    apart = {name: distances(array[:, 0], want) for name, array, want in _pairs(sent, right)}
    bits = sum(float(bits_of(one / (CORRECT * limits[name])).sum()) for name, one in apart.items())
    if bits < BITS:
        return None
    outputs = replace(asked, actual={"output": sent["output"]}) if "output" in sent else None
    has_right_sums = "logsumexp" in apart and bool((apart["logsumexp"] <= CORRECT * limits["logsumexp"]).all())
    for said, other in _other_merges(call):
        check()
        for question in (asked, outputs if has_right_sums else None):
            if question is not None and agrees(question, Suspect(other), wrong[0], backend, check) is not None:
                message = f"What came back is right for other parts: {said}."
                return Fact(name="merged_otherwise", array="output", message=message, numbers={})
    return None if "output" not in sent else _fitted(call, right, sent["output"][:, 0], limits["output"], check)


def _pairs(sent: Mapping[str, np.ndarray], right: State) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """What was sent and what is right, by name."""
    for name, array in (("output", right.output), ("logsumexp", right.logsumexp)):
        if name in sent:
            yield name, sent[name].astype(np.float64), array


def _other_merges(call: Merge) -> Iterator[tuple[str, Merge]]:
    """Other parts that a kernel may merge."""
    sums = np.stack([np.asarray(part.logsumexp, np.float64) for part in call.parts])
    is_empty = np.isinf(sums)
    sums = np.where(is_empty, -np.inf, sums)
    count = len(sums)

    def by(other: np.ndarray) -> Merge:
        hidden = np.where(is_empty, -np.inf, other)
        return call._replace(parts=[State(one.output, row) for one, row in zip(call.parts, hidden, strict=True)])

    for part in range(min(count, MOST)) if count > 1 else ():
        yield f"part {part} is left out", by(np.where(np.arange(count)[:, None, None] == part, -np.inf, sums))
        twice = [*call.parts, call.parts[part]]
        yield f"part {part} counts twice", call._replace(parts=twice, names=[*call.names, call.names[part]])
    largest = np.arange(count)[:, None, None] == sums.argmax(axis=0)
    yield "only the part with the largest logsumexp counts", by(np.where(largest, sums, -np.inf))
    for axis, what in enumerate(("part", "row", "head")):
        for step in (1, -1):
            yield f"{what} i has the logsumexp of {what} i{step:+d}", by(np.roll(sums, -step, axis=axis))
    with np.errstate(divide="ignore", invalid="ignore"):
        yield (
            "logsumexps are the weights themselves",
            by(np.log(np.abs(sums)) / np.log(2 if call.base == "2" else np.e)),
        )
    yield "logsumexps have the other sign", by(-sums)


def _fitted(call: Merge, right: State, sent: np.ndarray, limit: float, check: Check) -> Fact | None:
    """The fact that each row is a sum of the parts by other weights, which are fitted."""
    parts = np.stack([np.where(np.isinf(one.logsumexp)[..., None], 0, one.output) for one in call.parts])
    parts = parts.astype(np.float64).transpose(1, 2, 3, 0)  # n, h, e, parts
    tolerance = CORRECT * limit
    apart = distances(sent, right.output)
    rows = np.argwhere((apart > tolerance).any(axis=-1))
    bits, first = 0.0, None
    for row, head in rows:
        check()
        if not np.isfinite(sent[row, head]).all():
            return None
        weights, *_ = np.linalg.lstsq(parts[row, head], sent[row, head].astype(np.float64), rcond=None)
        if (distances(parts[row, head] @ weights, sent[row, head].astype(np.float64)) > tolerance).any():
            return None
        each = bits_of(apart[row, head] / tolerance)
        bits += max(0.0, float(each.sum() - len(weights) * each.max()))
        if first is None or apart[row, head].max() > apart[first[0], first[1]].max():
            first = row, head, weights
    if bits < BITS or first is None:
        return None
    row, head, weights = first
    errors = tolerance * np.linalg.norm(np.linalg.pinv(parts[row, head]), axis=1)
    listed = ", ".join(map(shown, weights[:MOST].tolist(), errors.tolist()))
    message = f"Each wrong row is a sum of the parts by other weights: those of row {row}, head {head} are {listed}."
    numbers = {"row": [float(row)], "head": [float(head)], "weights": weights[:MOST].tolist()}
    return Fact(name="part_weights", array="output", message=message, numbers=numbers)
