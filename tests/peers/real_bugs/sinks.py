"""Bugs of sinks: counted twice or never, in another unit, of another head."""

from __future__ import annotations

from typing import Final

import numpy as np

from tests.peers.real_bugs.parts import (
    BF16,
    F16,
    F32,
    IN_BASE_TWO,
    LOG2E,
    Arrays,
    Bug,
    Fields,
    Head,
    Online,
    Part,
    asks,
    band,
    collected,
    divided,
    flash,
    merged,
    named,
    normal,
    part_of,
    tiles,
)


def _split_with_sink(fields: Fields, *, publishes: bool, unit: float) -> np.ndarray:
    """Splits of 128 keys in base 2. The first one with work has the sink.

    publishes: the first split returns the sink although it is empty; unit: what the sink is multiplied by
    """

    def one(head: Head) -> np.ndarray:
        q, k = head.sizes
        visible = band(q, k, k - q, left=fields["window"]["left"], right=0)
        sink = F32(fields["sinks"][head.h] * unit)
        parts: list[Part] = []
        before_is_empty = True
        for n, keys in enumerate(tiles(k, 128)):
            is_empty = not visible[:, keys].any()
            online = Online(q, head.value.shape[-1])
            if is_empty:
                parts.append((online.sums, np.full(q, sink if n == 0 and publishes else -np.inf, F32)))
                continue
            scores = np.where(visible[:, keys], head.scores(keys) * F32(LOG2E), -np.inf)
            top = np.maximum(scores.max(axis=-1), sink if before_is_empty else -np.inf)
            weights = np.exp2(scores - top[:, None])
            total = weights.sum(axis=-1) + (np.exp2(sink - top) if before_is_empty else 0)
            parts.append((divided(weights @ head.value[keys], total), (top + np.log2(total)) / F32(LOG2E)))
            before_is_empty = False
        if publishes:
            parts[0] = (parts[0][0], parts[0][1] / F32(LOG2E))
        return merged(parts)

    return collected(fields, one)


def sink_in_two_splits(fields: Fields, wrong: bool) -> Arrays:
    return _split_with_sink(fields, publishes=wrong, unit=LOG2E)


def sink_in_another_unit(fields: Fields, wrong: bool) -> Arrays:
    return _split_with_sink(fields, publishes=False, unit=1.0 if wrong else LOG2E)


def _with_sink(head: Head, sink: float, visible: np.ndarray | None = None) -> np.ndarray:
    online = flash(head, visible)
    online.add(np.full((len(head.query), 1), sink, F32), np.zeros((1, head.value.shape[-1]), F32))
    return online.output


def reduction_without_sink(fields: Fields, wrong: bool) -> Arrays:
    def one(head: Head) -> np.ndarray:
        parts = [part_of(head.keys(keys)) for keys in tiles(head.sizes[1], 64)]
        if not wrong:
            parts.append((np.zeros_like(parts[0][0]), np.full(len(head.query), fields["sinks"][head.h], F32)))
        return merged(parts)

    return collected(fields, one)


def sink_by_lane(fields: Fields, wrong: bool) -> Arrays:
    """The rows of a tile are the heads of a group, in the order of (lane, subgroup), their sinks in that of heads."""

    def one(head: Head) -> np.ndarray:
        lanes = np.arange(head.group).reshape(2, -1).T.ravel() if wrong else np.arange(head.group)
        first = head.h // head.group * head.group
        return _with_sink(head, fields["sinks"][first + lanes[head.h - first]])

    return collected(fields, one)


def sink_beside_shifted_sums(fields: Fields, wrong: bool) -> Arrays:
    """Exponentials are 2^8 times as large, so that fp8 holds them; the one of the sink is not."""
    shift = F32(2**8)

    def one(head: Head) -> np.ndarray:
        scores, sink = head.scores(), F32(fields["sinks"][head.h])
        top = np.maximum(scores.max(axis=-1), sink)[:, None]
        weights = np.exp(scores - top) * shift
        total = weights.sum(axis=-1) + np.exp(sink - top[:, 0]) * (1 if wrong else shift)
        return divided(weights @ head.value, total)

    return collected(fields, one)


def sink_over_an_empty_row(fields: Fields, wrong: bool) -> Arrays:
    """The block of the first tile adds exp(sink - largest score); the largest of no score is -100000."""

    def one(head: Head) -> np.ndarray:
        q, k = head.sizes
        visible = band(q, k, k - q, left=fields["window"]["left"], right=0)
        sink = F32(fields["sinks"][head.h])
        parts = []
        for n, keys in enumerate(tiles(k, 64)):
            scores = np.where(visible[:, keys], head.scores(keys), -np.inf)
            top = np.maximum(scores.max(axis=-1), F32(-1e5))
            if n == 0 and not wrong:
                top = np.maximum(top, sink)
            weights = np.exp(scores - top[:, None])
            total = weights.sum(axis=-1) + (np.exp(sink - top) if n == 0 else 0)
            parts.append((top, total, weights @ head.value[keys]))
        largest = np.max([top for top, _, _ in parts], axis=0)
        total = sum(np.exp(top - largest) * part for top, part, _ in parts)
        sums = sum(np.exp(top - largest)[:, None] * part for top, _, part in parts)
        return divided(np.asarray(sums), np.asarray(total))

    return collected(fields, one)


BUGS: Final = (
    Bug(
        "ROCm/rocm-libraries#12227",
        "The sink is counted twice where a window leaves the first split without keys.",
        asks(
            h=8,
            q=16,
            k=512,
            d=128,
            dtype=BF16,
            is_causal=True,
            query_offset=496,
            window={"left": 127},
            sinks=normal(8, mean=3),
        ),
        sink_in_two_splits,
        named("sinks.repeated_per_tile"),
    ),
    Bug(
        "ROCm/rocm-libraries#12229",
        "Scores hold log2(e), the sink that starts the sum does not.",
        asks(
            h=8,
            q=16,
            k=512,
            d=128,
            dtype=BF16,
            is_causal=True,
            query_offset=496,
            window={"left": 127},
            sinks=normal(8, mean=3),
        ),
        sink_in_another_unit,
        named(IN_BASE_TWO, "sinks.base2"),
    ),
    Bug(
        "kekzl/imp#1345",
        "The reduction of splits leaves out the sink.",
        asks(h=8, q=4, k=256, dtype=F16, sinks=normal(8, mean=3)),
        reduction_without_sink,
        named("sinks.absent"),
    ),
    Bug(
        "sgl-project/sgl-kernel-xpu#254",
        "Heads that are packed into rows have the sinks of other heads of their group.",
        asks(b=2, h=16, g=2, q=1, k=300, dtype=BF16, sinks=normal(16, mean=3)),
        sink_by_lane,
    ),
    Bug(
        "ROCm/rocm-libraries#11189",
        "Sums are shifted by 2^8 for fp8, the sink that starts them is not: it counts 256 times less.",
        asks(h=8, g=1, q=64, k=256, d=128, sinks=normal(8, mean=5)),
        sink_beside_shifted_sums,
    ),
    Bug(
        "NVIDIA/TensorRT-LLM#19220",
        "A row without a key in the tile that adds the sink overflows there, and is NaN.",
        asks(
            h=4,
            q=64,
            k=256,
            dtype=BF16,
            is_causal=True,
            query_offset=192,
            window={"left": 150},
            sinks=normal(4, mean=2),
        ),
        sink_over_an_empty_row,
    ),
)
