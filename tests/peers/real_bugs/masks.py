"""Bugs of masks by content: masks, biases, padding, packed sequences."""

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
    asks,
    band,
    causal,
    collected,
    divided,
    flash,
    masked,
    named,
    normal,
    tiles,
)


def _prefix(random: np.random.Generator, b: int, q: int, k: int) -> np.ndarray:
    """A mask (b, 1, q, k) of random keys, of which each query sees at least its own."""
    mask = random.random((b, 1, q, k)) < 0.6
    return mask | np.eye(q, k, dtype=bool)


def inverted(fields: Fields, wrong: bool) -> Arrays:
    """A float mask, 0 or the lowest number, is cast to booleans, of which true means visible."""
    numbers = np.where(fields["mask"], F32(0), np.finfo(F32).min)

    def visible(head: Head) -> np.ndarray:
        mask = numbers[head.b, 0]
        return mask.astype(bool) if wrong else mask == 0

    return masked(fields, visible)


def added_as_numbers(fields: Fields, wrong: bool) -> Arrays:
    def one(head: Head) -> np.ndarray:
        mask = fields["mask"][head.b, 0]
        return flash(head, None if wrong else mask, mask if wrong else None).output

    return collected(fields, one)


def mask_of_the_first_entry(fields: Fields, wrong: bool) -> Arrays:
    """The offset of a mask (b, 1, q, k) is (b · heads + head) · stride of heads, which is 0."""
    mask = fields["mask"]
    memory = mask.reshape(-1)

    def visible(head: Head) -> np.ndarray:
        heads, (q, k) = fields["query"].shape[1], head.sizes
        start = (head.b * heads + head.h) * 0 if wrong else head.b * q * k
        return memory[start : start + q * k].reshape(q, k)

    return masked(fields, visible)


def mask_behind_an_overflow(fields: Fields, wrong: bool) -> Arrays:
    """The offset of a row wraps to a negative number, where memory holds zeros: a mask that hides nothing.

    Offsets have 16 bits here, in the place of 32.
    """
    numbers = np.where(fields["mask"], F32(0), F32(-np.inf))

    def one(head: Head) -> np.ndarray:
        q, k = head.sizes
        starts = np.arange(q) * k
        behind = (starts > np.iinfo(np.int16).max)[:, None] & wrong
        return flash(head, added=np.where(behind, 0, numbers)).output

    return collected(fields, one)


def bias_without_log2e(fields: Fields, wrong: bool) -> Arrays:
    """Scores hold log2(e) for exp2; the bias that is added to them does not."""

    def one(head: Head) -> np.ndarray:
        bias = fields["bias"][head.h].astype(F32)
        scores = head.scores() * F32(LOG2E) + bias * F32(1 if wrong else LOG2E)
        weights = np.exp2(scores - scores.max(axis=-1, keepdims=True))
        return divided(weights @ head.value, weights.sum(axis=-1))

    return collected(fields, one)


def bias_is_scaled(fields: Fields, wrong: bool) -> Arrays:
    """The scale is folded into the exponent: exp((q · k + bias - largest) · scale)."""

    def one(head: Head) -> np.ndarray:
        bias = fields["bias"][head.h].astype(F32) / F32(1 if wrong else head.scale)
        sums = head.query @ head.key.T + bias
        weights = np.exp((sums - sums.max(axis=-1, keepdims=True)) * F32(head.scale))
        return divided(weights @ head.value, weights.sum(axis=-1))

    return collected(fields, one)


def no_upper_bound(fields: Fields, wrong: bool) -> Arrays:
    """Pages hold 128 keys. The mask from logical to physical keys has no upper bound."""

    def visible(head: Head) -> np.ndarray:
        q, k = head.sizes
        return np.broadcast_to(np.arange(k) < (k if wrong else fields["key_lengths"][head.b]), (q, k))

    return masked(fields, visible)


def segments_not_read(fields: Fields, wrong: bool) -> Arrays:
    ids = fields["segment_ids"]["query"]
    return masked(fields, lambda head: np.ones(head.sizes, bool) if wrong else ids[:, None] == ids)


def queries_by_the_mask_of_keys(fields: Fields, wrong: bool) -> Arrays:
    """The queries are gathered by the mask of the keys, and scattered back: all others are 0."""
    mask = fields["key_mask"]

    def one(head: Head) -> np.ndarray:
        outputs = np.zeros((len(head.query), head.value.shape[-1]), F32)
        kept = np.flatnonzero(mask) if wrong else np.arange(len(head.query))
        outputs[kept] = flash(head.rows(kept).keys(mask)).output  # type: ignore[arg-type]  # indices, not a slice
        return outputs

    return collected(fields, one)


def average_lengths(fields: Fields, wrong: bool) -> Arrays:
    """4 devices have two of 8 chunks each. Each takes a quarter of the real tokens for its own, padding behind them."""
    real, chunk = fields["key_lengths"], 44

    def one(head: Head) -> np.ndarray:
        q, k = head.sizes
        is_real = np.arange(k) < real
        if wrong:
            for device in range(4):
                own = np.r_[device * chunk : (device + 1) * chunk, (7 - device) * chunk : (8 - device) * chunk]
                is_real[own] = np.arange(len(own)) < real // 4
        output = flash(head, causal(q, k) & is_real).output
        return np.where(is_real[:, None], output, 0) if wrong else np.where(np.arange(q)[:, None] < real, output, 0)

    return collected(fields, one)


def softmax_of_nothing(fields: Fields, wrong: bool) -> Arrays:
    def one(head: Head) -> np.ndarray:
        scores = np.where(fields["mask"][head.b, 0], head.scores(), F32(-np.inf))
        top = scores.max(axis=-1, keepdims=True)
        weights = np.exp(scores - (top if wrong else np.where(np.isneginf(top), 0, top)))
        total = weights.sum(axis=-1)
        return weights @ head.value / total[:, None] if wrong else divided(weights @ head.value, total)

    return collected(fields, one)


def nan_behind_the_last_key(fields: Fields, wrong: bool) -> Arrays:
    """The rest of the last page of 16 has NaN in one entry: hidden keys weigh 0, and 0 · NaN is NaN."""

    def one(head: Head) -> np.ndarray:
        length = fields["key_lengths"][head.b]
        stop = -(-length // 16) * 16
        key, value = head.key[:stop].copy(), head.value[:stop].copy()
        if head.b == 1:
            key[length:], value[length:] = np.nan, np.nan
        elif not wrong:
            key[length:], value[length:] = 0, 0
        if not wrong:
            key, value = key[:length], value[:length]
        visible = np.broadcast_to(np.arange(len(key)) < length, (len(head.query), len(key)))
        return flash(Head(head.b, head.h, head.group, head.query, key, value, head.scale), visible).output

    return collected(fields, one)


def nan_before_the_window(fields: Fields, wrong: bool) -> Arrays:
    """Blocks of 16 keys that all later tokens are past were freed, and hold NaN. Values of such a block are read."""
    left = fields["window"]["left"]

    def one(head: Head) -> np.ndarray:
        (q, k), outputs = head.sizes, []
        for rows in tiles(q, 32):
            online = Online(rows.stop - rows.start, head.value.shape[-1])
            visible = band(q, k, k - q, left=left, right=0)[rows]
            first = max(0, k - q + rows.start - left) // 64 * 64
            for keys in tiles(k - first, 64):
                part = slice(first + keys.start, first + keys.stop)
                value = head.value[part].copy()
                freed = np.arange(part.start, part.stop) // 16 < max(0, k - q - left) // 16
                value[freed] = np.nan if wrong else 0
                online.add(np.where(visible[:, part], head.rows(rows).scores(part), F32(-np.inf)), value)
            outputs.append(online.output)
        return np.concatenate(outputs)

    return collected(fields, one)


def page_of_a_sentinel(fields: Fields, wrong: bool) -> Arrays:
    """Page -1 of the table means no page. It is clamped to page 0, which another sequence has."""

    def one(head: Head) -> np.ndarray:
        hidden = np.count_nonzero(~fields["key_mask"])
        seen = head.keys(slice(hidden, None))
        if not wrong:
            return flash(seen).output
        pool = np.random.default_rng(5).standard_normal((2, hidden, head.key.shape[-1])).astype(F32)
        return flash(seen.longer(pool[0], pool[1])).output

    return collected(fields, one)


_PADDED = {"query": np.repeat([0, 1], [180, 76]), "key": np.repeat([0, 1], [180, 76])}

BUGS: Final = (
    Bug(
        "huggingface/transformers#38094",
        "A mask of numbers is cast to booleans, which inverts it.",
        asks(b=2, q=128, dtype=BF16, mask=lambda random: _prefix(random, 2, 128, 128)),
        inverted,
        named("mask.inverted"),
    ),
    Bug(
        "HKUSTDial/flash-sparse-attention#146",
        "A mask of 0 and 1 is added to the scores.",
        asks(b=2, q=128, dtype=BF16, mask=lambda random: _prefix(random, 2, 128, 128)),
        added_as_numbers,
        named("mask.added"),
    ),
    Bug(
        "pytorch/pytorch#184180",
        "The offset of a mask that all heads share is 0 in each entry of a batch.",
        asks(b=2, h=4, g=4, q=64, mask=lambda random: _prefix(random, 2, 64, 64)),
        mask_of_the_first_entry,
        named("mask.first_batch"),
    ),
    Bug(
        "ggml-org/llama.cpp#23610",
        "The offset of the mask overflows: later rows read zeros before it.",
        asks(h=8, q=256, d=128, dtype=F16, mask=causal(256, 256)),
        mask_behind_an_overflow,
    ),
    Bug(
        "meta-pytorch/segment-anything-fast#71",
        "The bias is added to scores that hold log2(e), and does not hold it itself.",
        asks(h=4, g=4, q=196, bias=normal(4, 196, 196)),
        bias_without_log2e,
        named(IN_BASE_TWO, "bias.log2e"),
    ),
    Bug(
        "tenstorrent/tt-metal#42694",
        "The scale is folded into the exponent, and scales the mask that is added, too.",
        asks(h=4, g=4, q=128, dtype=BF16, bias=normal(4, 128, 128, times=3)),
        bias_is_scaled,
        named("bias.before_scale"),
    ),
    Bug(
        "pytorch/pytorch#159247",
        "The mask of pages has no upper bound: all of the last page is seen.",
        asks(b=2, h=4, q=4, k=256, dtype=BF16, key_lengths=[64, 200]),
        no_upper_bound,
        named("padding.ignored"),
    ),
    Bug(
        "Tencent-Hunyuan/HunyuanVideo#310",
        "The lengths of packed sequences are not read: tokens and padding see each other.",
        asks(h=4, g=4, q=256, d=128, dtype=BF16, segment_ids=_PADDED),
        segments_not_read,
        named("segments.ignored"),
    ),
    Bug(
        "vllm-project/vllm-omni#5865",
        "Queries of an image are gathered by the padding mask of the text.",
        asks(h=4, g=4, q=256, k=64, d=128, dtype=BF16, key_mask=np.arange(64) < 50),
        queries_by_the_mask_of_keys,
    ),
    Bug(
        "NVIDIA/TransformerEngine#3331",
        "Each device takes the average length for its own: real keys are dropped, real rows are 0.",
        asks(h=4, q=352, dtype=BF16, is_causal=True, key_lengths=346, query_lengths=346),
        average_lengths,
    ),
    Bug(
        "pytorch/pytorch#103963",
        "A row whose keys are all hidden is NaN.",
        asks(h=4, g=4, q=64, mask=np.broadcast_to(np.arange(64)[:, None] < 40, (1, 1, 64, 64)).copy()),
        softmax_of_nothing,
        named("empty.nan"),
    ),
    Bug(
        "vllm-project/vllm#47305",
        "Slots behind the last key hold NaN, are read, and weigh 0: 0 · NaN.",
        asks(b=2, h=8, q=1, k=256, d=128, dtype=BF16, key_lengths=[250, 100]),
        nan_behind_the_last_key,
    ),
    Bug(
        "vllm-project/vllm#30887",
        "Values before the window are read from blocks that were freed, and may be NaN.",
        asks(h=4, q=128, k=256, dtype=BF16, is_causal=True, query_offset=128, window={"left": 99}),
        nan_before_the_window,
    ),
    Bug(
        "microsoft/onnxruntime#32391",
        "Page -1, which is none, is read as page 0.",
        asks(h=8, q=1, k=144, d=128, dtype=BF16, key_mask=np.arange(144) >= 16),
        page_of_a_sentinel,
    ),
)
