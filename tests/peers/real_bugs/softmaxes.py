"""Bugs of the softmax: its largest score, its sums, its rounding, the softcap, keys behind the last one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import ml_dtypes
import numpy as np

from tests.peers.real_bugs.parts import (
    BF16,
    F16,
    F32,
    Arrays,
    Bug,
    Fields,
    Head,
    Online,
    asks,
    causal,
    collected,
    divided,
    flash,
    named,
    operands,
    read,
    stale,
    tiles,
)


def largest_of_hidden_is_zero(fields: Fields, wrong: bool) -> Arrays:
    """Tiles from right to left. The largest score of a tile without visible keys is 0, so that nothing is -inf - -inf.

    The mistake: the 0 is kept as the largest score so far.
    """

    def one(head: Head) -> np.ndarray:
        q, k = head.sizes
        visible = causal(q, k, fields["query_offset"])
        top = np.full(q, -np.inf, F32)
        total, sums = np.zeros(q, F32), np.zeros((q, head.value.shape[-1]), F32)
        for keys in reversed(list(tiles(k, 128))):
            scores = np.where(visible[:, keys], head.scores(keys), F32(-np.inf))
            new = np.maximum(top, scores.max(axis=-1))
            safe = np.where(np.isneginf(new), 0, new)
            old, weights = np.exp(top - safe), np.exp(scores - safe[:, None])
            total, sums = total * old + weights.sum(axis=-1), sums * old[:, None] + weights @ head.value[keys]
            top = safe if wrong else new
        return divided(sums, total)

    return collected(fields, one)


def finite_minus_infinity(fields: Fields, wrong: bool) -> Arrays:
    """The largest score, before the scale, starts at -5e4 in the place of -inf."""

    def one(head: Head) -> np.ndarray:
        raw = head.query @ head.key.T
        top = np.maximum(raw.max(axis=-1), F32(-5e4 if wrong else -np.inf))[:, None]
        weights = np.exp((raw - top) * F32(head.scale))
        return divided(weights @ head.value, weights.sum(axis=-1))

    return collected(fields, one)


def constant_largest_score(fields: Fields, wrong: bool) -> Arrays:
    def one(head: Head) -> np.ndarray:
        scores = head.scores()
        weights = np.exp(scores - (F32(10) if wrong else scores.max(axis=-1, keepdims=True)))
        return weights @ head.value / weights.sum(axis=-1, keepdims=True)

    return collected(fields, one)


def _capped(fields: Fields, cap: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> np.ndarray:
    """The usual kernel with a softcap. cap: of scores and the booleans of visible keys"""

    def one(head: Head) -> np.ndarray:
        q, k = head.sizes
        visible = causal(q, k) if fields.get("is_causal") else np.ones((q, k), bool)
        online = Online(q, head.value.shape[-1])
        for keys in tiles(k, 64):
            online.add(cap(head.scores(keys), visible[:, keys]), head.value[keys])
        return online.output

    return collected(fields, one)


def softcap_by_exponentials(fields: Fields, wrong: bool) -> Arrays:
    limit = F32(fields["softcap"])

    def cap(scores: np.ndarray, visible: np.ndarray) -> np.ndarray:
        x = scores / limit
        up, down = np.exp(x), np.exp(-x)
        return np.where(visible, limit * ((up - down) / (up + down) if wrong else np.tanh(x)), -np.inf)

    return _capped(fields, cap)


def softcap_times_score(fields: Fields, wrong: bool) -> Arrays:
    limit = F32(fields["softcap"])

    def cap(scores: np.ndarray, visible: np.ndarray) -> np.ndarray:
        x = scores / limit
        return np.where(visible, (x if wrong else limit) * np.tanh(x), -np.inf)

    return _capped(fields, cap)


def softcap_of_hidden(fields: Fields, wrong: bool) -> Arrays:
    limit = F32(fields["softcap"])

    def cap(scores: np.ndarray, visible: np.ndarray) -> np.ndarray:
        if wrong:
            return limit * np.tanh(np.where(visible, scores, -np.inf) / limit)
        return np.where(visible, limit * np.tanh(scores / limit), -np.inf)

    return _capped(fields, cap)


def softcap_lost(fields: Fields, wrong: bool) -> Arrays:
    limit = F32(fields["softcap"])

    def cap(scores: np.ndarray, visible: np.ndarray) -> np.ndarray:
        return np.where(visible, scores if wrong else limit * np.tanh(scores / limit), -np.inf)

    return _capped(fields, cap)


def weights_in_fp8(fields: Fields, wrong: bool) -> Arrays:
    """Weights are cast to e4m3 for the product with the values, which are thousands: most are below its least number.

    The sum is that of the weights before the cast.
    """

    def one(head: Head) -> np.ndarray:
        scores = head.scores()
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        cast = weights.astype(ml_dtypes.float8_e4m3fn if wrong else BF16).astype(F32)
        return divided(cast @ head.value, weights.sum(axis=-1))

    return collected(fields, one)


def inverse_rescaling(fields: Fields, wrong: bool) -> Arrays:
    """The accumulator is divided by exp(old - new) where it should be multiplied, as the paper printed it."""

    def one(head: Head) -> np.ndarray:
        q = len(head.query)
        top, total = np.full(q, -np.inf, F32), np.zeros(q, F32)
        sums = np.zeros((q, head.value.shape[-1]), F32)
        for keys in tiles(head.sizes[1], 64):
            scores = head.scores(keys)
            new = np.maximum(top, scores.max(axis=-1))
            old, weights = np.exp(top - new), np.exp(scores - new[:, None])
            kept = np.where(old == 0, 0, 1 / np.where(old == 0, 1, old)) if wrong else old
            total, sums = total * old + weights.sum(axis=-1), sums * kept[:, None] + weights @ head.value[keys]
            top = new
        return divided(sums, total)

    return collected(fields, one)


def _padded(head: Head, count: int, tile: int) -> Head:
    """The head with keys and values of 0 up to a whole tile."""
    more = -(-count // tile) * tile - count
    return head.keys(slice(0, count)).longer(
        np.zeros((more, head.key.shape[-1]), F32), np.zeros((more, head.value.shape[-1]), F32)
    )


def lanes_behind_the_last_key(fields: Fields, wrong: bool) -> Arrays:
    return collected(fields, lambda head: flash(_padded(head, len(head.key), 256) if wrong else head).output)


def last_block_of_64(fields: Fields, wrong: bool) -> Arrays:
    return collected(fields, lambda head: flash(_padded(head, len(head.key), 64) if wrong else head).output)


def garbage_in_the_last_page(fields: Fields, wrong: bool) -> Arrays:
    """The last page of 128 slots has slots that another sequence wrote."""

    def one(head: Head) -> np.ndarray:
        more = -len(head.key) % 128 if wrong else 0
        key, value = stale(more, head.key.shape[-1], seed=1), stale(more, head.value.shape[-1], seed=2)
        return flash(head.longer(key, value)).output

    return collected(fields, one)


def keys_of_the_next_head(fields: Fields, wrong: bool) -> Arrays:
    """Blocks of 32 keys: the last one reads on in memory, where the next head is."""
    _, key, value = operands(fields)
    _, g, k, d = key.shape
    length = -(-k // 32) * 32 if wrong else k

    def one(head: Head) -> np.ndarray:
        start = (head.b * g + head.h // head.group) * k * d
        rows = (read(array, (length, d), (d, 1), start) for array in (key, value))
        return flash(Head(head.b, head.h, head.group, head.query, *rows, head.scale), tile=32).output

    return collected(fields, one)


def weights_over_scores(fields: Fields, wrong: bool) -> Arrays:
    """Weights in half precision take the memory of the scores. Row r is stored where the scores of row r // 2 were.

    The mistake: a row is read while others are stored. All rows take one step at a time.
    """

    def one(head: Head) -> np.ndarray:
        outputs = []
        for rows in tiles(len(head.query), 64):
            block = head.rows(rows)
            right = flash(block)
            online = Online(rows.stop - rows.start, head.value.shape[-1])
            for keys in tiles(head.sizes[1], 64):
                scores = np.ascontiguousarray(block.scores(keys))
                weights = np.exp(scores - right.top[:, None]).astype(F16)
                if wrong:
                    halves = scores.reshape(-1).view(F16)[: scores.size].reshape(scores.shape)
                    for j in range(scores.shape[1]):
                        halves[:, j] = np.exp(scores[:, j] - right.top)
                    weights = halves
                online.sums += weights.astype(F32) @ head.value[keys]
            outputs.append(divided(online.sums, right.total))
        return np.concatenate(outputs)

    return collected(fields, one)


def weights_of_the_tile_before(fields: Fields, wrong: bool) -> Arrays:
    """A product starts before three of four warps stored their keys' weights: those of the tile before are there."""

    def one(head: Head) -> np.ndarray:
        right = flash(head)
        sums, kept = np.zeros_like(right.sums), np.zeros((len(head.query), 64), F32)
        for n, keys in enumerate(tiles(head.sizes[1], 64)):
            weights = np.exp(head.scores(keys) - right.top[:, None])
            used = weights.copy()
            if wrong and (n + head.h) % 3 == 0:
                used[:, 16:] = kept[:, 16:]
            sums += used @ head.value[keys]
            kept = weights
        return divided(sums, right.total)

    return collected(fields, one)


def products_in_float16(fields: Fields, wrong: bool) -> Arrays:
    """Query times key is a float16, and scaled afterwards."""

    def one(head: Head) -> np.ndarray:
        products = head.query @ head.key.T
        scores = (products.astype(F16).astype(F32) if wrong else products) * F32(head.scale)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        return weights @ head.value / weights.sum(axis=-1, keepdims=True)

    return collected(fields, one)


def _opposed(size: float, noise: float, heads: int, **sizes: Any) -> Callable[[np.random.Generator], Fields]:
    """A request whose queries and keys of the first heads point in opposite directions: all their scores are low."""
    asked = asks(**sizes)

    def request(random: np.random.Generator) -> Fields:
        fields = asked(random)
        direction = random.choice([-1.0, 1.0], fields["query"].shape[-1])
        dtype, group = fields["query"].dtype, fields["query"].shape[1] // fields["key"].shape[1]
        query, key = fields["query"].astype(F32), fields["key"].astype(F32)
        query[:, : heads * group] = query[:, : heads * group] * F32(noise) + F32(size) * direction
        key[:, :heads] = key[:, :heads] * F32(noise) - F32(size) * direction
        return fields | {"query": query.astype(dtype), "key": key.astype(dtype)}

    return request


def _peaked(score: float, **sizes: Any) -> Callable[[np.random.Generator], Fields]:
    """A request whose first key has about this score in each row, the others ordinary ones; values are about 1."""
    asked = asks(**sizes)

    def request(random: np.random.Generator) -> Fields:
        fields = asked(random)
        direction = random.choice([-1.0, 1.0], fields["query"].shape[-1]).astype(F32)
        dtype, d = fields["query"].dtype, len(direction)
        query, key = fields["query"].astype(F32) + 2 * direction, fields["key"].astype(F32)
        key -= (key @ direction)[..., None] * direction / d
        key[:, :, 0] = score / 2 / d**0.5 * direction
        value = fields["value"].astype(F32) + 1
        return fields | {"query": query.astype(dtype), "key": key.astype(dtype), "value": value.astype(dtype)}

    return request


BUGS: Final = (
    Bug(
        "Dao-AILab/flash-attention#2082",
        "The largest score of a tile without visible keys is 0, and stays so: rows with low scores become 0.",
        _opposed(4.5, 0.3, 1, h=14, q=88, k=448, is_causal=True, query_offset=360),
        largest_of_hidden_is_zero,
    ),
    Bug(
        "flashinfer-ai/flashinfer#4267",
        "The largest score starts at -50000: a head whose scores are lower becomes 0.",
        _opposed(40, 1, 1, h=8, q=16, k=256, d=128),
        finite_minus_infinity,
    ),
    Bug(
        "HabanaAI/vllm-fork#275",
        "A constant 10 is subtracted in the place of the largest score: exponentials overflow.",
        asks(h=4, q=64, k=256, d=128, dtype=BF16, times=60),
        constant_largest_score,
        named("softmax.no_max"),
    ),
    Bug(
        "vllm-project/vllm#56578",
        "tanh is a quotient of exponentials, which is ∞ / ∞ for large scores.",
        asks(h=4, q=128, d=128, times=400, softcap=5.0),
        softcap_by_exponentials,
    ),
    Bug(
        "Dao-AILab/flash-attention#2396",
        "The softcap is (s/c) · tanh(s/c).",
        asks(h=4, q=128, d=128, dtype=BF16, times=4, softcap=5.0),
        softcap_times_score,
        named("softcap.times_score"),
    ),
    Bug(
        "Dao-AILab/flash-attention#1025",
        "Scores are capped after the mask: hidden keys get -c.",
        asks(h=4, q=128, d=128, dtype=BF16, is_causal=True, softcap=4.0),
        softcap_of_hidden,
        named("softcap.after_bias"),
    ),
    Bug(
        "sgl-project/sgl-kernel-xpu#491",
        "The softcap is never handed to the softmax.",
        asks(h=4, q=128, d=128, dtype=BF16, times=8, is_causal=True, softcap=5.0),
        softcap_lost,
        named("softcap.absent"),
    ),
    Bug(
        "ROCm/FlyDSL#1020",
        "Weights are cast to fp8, where the small ones vanish; the sum that divides still has them.",
        _peaked(8, h=2, g=2, q=32, k=2048, d=128, dtype=BF16),
        weights_in_fp8,
    ),
    Bug(
        "Dao-AILab/flash-attention#991",
        "The accumulator is multiplied by the inverse of what its rescaling needs.",
        asks(h=4, q=128, k=256),
        inverse_rescaling,
    ),
    Bug(
        "flashinfer-ai/flashinfer#3716",
        "Decoding that is not causal counts the lanes of the tile of 256 behind the last key, with scores of 0.",
        asks(b=2, h=8, g=8, q=1, k=300, d=128, dtype=BF16),
        lanes_behind_the_last_key,
        named("softmax.padded_lanes"),
    ),
    Bug(
        "flashinfer-ai/flashinfer#5090",
        "Keys that fill the last block of 64 with zeros have the weight of a score of 0.",
        asks(h=4, g=4, q=128, k=200, d=128, dtype=BF16),
        last_block_of_64,
        named("softmax.padded_lanes"),
    ),
    Bug(
        "hw-native-sys/simpler#72",
        "Slots of the last page that the sequence did not fill are keys like others.",
        asks(b=2, h=8, g=1, q=1, k=400, d=128, dtype=BF16),
        garbage_in_the_last_page,
    ),
    Bug(
        "pytorch/pytorch#169222",
        "Threads of the last block of 32 keys read on behind it.",
        asks(h=4, g=4, q=4, k=262),
        keys_of_the_next_head,
    ),
    Bug(
        "kekzl/imp#539",
        "Weights in half precision are stored over scores that are still to be read.",
        asks(h=4, q=128, k=256, d=128, dtype=F16),
        weights_over_scores,
    ),
    Bug(
        "pengcuo/FlashMLA-ETAP#3",
        "A product starts before all warps stored their weights, and takes those of the tile before.",
        asks(h=4, g=1, q=64, k=512, d=128, dtype=BF16),
        weights_of_the_tile_before,
    ),
    Bug(
        "philipturner/metal-flash-attention#8",
        "Query times key overflows in float16, as the scale comes afterwards.",
        asks(h=4, g=4, q=128, dtype=F16, times=1800),
        products_in_float16,
        named("precision.overflow16"),
    ),
)
