"""Bugs of partial results: keys that are split over blocks, chunks or devices, and sinks that belong to one of them."""

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
    asks,
    band,
    causal,
    collected,
    divided,
    flash,
    heads_of,
    merged,
    named,
    normal,
    operands,
    returned,
    tiles,
)

Part = tuple[np.ndarray, np.ndarray]


def _part(head: Head, visible: np.ndarray | None = None) -> Part:
    online = flash(head, visible)
    return online.output, online.logsumexp


def base_two_into_base_e(fields: Fields, wrong: bool) -> Arrays:
    """The kernel of both parts returns logarithms to base 2; the merge takes exp of them."""

    def one(head: Head) -> np.ndarray:
        q, k = head.sizes
        prefix = _part(head.keys(slice(0, k - q)))
        suffix = _part(head.keys(slice(k - q, k)), causal(q, q))
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
                parts.append(_part(head.keys(slice(chunk.start, stop))))
            else:
                parts.append((np.broadcast_to(empty[0], (q, head.value.shape[-1])), np.broadcast_to(empty[1], q)))
        return merged(parts)

    return collected(fields, one)


def empty_chunk_weighs(fields: Fields, wrong: bool) -> Arrays:
    return _chunks(fields, (np.zeros(1, F32), F32(0.0 if wrong else -np.inf)))


def empty_chunk_is_infinite(fields: Fields, wrong: bool) -> Arrays:
    return _chunks(fields, (np.zeros(1, F32), F32(np.inf if wrong else -np.inf)))


def all_parts_empty(fields: Fields, wrong: bool) -> Arrays:
    """exp(-inf - -inf) where no part has a key."""

    def one(head: Head) -> np.ndarray:
        length = fields["key_lengths"][head.b]
        states = []
        for keys in tiles(head.sizes[1], 64):
            states.append(_part(head.keys(slice(keys.start, max(keys.start, min(keys.stop, length))))))
        outputs, logsumexps = (np.stack(arrays) for arrays in zip(*states, strict=True))
        if not wrong:
            return merged(states)
        weights = np.exp(logsumexps - logsumexps.max(axis=0))
        return (weights[..., None] * outputs).sum(axis=0) / weights.sum(axis=0)[:, None]

    return collected(fields, one)


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
        parts = [_part(head.keys(keys)) for keys in tiles(head.sizes[1], 64)]
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


def text_on_each_device(fields: Fields, wrong: bool) -> Arrays:
    """Two devices of a ring have half of the image each, and all of the text: 64 keys that both count."""

    def one(head: Head) -> np.ndarray:
        text, image = np.arange(64), np.array_split(np.arange(64, head.sizes[1]), 2)
        devices = [np.concatenate([text, image[0]]), np.concatenate([text, image[1]]) if wrong else image[1]]
        return merged([_part(head.keys(keys)) for keys in devices])

    return collected(fields, one)


def logsumexp_of_swapped_axes(fields: Fields, wrong: bool) -> Arrays:
    """Splits write it as (b, kv heads, group), the caller reads it as (kv heads, b, group)."""
    query, key, value = operands(fields)
    b, h, g = *query.shape[:2], key.shape[1]
    parts = [_part(head) for head in heads_of(query, key, value)]
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
            outputs[head.b, head.h], buffer[head.h, head.b * q : head.b * q + q] = _part(head.keys(slice(0, length)))
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
        parts = [_part(head.keys(keys)) for keys in tiles(head.sizes[1], 64)]
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
            parts = [_part(head.rows(rows).keys(keys), visible[rows, keys]) for keys in halves]
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
