"""Which rows of a request are looked at, where looking at all of them would take too long."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

import numpy as np

from attention_service.attention.shapes import Sizes
from attention_service.comparison.case import Case
from attention_service.comparison.sample import PRODUCTS, Sample, kept_beside

# A sample has at most so many batch entries, heads and queries, and about so many scores.
MAX_BATCHES: Final = 2
MAX_HEADS: Final = 4
MAX_ROWS: Final = 64
MAX_SCORES: Final = 2**18
# Numbers of the outputs of a sample, which are kept for each mutant.
MAX_OUTPUTS: Final = 2**17
# Numbers of the keys and values of the heads of a sample, unless one head has more.
MAX_OPERANDS: Final = 2**23
WEIGHT_SCORES: Final = 2**16
# Requests of at most so many scores are looked at whole.
WHOLE: Final = 2**15


def most_scores(names: Collection[str]) -> int:
    """How many scores a sample should have; fewer if weights are compared, as those of all mutants are kept."""
    return WEIGHT_SCORES if "attention_weights" in names else MAX_SCORES


def choose_sample(case: Case, wrong: np.ndarray | None, scores: int = MAX_SCORES, outputs: int = MAX_OUTPUTS) -> Sample:
    """A sample with the rows that are most wrong, and with others: first, last, and evenly spread ones.

    wrong: (b, h, q) errors of the output, h being 1 for the output of an output map; None if nothing is known to be
    wrong; scores, outputs: about how many of them a sample may have
    """
    errors = None if wrong is None else np.where(np.isfinite(wrong), wrong, np.inf)
    batches, heads, rows = sample_counts(case.plan.sizes, scores, outputs, needs_all_heads=case.needs_all_heads)
    sizes = case.plan.sizes
    return Sample(
        _chosen(sizes.batch_size, batches, None if errors is None else errors.max(axis=(1, 2))),
        np.arange(heads)
        if case.needs_all_heads
        else _chosen(sizes.num_heads, heads, None if errors is None else errors.max(axis=(0, 2))),
        _chosen(sizes.query_length, rows, None if errors is None else errors.max(axis=(0, 1))),
        kept=kept_beside(case),
    )


def sample_counts(sizes: Sizes, scores: int, outputs: int, *, needs_all_heads: bool) -> tuple[int, int, int]:
    """How many batch entries, heads and queries a sample has. Arguments: as of `choose_sample`

    needs_all_heads: see Case
    """
    width = sizes.head_dim + sizes.value_dim
    all_heads = sizes.batch_size * sizes.num_heads
    is_small = all_heads * sizes.query_length * sizes.value_dim <= outputs
    is_small = is_small and all_heads * sizes.key_length * width <= MAX_OPERANDS
    all_scores = all_heads * sizes.query_length * sizes.key_length
    if is_small and all_scores <= min(WHOLE, scores, PRODUCTS // width):
        return sizes.batch_size, sizes.num_heads, sizes.query_length
    scores = min(scores, max(1, PRODUCTS // width))
    # Of at least two rows: fewer heads and batch entries if these have many scores or operands.
    pairs = max(1, min(scores // 2, MAX_OPERANDS // width) // sizes.key_length)
    heads = sizes.num_heads if needs_all_heads else min(sizes.num_heads, MAX_HEADS, pairs)
    batches = min(sizes.batch_size, max(1, min(MAX_BATCHES, pairs // heads)))
    row = batches * heads
    rows = max(2, min(MAX_ROWS, scores // (row * sizes.key_length), outputs // (row * sizes.value_dim)))
    return batches, heads, min(rows, sizes.query_length)


def smaller(sample: Sample, case: Case, scores: int) -> Sample:
    """A part of a sample with at most so many scores, but two rows."""
    row = len(sample.batches) * len(sample.heads) * case.plan.sizes.key_length
    count = max(2, scores // row)
    if count >= len(sample.rows):
        return sample
    places = np.linspace(0, len(sample.rows) - 1, count).round().astype(np.int64)
    return Sample(sample.batches, sample.heads, sample.rows[places], kept=kept_beside(case))


def _chosen(length: int, count: int, errors: np.ndarray | None) -> np.ndarray:
    """So many indices: half of them those with the largest errors, the others evenly spread, with first and last."""
    if count >= length:
        return np.arange(length)
    worst: list[int] = []
    if errors is not None and errors.max() > 0:
        worst = np.argsort(-errors, stable=True)[: (count + 1) // 2].tolist()
    spread = np.linspace(0, length - 1, count).round().astype(np.int64)
    # Pairs of neighbours, as the edges of tiles and windows differ from one row to the next.
    spread = np.unique(np.concatenate([spread[: -(-count // 2) * 2 : 2], spread[::2] + 1, spread[-1:]]))
    spread = spread[spread < length]
    kept = dict.fromkeys(worst)
    for index in _ends_first(spread):
        if len(kept) >= count:
            break
        kept.setdefault(int(index))
    return np.sort(np.array(list(kept), dtype=np.int64))


def _ends_first(indices: np.ndarray) -> list[int]:
    """Indices so that each beginning of the list is spread, too: first, last, then those between."""
    order = np.argsort([int(f"{i:032b}"[::-1], 2) for i in range(len(indices))], stable=True)
    middle = [int(indices[i]) for i in order]
    return [int(indices[0]), int(indices[-1]), *middle]


def is_whole(case: Case, sample: Sample) -> bool:
    """True if a sample has all rows of a case."""
    sizes = case.plan.sizes
    counts = len(sample.batches), len(sample.heads), len(sample.rows)
    return counts == (sizes.batch_size, sizes.num_heads, sizes.query_length)
