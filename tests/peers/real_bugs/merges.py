"""Bugs of partial results: keys that are split over blocks, chunks or devices."""

from __future__ import annotations

from typing import Final

import numpy as np

from tests.peers.real_bugs.parts import (
    BF16,
    F16,
    F32,
    LOG2E,
    Arrays,
    Bug,
    Fields,
    Head,
    Online,
    Part,
    asks,
    causal,
    collected,
    flash,
    heads_of,
    merged,
    named,
    operands,
    part_of,
    returned,
    tiles,
)


def base_two_into_base_e(fields: Fields, wrong: bool) -> Arrays:
    """The kernel of both parts returns logarithms to base 2; the merge takes exp of them."""

    def one(head: Head) -> np.ndarray:
        q, k = head.sizes
        prefix = part_of(head.keys(slice(0, k - q)))
        suffix = part_of(head.keys(slice(k - q, k)), causal(q, q))
        unit = F32(LOG2E if wrong else 1)
        return merged([(output, logsumexp * unit) for output, logsumexp in (prefix, suffix)])

    return collected(fields, one)


def _chunks(fields: Fields, empty: Part) -> np.ndarray:
    """Prefill whose cached context is read in chunks of 128 keys; what an entry without keys in a chunk returns."""

    def one(head: Head) -> np.ndarray:
        q, context = head.sizes[0], fields["key_lengths"][head.b]
        parts = []
        for chunk in tiles(head.sizes[1], 128):
            stop = min(chunk.stop, context)
            if stop > chunk.start:
                parts.append(part_of(head.keys(slice(chunk.start, stop))))
            else:
                parts.append((np.broadcast_to(empty[0], (q, head.value.shape[-1])), np.broadcast_to(empty[1], q)))
        return merged(parts)

    return collected(fields, one)


def empty_chunk_weighs(fields: Fields, wrong: bool) -> Arrays:
    """The buffer of its logsumexp has what another chunk left, about that of 128 keys."""
    return _chunks(fields, (np.zeros(1, F32), F32(5.0 if wrong else -np.inf)))


def empty_chunk_is_infinite(fields: Fields, wrong: bool) -> Arrays:
    return _chunks(fields, (np.zeros(1, F32), F32(np.inf if wrong else -np.inf)))


def all_parts_empty(fields: Fields, wrong: bool) -> Arrays:
    """exp(-inf - -inf) where no part has a key."""

    def one(head: Head) -> np.ndarray:
        length = fields["key_lengths"][head.b]
        ends = [slice(keys.start, max(keys.start, min(keys.stop, length))) for keys in tiles(head.sizes[1], 64)]
        states = [part_of(head.keys(keys)) for keys in ends]
        outputs, logsumexps = (np.stack(arrays) for arrays in zip(*states, strict=True))
        if not wrong:
            return merged(states)
        weights = np.exp(logsumexps - logsumexps.max(axis=0))
        return (weights[..., None] * outputs).sum(axis=0) / weights.sum(axis=0)[:, None]

    return collected(fields, one)


def text_on_each_device(fields: Fields, wrong: bool) -> Arrays:
    """Two devices of a ring have half of the image each, and all of the text: 64 keys that both count."""

    def one(head: Head) -> np.ndarray:
        text, image = np.arange(64), np.array_split(np.arange(64, head.sizes[1]), 2)
        devices = [np.concatenate([text, image[0]]), np.concatenate([text, image[1]]) if wrong else image[1]]
        return merged([part_of(head.keys(keys)) for keys in devices])

    return collected(fields, one)


def logsumexp_of_swapped_axes(fields: Fields, wrong: bool) -> Arrays:
    """Splits write it as (b, kv heads, group), the caller reads it as (kv heads, b, group)."""
    query, key, value = operands(fields)
    b, h, g = *query.shape[:2], key.shape[1]
    parts = [part_of(head) for head in heads_of(query, key, value)]
    outputs = np.stack([output for output, _ in parts]).reshape(b, h, 1, -1)
    logsumexps = np.stack([logsumexp for _, logsumexp in parts]).reshape(b, g, h // g)
    if wrong:
        logsumexps = logsumexps.reshape(g, b, h // g).swapaxes(0, 1)
    return {"output": returned(fields, outputs), "logsumexp": logsumexps.reshape(b, h, 1)}


def empty_logsumexp_in_another_place(fields: Fields, wrong: bool) -> Arrays:
    """The buffer is (h, all queries). The early exit writes as if it were (b, h, q)."""
    query, key, value = operands(fields)
    b, h, q, _ = query.shape
    outputs, buffer = np.zeros((*query.shape[:3], value.shape[-1]), F32), np.zeros((h, b * q), F32)
    empty = []
    for head in heads_of(query, key, value):
        length = fields["key_lengths"][head.b]
        if length:
            outputs[head.b, head.h], buffer[head.h, head.b * q : head.b * q + q] = part_of(head.keys(slice(0, length)))
        else:
            empty.append((head.b, head.h))
    for n, m in empty:
        start = (n * h + m) * q if wrong else m * b * q + n * q
        buffer.reshape(-1)[start : start + q] = -np.inf
    return {"output": returned(fields, outputs), "logsumexp": buffer.reshape(h, b, q).swapaxes(0, 1)}


def rows_apart_by_another_stride(fields: Fields, wrong: bool) -> Arrays:
    """The combination starts a tile of 4 rows at row · d, and steps by the stride of tokens within it."""
    query, key, value = operands(fields)
    b, h, q, d = query.shape
    rows = np.concatenate([flash(head).output for head in heads_of(query, key, value)])  # (b h q), d
    memory = np.zeros(b * q * h * d + 4 * h * d, F32)
    for n in range(0, len(rows), 4):
        for r in range(4):
            entry, m, i = np.unravel_index(n + r, (b, h, q))
            right = ((entry * q + i) * h + m) * d
            start = n * d + r * h * d if wrong else right
            if start + d <= memory.size:
                memory[start : start + d] = rows[n + r]
    return memory[: b * q * h * d].reshape(b, q, h, d).astype(fields["query"].dtype)


def no_iteration_per_split(fields: Fields, wrong: bool) -> Arrays:
    """Each of 8 splits has tiles // 8 iterations."""

    def one(head: Head) -> np.ndarray:
        count = len(list(tiles(head.sizes[1], 64)))
        each = count // 8 if wrong else -(-count // 8)
        online = Online(len(head.query), head.value.shape[-1])
        for keys in list(tiles(head.sizes[1], 64))[: 8 * each]:
            online.add(head.scores(keys), head.value[keys])
        return online.sums / online.total[:, None]

    return collected(fields, one)


def parts_in_bfloat16(fields: Fields, wrong: bool) -> Arrays:
    """Parts are divided by their sum, stored in bfloat16, and multiplied by their sum again."""

    def one(head: Head) -> np.ndarray:
        parts = [part_of(head.keys(keys)) for keys in tiles(head.sizes[1], 64)]
        return merged([(output.astype(BF16).astype(F32) if wrong else output, part) for output, part in parts])

    return collected(fields, one)


def ring_of_documents(fields: Fields, wrong: bool) -> Arrays:
    ids = fields["segment_ids"]["query"]

    def one(head: Head) -> np.ndarray:
        q, k = head.sizes
        visible = causal(q, k) & (True if wrong else ids[:, None] == ids)
        halves = list(tiles(k, k // 2))
        outputs = []
        for rows in halves:
            parts = [part_of(head.rows(rows).keys(keys), visible[rows, keys]) for keys in halves]
            outputs.append(merged(parts))
        return np.concatenate(outputs)

    return collected(fields, one)


BUGS: Final = (
    Bug(
        "sgl-project/sglang#40903",
        "Logarithms to base 2 of prefix and suffix are merged as if they were natural.",
        asks(h=4, g=4, q=64, k=448, d=192, e=128, dtype=BF16, is_causal=True, query_offset=384),
        base_two_into_base_e,
    ),
    Bug(
        "vllm-project/vllm#49294",
        "A chunk of the context without keys has a finite logsumexp, and weighs in the merge.",
        asks(b=3, h=4, q=32, k=384, d=128, dtype=BF16, key_lengths=[384, 200, 100]),
        empty_chunk_weighs,
    ),
    Bug(
        "vllm-project/vllm#15492",
        "The logsumexp of a chunk without keys is +∞, and exp(∞ - ∞) is NaN.",
        asks(b=3, h=4, q=32, k=384, d=128, dtype=BF16, key_lengths=[384, 200, 100]),
        empty_chunk_is_infinite,
    ),
    Bug(
        "flashinfer-ai/flashinfer#4051",
        "The merge of empty states is NaN.",
        asks(b=2, h=8, q=1, k=256, dtype=F16, key_lengths=[256, 0]),
        all_parts_empty,
        named("empty.nan"),
    ),
    Bug(
        "sgl-project/sglang#33327",
        "Tokens of the text are on all devices of a ring, and each counts them.",
        asks(h=4, g=4, q=192, k=320, d=128, dtype=BF16),
        text_on_each_device,
    ),
    Bug(
        "vllm-project/flash-attention#87",
        "The logsumexp of splits has batch and heads in another order than its reader expects.",
        asks(b=4, h=8, q=1, k=256, d=128, dtype=F16),
        logsumexp_of_swapped_axes,
    ),
    Bug(
        "Dao-AILab/flash-attention#2842",
        "The -∞ of a sequence without keys is written into the rows of others.",
        asks(b=3, h=4, q=64, k=256, dtype=BF16, key_lengths=[200, 0, 256]),
        empty_logsumexp_in_another_place,
    ),
    Bug(
        "flagos-ai/FlagGems#5235",
        "The combination of splits steps from row to row by another stride than from tile to tile.",
        asks(h=8, q=8, k=512, dtype=F16, layout="blhd"),
        rows_apart_by_another_stride,
    ),
    Bug(
        "ROCm/rocMLIR#2371",
        "More splits than tiles have no iteration each: 0 / 0.",
        asks(h=4, q=64, k=256, dtype=F16),
        no_iteration_per_split,
    ),
    Bug(
        "vllm-project/vllm-xpu-kernels#204",
        "Partial outputs are rounded to bfloat16 before they are merged.",
        asks(h=4, q=8, k=512, d=128, dtype=BF16),
        parts_in_bfloat16,
        is_visible=False,
    ),
    Bug(
        "axolotl-ai-cloud/axolotl#3608",
        "A ring passes keys of all documents of a packed sequence on.",
        asks(
            h=4,
            q=256,
            dtype=BF16,
            is_causal=True,
            segment_ids={"query": np.repeat([0, 1, 2], [100, 90, 66]), "key": np.repeat([0, 1, 2], [100, 90, 66])},
        ),
        ring_of_documents,
        named("segments.ignored"),
    ),
)
