"""Wrong formulas of the softmax, of merged parts, of rotations, norms, scores and logsumexps."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.helpers.formulas.attention import (
    LOG2E,
    Answer,
    Attention,
    alibi,
    rotated,
    softmax,
)
from tests.helpers.formulas.table import Mistake, mistake, parts, tile


# The softmax and its tiles.
@mistake("softmax.over_queries", "square")
def _over_queries(a: Attention) -> Answer | None:
    if a.sinks is not None or "sigmoid" in a.options:
        return None
    scores = np.where(a.seen(), a.scores(), -np.inf)
    top = scores.max(2, keepdims=True)
    powers = np.exp(scores - np.where(np.isneginf(top), 0, top))
    total = powers.sum(2, keepdims=True)
    return np.divide(powers, total, out=np.zeros_like(powers), where=total > 0) @ a.values(), None


def by_tiles(*, rescales_sum: bool) -> Mistake:
    def made(a: Attention) -> Answer:
        size, scores, values = tile(a), np.where(a.seen(), a.scores(), -np.inf), a.values()
        shape = scores.shape[:3]
        start = np.full(shape, -np.inf) if a.sinks is None else np.broadcast_to(a.sinks, shape)
        top, total = start, np.zeros(shape) if a.sinks is None else np.ones(shape)
        sums = np.zeros((*shape, values.shape[-1]))
        for first in range(0, scores.shape[3], size):
            part = scores[..., first : first + size]
            new = np.maximum(top, part.max(-1))
            shift = np.where(np.isneginf(new), 0, new)
            powers = np.exp(part - shift[..., None])
            if rescales_sum:
                total = total * np.where(np.isneginf(top), 0, np.exp(np.where(np.isneginf(top), 0, top) - shift))
            total = total + powers.sum(-1)
            sums = sums + powers @ values[:, :, first : first + size]
            top = new
        return np.divide(sums, total[..., None], out=np.zeros_like(sums), where=total[..., None] > 0), None

    return made


mistake("softmax.no_rescale", "long")(by_tiles(rescales_sum=False))
mistake("softmax.accumulator_no_rescale", "long")(by_tiles(rescales_sum=True))


def _last_tile_of(a: Attention) -> np.ndarray:
    """True for the keys of the last tile in which a row sees any."""
    place = np.arange(a.shape[3]) // tile(a)
    return np.asarray(place == np.where(a.seen(), place, -1).max(-1, keepdims=True))


mistake("softmax.last_tile", "long")(lambda a: a.answer(seen=a.seen() & _last_tile_of(a)))


@mistake("softmax.denominator_last_tile", "long")
def _denominator_last_tile(a: Attention) -> Answer | None:
    if a.sinks is not None:
        return None
    scores = np.where(a.seen(), a.scores(), -np.inf)
    top = np.where(a.seen().any(-1), scores.max(-1), 0)[..., None]
    powers = np.exp(scores - top)
    total = np.where(_last_tile_of(a), powers, 0).sum(-1, keepdims=True)
    with np.errstate(all="ignore"):
        return np.where(total > 0, powers @ a.values() / total, 0), None


@mistake("softmax.padded_lanes")
def _padded_lanes(a: Attention) -> Answer | None:
    lanes = -a.shape[3] % int(a.random.choice([16, 32, 64, 128]))
    return _diluted(a, lanes) if lanes else None


def _diluted(a: Attention, count: Any) -> Answer:
    out, lse = a.answer()
    assert lse is not None
    with np.errstate(divide="ignore", invalid="ignore"):
        total = np.logaddexp(lse, np.log(count))
        return np.where(np.isneginf(lse)[..., None], out, out * np.exp(lse - total)[..., None]), total


@mistake("softmax.unnormalized")
def _unnormalized(a: Attention) -> Answer:
    scores = np.where(a.seen(), a.scores(), -np.inf)
    top = scores.max(-1) if a.sinks is None else np.maximum(scores.max(-1), a.sinks)
    return np.exp(scores - np.where(np.isneginf(top), 0, top)[..., None]) @ a.values(), None


mistake("softmax.base2")(
    lambda a: softmax(
        np.where(a.seen(), a.scores() / LOG2E, -np.inf), a.values(), None if a.sinks is None else a.sinks / LOG2E
    )
)


def merged(weigh: Callable[[Attention, np.ndarray], np.ndarray], needs: str = "") -> Mistake:
    """Outputs of parts of the keys, by weights that are made of their logsumexps (parts, b, h, n)."""

    def made(a: Attention) -> Answer | None:
        if a.sinks is not None:
            return None
        scores, values = np.where(a.seen(), a.scores(), -np.inf), a.values()
        every = [softmax(scores[..., keys], values[:, :, keys]) for keys in parts(a)]
        outputs, sums = (np.stack(one) for one in zip(*every, strict=True))
        weights = weigh(a, sums)
        return (weights[..., None] * outputs).sum(0), None

    return made


def _shares(logs: np.ndarray, power: float) -> np.ndarray:
    top = logs.max(0)
    found = np.exp((logs - np.where(np.isneginf(top), 0, top)) * power)
    return np.asarray(found / np.maximum(found.sum(0), 1e-300))


mistake("merge.base2")(merged(lambda a, logs: _shares(logs, math.log(2) if a.random.random() < 0.5 else LOG2E)))
mistake("merge.unweighted")(merged(lambda a, logs: np.full_like(logs, 1 / len(logs))))
mistake("merge.empty_part", "is_causal")(merged(lambda a, logs: _shares(np.where(np.isneginf(logs), 0, logs), 1.0)))
mistake("sigmoid.softmax", "sigmoid")(lambda a: softmax(np.where(a.seen(), a.scores(), -np.inf), a.values()))
mistake("sigmoid.biased", "sigmoid")(lambda a: a.answer(a.scores() - math.log(a.shape[3])))


# Rotations, clipping and norms.
def turned(**parts: Callable[[Attention], Any]) -> Mistake:
    def made(a: Attention) -> Answer:
        return a.but(**{name: make(a) for name, make in parts.items()}).answer()

    return made


mistake("rotary.absent", "rotary")(turned(base=lambda a: None))
mistake("rotary.interleaving", "rotary")(turned(pairs=lambda a: "halves" if a.pairs == "neighbours" else "neighbours"))
mistake("rotary.sign", "rotary")(turned(positions=lambda a: tuple(-one for one in a.positions)))
mistake("rotary.base", "rotary")(turned(base=lambda a: 10000.0))
mistake("rotary.twice", "rotary")(turned(positions=lambda a: tuple(2 * one for one in a.positions)))
mistake("rotary.no_offset", "rotary", "past")(turned(positions=lambda a: tuple(one - a.past for one in a.positions)))
mistake("rotary.query_only", "rotary")(turned(positions=lambda a: (a.positions[0], 0 * a.positions[1])))
mistake("rotary.positions_shifted", "rotary")(
    turned(positions=lambda a: (a.positions[0] + int(a.random.choice([-1, 1])), a.positions[1]))
)


@mistake("rotary.cache_again", "rotary", "past")
def _cache_again(a: Attention) -> Answer:
    assert a.cache is not None
    assert a.base is not None
    return a.but(cache=(rotated(a.cache[0], np.arange(a.past), a.base, a.pairs), a.cache[1])).answer()


def _unclipped(a: Attention) -> dict[str, np.ndarray]:
    return {name: a.fields[name].astype(np.float64) for name in ("query", "key", "value")}


mistake("clip.absent", "clip_qkv")(lambda a: None if "norms" in a.options else a.but(**_unclipped(a)).answer())
mistake("norm.absent", "norms")(
    lambda a: (
        None
        if "clip_qkv" in a.options
        else a.but(**{name: a.fields[name].astype(np.float64) for name in ("query", "key")}).answer()
    )
)


# Scores.
def scaled(make: Callable[[Attention], Any]) -> Mistake:
    return lambda a: a.but(scale=make(a)).answer()


mistake("scale.absent")(scaled(lambda a: 1.0))
mistake("scale.twice")(scaled(lambda a: a.scale**2))
mistake("scale.inverse_dim")(scaled(lambda a: 1 / a.query.shape[-1]))
mistake("scale.value_dim", "other_dim")(scaled(lambda a: 1 / math.sqrt(a.value.shape[-1])))
mistake("scale.log2e")(scaled(lambda a: a.scale * LOG2E))
mistake("scale.zero_is_default", "zero_scale")(scaled(lambda a: 1 / math.sqrt(a.query.shape[-1])))
mistake("scale.first_head", "head_scales", "heads")(scaled(lambda a: a.scale[0, 0, 0]))
mistake("scale.shifted", "head_scales", "heads")(scaled(lambda a: np.concatenate([a.scale[1:], a.scale[:1]])))
mistake("scale.other")(scaled(lambda a: a.scale * float(a.random.choice([0.37, 0.8, 1.7, 3.1]))))


@mistake("scale.by_tile", "long")
def _scale_by_tile(a: Attention) -> Answer:
    return a.but(scale=a.scale ** (np.arange(a.shape[3]) // tile(a) + 1)).answer()


mistake("softcap.absent", "softcap")(lambda a: a.but(cap=None).answer())


@mistake("softcap.after_bias", "softcap", "bias")
def _after_bias(a: Attention) -> Answer:
    assert a.cap is not None
    return a.answer(a.cap * np.tanh((a.products() * a.scale + sum(a.added.values())) / a.cap))


@mistake("softcap.before_scale", "softcap")
def _before_scale(a: Attention) -> Answer:
    assert a.cap is not None
    return a.answer(a.cap * np.tanh(a.products() / a.cap) * a.scale + sum(a.added.values()))


@mistake("softcap.not_divided", "softcap")
def _not_divided(a: Attention) -> Answer:
    assert a.cap is not None
    return a.answer(a.cap * np.tanh(a.products() * a.scale) + sum(a.added.values()))


@mistake("softcap.times_score", "softcap")
def _times_score(a: Attention) -> Answer:
    assert a.cap is not None
    scores = a.products() * a.scale
    return a.answer(scores * np.tanh(scores / a.cap) + sum(a.added.values()))


mistake("sinks.absent", "sinks")(lambda a: a.but(sinks=None).answer())


def sunk(make: Callable[[Attention, np.ndarray], np.ndarray]) -> Mistake:
    def made(a: Attention) -> Answer:
        assert a.sinks is not None
        return a.but(sinks=make(a, a.sinks)).answer()

    return made


mistake("sinks.shifted", "sinks", "heads")(sunk(lambda a, sinks: np.concatenate([sinks[1:], sinks[:1]])))
mistake("sinks.repeated_per_tile", "sinks", "long")(sunk(lambda a, sinks: sinks + math.log(-(-a.shape[3] // tile(a)))))
mistake("sinks.scaled", "sinks")(sunk(lambda a, sinks: sinks * np.reshape(a.scale, (-1, 1))))
mistake("sinks.base2", "sinks")(sunk(lambda a, sinks: sinks * (LOG2E if a.random.random() < 0.5 else 1 / LOG2E)))


def with_added(name: str, make: Callable[[Attention], np.ndarray]) -> Mistake:
    def made(a: Attention) -> Answer:
        found = a.but()
        found.added[name] = make(a)
        return found.answer()

    return made


def _slopes(a: Attention) -> np.ndarray:
    return np.asarray(a.fields["alibi_slopes"].astype(np.float64))


mistake("bias.before_scale", "bias")(with_added("bias", lambda a: a.added["bias"] * a.scale))
mistake("bias.log2e", "bias")(
    with_added("bias", lambda a: a.added["bias"] * (LOG2E if a.random.random() < 0.5 else 1 / LOG2E))
)
mistake("alibi.sign", "alibi_slopes")(with_added("alibi_slopes", lambda a: -a.added["alibi_slopes"]))
mistake("alibi.first_head", "alibi_slopes", "heads")(
    with_added("alibi_slopes", lambda a: alibi(a, np.full(a.shape[1], _slopes(a)[0]), a.offset))
)
mistake("alibi.factor", "alibi_slopes")(
    with_added("alibi_slopes", lambda a: a.added["alibi_slopes"] * (a.scale if a.random.random() < 0.5 else 2.0))
)
mistake("alibi.log2e", "alibi_slopes")(
    with_added("alibi_slopes", lambda a: a.added["alibi_slopes"] * (LOG2E if a.random.random() < 0.5 else 1 / LOG2E))
)
mistake("alibi.offset_ignored", "alibi_slopes", "few", "offset")(
    with_added("alibi_slopes", lambda a: alibi(a, _slopes(a), 0))
)


# Logsumexps.
def summed(make: Callable[[Attention, np.ndarray], np.ndarray | None]) -> Mistake:
    def made(a: Attention) -> Answer | None:
        out, lse = a.answer()
        assert lse is not None
        changed = make(a, lse)
        return None if changed is None else (out, changed)

    return made


mistake("logsumexp.base2")(summed(lambda a, lse: lse * (LOG2E if a.random.random() < 0.5 else 1 / LOG2E)))
mistake("logsumexp.unscaled")(summed(lambda a, lse: a.but(scale=1.0).answer()[1]))
mistake("logsumexp.no_sink", "sinks")(summed(lambda a, lse: a.but(sinks=None).answer()[1]))
mistake("logsumexp.empty_finite", "mask", "empty")(
    summed(lambda a, lse: None if a.sinks is not None else np.where(np.isneginf(lse), 0.0, lse))
)
mistake("logsumexp.empty_positive", "mask", "empty")(
    summed(lambda a, lse: None if a.sinks is not None else np.where(np.isneginf(lse), np.inf, lse))
)
