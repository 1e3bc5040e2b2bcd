"""Mistakes of the gradients of scores: weights that are computed again, D, masks, softcap, sinks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Final

import numpy as np

from attention_service.attention.score_term import Part
from attention_service.attention.spec import AttentionSpec
from attention_service.attention.terms import TERMS
from attention_service.attention.tile import Tile
from attention_service.attention.visibility import visible
from attention_service.backends.dense.library import Array
from attention_service.backends.dense.products import grouped_matmul
from attention_service.comparison.gradients.case import GradientCase, Gradients, Sums, names_in, with_fields
from attention_service.comparison.gradients.mutants.table import (
    Recomputed,
    Variant,
    Wrong,
    edited,
    is_softmax,
    made_by,
    mutant,
)
from attention_service.comparison.mutants.table import SPLITS

LN2: Final = math.log(2)


class NoDelta(Wrong):
    def delta(self, tile: Tile, weights: Array, of_weights: Array) -> Array:
        return np.zeros((*weights.shape[:3], 1))


@mutant("no_delta", "The gradient of the scores leaves D out, the sum of output times its gradient in each row.")
def no_delta(case: GradientCase) -> Iterator[Variant]:
    if case.plan.normalization != "sigmoid" and case.cotangent is not None:
        yield made_by(case, NoDelta)


class LocalDelta(Wrong):
    def __init__(self, *arguments: Any, case: GradientCase, parts: int, is_mean: bool) -> None:
        super().__init__(*arguments, case=case)
        self.parts, self.is_mean = parts, is_mean

    def delta(self, tile: Tile, weights: Array, of_weights: Array) -> Array:
        found, products = np.zeros(weights.shape), weights * of_weights
        length = -(-self.plan.sizes.key_length // self.parts)
        for part in range(self.parts):
            keys = slice(max(0, part * length - tile.columns.start), max(0, (part + 1) * length - tile.columns.start))
            of_part = products[..., keys].sum(axis=-1, keepdims=True)
            if self.is_mean:
                sums = weights[..., keys].sum(axis=-1, keepdims=True)
                of_part = of_part / np.where(sums == 0, 1, sums)
            found[..., keys] = of_part
        return found


@mutant("delta_local", "The sum of output times its gradient, D, is taken of a part of the keys, not of the whole row.")
def delta_local(case: GradientCase) -> Iterator[Variant]:
    if is_softmax(case) and case.cotangent is not None and case.plan.all_sinks is None:
        for parts, is_mean in itertools.product(SPLITS, (False, True)):
            if parts <= case.plan.sizes.key_length:
                kind = partial(LocalDelta, parts=parts, is_mean=is_mean)
                yield made_by(case, kind, f"in {parts} parts{', each a softmax of its own' if is_mean else ''}")


class OtherMemory(Wrong):
    def delta(self, tile: Tile, weights: Array, of_weights: Array) -> Array:
        b, h, q = self.case.delta.shape
        read = self.case.delta.swapaxes(1, 2).reshape(b, h, q)
        return read[tile.batch, tile.heads, tile.rows][..., None]


@mutant("delta_layout", "D is computed of memory that has tokens before heads, read as if heads came first.")
def delta_layout(case: GradientCase) -> Iterator[Variant]:
    sizes = case.plan.sizes
    if is_softmax(case) and case.cotangent is not None and min(sizes.num_heads, sizes.query_length) > 1:
        yield made_by(case, OtherMemory)


class FirstFeatures(Wrong):
    def of_weights(self, output: Array, tile: Tile) -> Array:
        features = self.plan.sizes.head_dim
        value = self.value[tile.batch, tile.kv_heads, tile.columns, :features]
        return grouped_matmul(output[..., :features], value.swapaxes(-1, -2), self.lib)

    def delta(self, tile: Tile, weights: Array, of_weights: Array) -> Array:
        return self.deltas(tile)


@mutant("value_features", "The gradient of the weights sums over as many features of a value as a key has.")
def value_features(case: GradientCase) -> Iterator[Variant]:
    if case.cotangent is not None and case.plan.sizes.value_dim > case.plan.sizes.head_dim:
        yield made_by(case, FirstFeatures)


class OtherBase(Recomputed):
    def __init__(self, *arguments: Any, case: GradientCase, factor: float) -> None:
        super().__init__(*arguments, case=case)
        self.factor = factor

    def subtracted(self, tile: Tile, scores: Array) -> Array:
        return super().subtracted(tile, scores) * self.factor


@mutant("lse_base2", "The backward pass takes the logsumexp for one of another base.")
def lse_base2(case: GradientCase) -> Iterator[Variant]:
    if is_softmax(case):
        yield made_by(case, partial(OtherBase, factor=1 / LN2), "2 for e")
        yield made_by(case, partial(OtherBase, factor=LN2), "e for 2")


class Unnormalized(Recomputed):
    def subtracted(self, tile: Tile, scores: Array) -> Array:
        most = scores.max(axis=-1, keepdims=True, initial=-np.inf)
        return np.where(np.isfinite(most), most, 0.0)


@mutant("not_normalized", "The weights of the backward pass are not divided by their sum.")
def not_normalized(case: GradientCase) -> Iterator[Variant]:
    if is_softmax(case):
        yield made_by(case, Unnormalized)


# What the forward pass applied and the backward pass did not, the fields and the sentence.
LEFT_OUT: Final[dict[str, tuple[tuple[str, ...], str]]] = {
    "causal_absent": (("is_causal",), "The backward pass does not apply the causal mask."),
    "window_absent": (("window",), "The backward pass does not apply the window."),
    "chunk_absent": (("chunk_size",), "The backward pass does not apply the chunks."),
    "mask_absent": (("mask",), "The backward pass does not apply the mask."),
    "padding_counted": (("key_mask", "key_lengths"), "The backward pass sees padded keys."),
    "segments_absent": (("segment_ids",), "The backward pass does not keep segments apart."),
    "bias_absent": (("bias",), "The weights of the backward pass are those without the bias."),
    "alibi_absent": (("alibi_slopes",), "The weights of the backward pass are those without linear biases (ALiBi)."),
}


def left_out(name: str, fields: tuple[str, ...], message: str) -> None:
    @mutant(name, message)
    def leave_out(case: GradientCase) -> Iterator[Variant]:
        change = {field: AttentionSpec._field_defaults[field] for field in fields}
        is_told = names_in(case.names, with_fields(case.spec, change))  # not by the gradients of these fields alone
        if is_softmax(case) and any(_has(case, field) for field in fields) and is_told:
            yield Variant(partial(without, case, change))


def without(case: GradientCase, change: Mapping[str, Any]) -> Gradients:
    """The gradients of a backward pass that computes weights without some fields, from the right logsumexp."""
    return case.changed(change).run(partial(Recomputed, case=case))


def _has(case: GradientCase, field: str) -> bool:
    value = getattr(case.spec, field)
    return value is not None and value is not False


for _name, (_fields, _message) in LEFT_OUT.items():
    left_out(_name, _fields, _message)
# A term is known to be ignored from the day that it exists: one without a row of its own has this.
for _kind in TERMS:
    if not any(_kind.field in _fields for _fields, _ in LEFT_OUT.values()):
        left_out(f"{_kind.field}_absent", (_kind.field,), f"The backward pass ignores {_kind.noun()}.")


@mutant("causal_added", "The backward pass applies a causal mask that the forward pass did not.")
def causal_added(case: GradientCase) -> Iterator[Variant]:
    if is_softmax(case) and not case.spec.is_causal and case.plan.sizes.query_length > 1:
        offset = {} if case.spec.query_offset is not None else {"query_offset": np.zeros((), np.int64)}
        other = case.changed({"is_causal": True, **offset})
        yield Variant(partial(other.run, partial(Recomputed, case=case)))


@mutant("causal_shifted", "The backward pass applies the causal mask with another offset than the forward pass.")
def causal_shifted(case: GradientCase) -> Iterator[Variant]:
    if is_softmax(case) and case.spec.is_causal:
        sizes, offset = case.plan.sizes, case.spec.query_offset
        own = np.asarray(case.plan.roles.past_length) if offset is None else offset
        others = {"one key more": own + 1, "one key less": own - 1, "the first query with the first key": own * 0}
        others["the last query with the last key"] = own * 0 + sizes.key_length - sizes.query_length
        for detail, other in others.items():
            if (other != own).any():
                yield Variant(
                    partial(case.changed({"query_offset": other}).run, partial(Recomputed, case=case)), detail
                )


class Slope(Wrong):
    def __init__(
        self, *arguments: Any, case: GradientCase, slope: Callable[[np.ndarray], np.ndarray], stage: str
    ) -> None:
        super().__init__(*arguments, case=case)
        self.slope, self.stage = slope, stage
        self.reads = self.reads | {stage}

    def softcap_slope(self, stages: Mapping[str, Array]) -> Array:
        assert self.plan.softcap is not None
        return self.slope(stages[self.stage] / self.plan.softcap)

    def _shown(self, numbers: Array, seen: Array | None) -> Array:
        return numbers


def sloped(
    case: GradientCase, slope: Callable[[np.ndarray], np.ndarray], detail: str = "", stage: str = "scaled_scores"
) -> Iterator[Variant]:
    """The form of a mistake with another derivative of the softcap. slope: of the scores of a stage over the softcap"""
    if case.plan.softcap is not None:
        yield made_by(case, partial(Slope, slope=slope, stage=stage), detail)


@mutant("softcap_absent", "The gradient does not pass through the softcap: its derivative is left out.")
def softcap_absent(case: GradientCase) -> Iterator[Variant]:
    yield from sloped(case, np.ones_like)


@mutant("softcap_other", "The derivative of the softcap is that of another function.")
def softcap_other(case: GradientCase) -> Iterator[Variant]:
    yield from sloped(case, lambda ratio: 1 - ratio**2, "1 - (score / softcap)²")
    yield from sloped(case, lambda ratio: 1 - np.tanh(ratio), "1 - tanh")
    yield from sloped(case, lambda ratio: 1 - np.tanh(np.tanh(ratio)) ** 2, "of scores that were capped already")


@mutant("softcap_after_mask", "The derivative of the softcap is computed from masked scores.")
def softcap_after_mask(case: GradientCase) -> Iterator[Variant]:
    if case.spec.bias is not None or case.spec.alibi_slopes is not None:
        yield from sloped(case, lambda ratio: np.where(np.isfinite(ratio), 1 - ratio**2, 0.0), stage="masked_scores")
    yield from sloped(case, lambda ratio: 1 - ratio**2, "NaN where keys are hidden", stage="masked_scores")


class WithoutSinks(Wrong):
    def run(self, tile: Tile, weights: Array, stages: Mapping[str, Array], write: Any) -> list[Part]:
        sums = weights.sum(axis=-1, keepdims=True)
        return super().run(tile, weights / np.where(sums == 0, 1, sums), stages, write)

    def delta(self, tile: Tile, weights: Array, of_weights: Array) -> Array:
        return self.deltas(tile)


@mutant("sink_absent", "The weights of the backward pass leave the sinks out.")
def sink_absent(case: GradientCase) -> Iterator[Variant]:
    if case.plan.all_sinks is not None and is_softmax(case):
        yield made_by(case, WithoutSinks)


@mutant("sink_sign", "The gradient of the sinks has the wrong sign.")
def sink_sign(case: GradientCase) -> Iterator[Variant]:
    def edit(sums: Sums) -> Sums:
        return {name: -array if name == "sinks" else array for name, array in sums.items()}

    if "grad_sinks" in case.names:
        yield edited(case, edit)


@mutant("sink_padding", "Padded queries add to the gradient of the sinks.")
def sink_padding(case: GradientCase) -> Iterator[Variant]:
    if "grad_sinks" in case.names and case.spec.query_lengths is not None and is_softmax(case):
        yield Variant(partial(with_padding, case))


def with_padding(case: GradientCase) -> Gradients:
    """The right gradients, but those of sinks of a request without padded queries."""
    whole = case.changed({"query_lengths": None}).run()
    return {**case.right, "grad_sinks": whole["grad_sinks"]}


class OtherCotangent(Wrong):
    def __init__(self, *arguments: Any, case: GradientCase, factor: float) -> None:
        super().__init__(*arguments, case=case)
        assert self.logsumexp is not None
        self.logsumexp = self.logsumexp * factor


def _has_logsumexp(case: GradientCase) -> bool:
    return case.plan.gradients is not None and case.plan.gradients.logsumexp is not None


@mutant("lse_cotangent_ignored", "The gradient with respect to the logsumexp is ignored.")
def lse_cotangent_ignored(case: GradientCase) -> Iterator[Variant]:
    if _has_logsumexp(case):
        yield made_by(case, partial(OtherCotangent, factor=0.0))


@mutant("lse_cotangent_sign", "The gradient with respect to the logsumexp is subtracted, not added.")
def lse_cotangent_sign(case: GradientCase) -> Iterator[Variant]:
    if _has_logsumexp(case):
        yield made_by(case, partial(OtherCotangent, factor=-1.0))


@mutant("lse_cotangent_base2", "The gradient with respect to the logsumexp is taken for one of another base.")
def lse_cotangent_base2(case: GradientCase) -> Iterator[Variant]:
    if _has_logsumexp(case):
        yield made_by(case, partial(OtherCotangent, factor=LN2), "2 for e")
        yield made_by(case, partial(OtherCotangent, factor=1 / LN2), "e for 2")


class EmptyNan(Wrong):
    def run(self, tile: Tile, weights: Array, stages: Mapping[str, Array], write: Any) -> list[Part]:
        seen = visible(self.plan.terms, tile, self.lib.load)
        if seen is not None:
            empty = ~np.broadcast_to(seen, weights.shape).any(axis=-1, keepdims=True)
            weights = np.where(empty, np.nan, weights)
        return super().run(tile, weights, stages, write)


@mutant("empty_nan", "Queries that see no key make NaN: the gradient of what they see is that of 0 / 0.")
def empty_nan(case: GradientCase) -> Iterator[Variant]:
    if is_softmax(case) and np.isneginf(case.logsumexp).any():
        yield made_by(case, EmptyNan)
