"""Bugs of summer 2026: masks of blocks and of groups of rows, offsets that wrap, results stored in other places."""

from __future__ import annotations

from typing import Final

import numpy as np

from tests.peers.real_bugs.parts import (
    BF16,
    F32,
    LOG2E,
    Arrays,
    Bug,
    Fields,
    Head,
    asks,
    band,
    causal,
    collected,
    divided,
    flash,
    heads_of,
    masked,
    named,
    normal,
    operands,
    returned,
    stale,
    tiles,
)


def causal_by_groups_of_rows(fields: Fields, wrong: bool) -> Arrays:
    """The causal mask is that of the last of four rows, for all four."""

    def visible(head: Head) -> np.ndarray:
        q, k = head.sizes
        rows = np.arange(q)
        return np.arange(k) <= (4 * (rows // 4) + 3 if wrong else rows)[:, None]

    return masked(fields, visible)


def _chosen_blocks(size: int) -> np.ndarray:
    """(q, k): two of four blocks of keys for each block of rows."""
    blocks = np.array([[1, 0, 1, 0], [0, 1, 0, 1], [1, 0, 0, 1], [0, 0, 1, 1]], bool)
    return blocks.repeat(size, axis=0).repeat(size, axis=1)


def blocks_without_a_function(fields: Fields, wrong: bool) -> Arrays:
    """Which blocks are visible is in a table only, and a function of elements masks none: the table is not read."""
    return masked(fields, lambda head: np.ones(head.sizes, bool) if wrong else fields["mask"])


def bias_offset_that_wraps(fields: Fields, wrong: bool) -> Arrays:
    """The offset of a row of the bias has 14 bits here, in the place of 32, and wraps to another row."""

    def one(head: Head) -> np.ndarray:
        q, k = head.sizes
        bias = fields["bias"].astype(F32)
        offsets = np.arange(q) * k
        if wrong:
            offsets %= 2**14
        return flash(head, added=bias.ravel()[offsets[:, None] + np.arange(k)]).output

    return collected(fields, one)


def nothing_visible(fields: Fields, wrong: bool) -> Arrays:
    """No tile of keys is computed: output 0 and logsumexp minus infinity for all rows."""
    query, key, value = operands(fields)
    online = [
        flash(head, np.zeros(head.sizes, bool) if wrong else causal(*head.sizes))
        for head in heads_of(query, key, value)
    ]
    b, h, q, _ = query.shape
    output = returned(fields, np.stack([one.output for one in online]).reshape(b, h, q, -1))
    with np.errstate(divide="ignore"):
        logsumexp = np.stack([one.logsumexp for one in online]).reshape(b, h, q)
    return {"output": output, "logsumexp": logsumexp}


def fragments_of_another_instruction(fields: Fields, wrong: bool) -> Arrays:
    """Registers hold 16 x 16 numbers as four matrices of 8 x 8, and are stored as if the second were the third."""

    def one(head: Head) -> np.ndarray:
        output = flash(head).output
        if wrong:
            rows, features = output.shape
            fragments = output.reshape(rows // 16, 2, 8, features // 16, 2, 8)
            output = fragments.swapaxes(1, 4).reshape(rows, features)
        return output

    return collected(fields, one)


def powers_beyond_float8(fields: Fields, wrong: bool) -> Arrays:
    """Weights are kept times 256 in float8, which ends at 448. Weights that are cut off count in the sum as they were.

    The largest score so far stays until a tile exceeds it by 4 powers of two, or right by 0.75.

    The rounding to float8 itself is left out.
    """
    most, kept = F32(448 / 256), F32((4.0 if wrong else 0.75) / LOG2E)
    query, key, value = operands(fields)
    outputs, logsumexps = [], []
    for head in heads_of(query, key, value):
        top = np.full(len(head.query), -np.inf, F32)
        total, sums = np.zeros_like(top), np.zeros((len(top), head.value.shape[-1]), F32)
        for keys in tiles(len(head.key), 128):
            scores = head.scores(keys)
            largest = scores.max(axis=-1)
            new = np.where(largest - top > kept, largest, top)
            powers, old = np.exp(scores - new[:, None]), np.exp(top - new)
            total = total * old + powers.sum(axis=-1)
            sums = sums * old[:, None] + np.minimum(powers, most) @ head.value[keys]
            top = new
        outputs.append(divided(sums, total))
        logsumexps.append(top + np.log(total))
    output = returned(fields, np.stack(outputs).reshape(*query.shape[:3], -1))
    return {"output": output, "logsumexp": np.stack(logsumexps).reshape(query.shape[:3])}


def window_of_one_row(fields: Fields, wrong: bool) -> Arrays:
    """A row of one head sees the keys before its window."""
    left, offset = fields["window"]["left"], fields["query_offset"]

    def visible(head: Head) -> np.ndarray:
        seen = band(*head.sizes, offset, left=left, right=0)
        if wrong and head.h == 2:
            seen[5] = causal(*head.sizes, offset)[5]
        return seen

    return masked(fields, visible)


def bottom_right_for_one_query(fields: Fields, wrong: bool) -> Arrays:
    """A single query sees all keys where the first query is to see the first key only."""

    def visible(head: Head) -> np.ndarray:
        q, k = head.sizes
        return causal(q, k, k - 1 if wrong else 0)

    return masked(fields, visible)


def entries_that_wrap(fields: Fields, wrong: bool) -> Arrays:
    """Query and key in a wider projection. The offset of an entry is 32-bit, and from the third on it is negative."""
    query, key, value = operands(fields)
    if wrong:
        query[2:], key[2:] = stale(*query[2:].shape, seed=5), stale(*key[2:].shape, seed=6)
    q, k = query.shape[2], key.shape[2]
    outputs = [flash(head, causal(q, k)).output for head in heads_of(query, key, value)]
    return returned(fields, np.stack(outputs).reshape(*query.shape[:3], -1))


BUGS: Final = (
    Bug(
        "pytorch/pytorch#195910",
        "In half types, a causal mask is applied once for each four rows: three of them see the future.",
        asks(h=4, g=4, q=64, dtype=BF16, is_causal=True),
        causal_by_groups_of_rows,
        named("causal.by_tile"),
    ),
    Bug(
        "pytorch/pytorch#188322",
        "A mask of blocks without a function for their elements is ignored.",
        asks(h=2, g=2, q=256, d=128, dtype=BF16, mask=_chosen_blocks(64)),
        blocks_without_a_function,
        named("mask.absent"),
    ),
    Bug(
        "pytorch/pytorch#187225",
        "The offset of a row of the bias wraps: later rows read the bias of other rows.",
        asks(h=4, g=4, q=144, dtype=BF16, bias=normal(144, 144)),
        bias_offset_that_wraps,
    ),
    Bug(
        "NVIDIA/TransformerEngine#3528",
        "A causal output is 0 everywhere, and its logsumexp minus infinity.",
        asks(b=2, h=2, g=2, q=128, d=128, dtype=BF16, layout="blhd", is_causal=True),
        nothing_visible,
    ),
    Bug(
        "Dao-AILab/flash-attention#2553",
        "The output is stored for the registers of another instruction: its numbers are right, but in other places.",
        asks(h=4, g=4, q=128, dtype=BF16),
        fragments_of_another_instruction,
    ),
    Bug(
        "Dao-AILab/flash-attention#2713",
        "Weights above those of a stale largest score are cut off, and count in the sum as they are.",
        asks(h=4, g=4, q=128, k=512, d=128, dtype=BF16, times=1.5),
        powers_beyond_float8,
    ),
    Bug(
        "flashinfer-ai/flashinfer#3864",
        "Of eight queries and several heads with a window, one row of one head is wrong.",
        asks(h=4, q=8, k=256, d=128, dtype=BF16, is_causal=True, query_offset=248, window={"left": 127}),
        window_of_one_row,
    ),
    Bug(
        "microsoft/onnxruntime#29020",
        "The causal mask of one query aligns it with the last key where it is the first token.",
        asks(h=4, q=1, k=64, is_causal=True, query_offset=0),
        bottom_right_for_one_query,
        named("causal.bottom_right"),
    ),
    Bug(
        "state-spaces/mamba#1015",
        "The offset of a batch entry wraps: the third and later ones are computed of other memory.",
        asks(b=4, h=4, g=4, q=64, is_causal=True),
        entries_that_wrap,
    ),
)
