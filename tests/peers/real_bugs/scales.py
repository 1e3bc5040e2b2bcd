"""Bugs of factors: the scale, factors of quantised operands, rotary embedding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import numpy as np

from tests.peers.real_bugs.parts import (
    BF16,
    F16,
    F32,
    Arrays,
    Bug,
    Fields,
    Head,
    asks,
    causal,
    collected,
    flash,
    heads_of,
    named,
    operands,
    returned,
)


def _scaled(fields: Fields, scale: Callable[[Head], float]) -> np.ndarray:
    """The output of the usual kernel with the scale of a head."""

    def one(head: Head) -> np.ndarray:
        q, k = head.sizes
        visible = causal(q, k, k - q) if fields.get("is_causal") else None
        return flash(replace(head, scale=scale(head)), visible).output

    return collected(fields, one)


def scale_of_one(fields: Fields, wrong: bool) -> Arrays:
    return _scaled(fields, lambda head: 1.0 if wrong else head.scale)


def scale_not_read(fields: Fields, wrong: bool) -> Arrays:
    return _scaled(fields, lambda head: head.query.shape[-1] ** -0.5 if wrong else head.scale)


def scale_hard_coded(fields: Fields, wrong: bool) -> Arrays:
    return _scaled(fields, lambda head: 0.5 if wrong else head.scale)


def scale_divides(fields: Fields, wrong: bool) -> Arrays:
    return _scaled(fields, lambda head: 1 / head.scale if wrong else head.scale)


def scale_of_the_latent(fields: Fields, wrong: bool) -> Arrays:
    return _scaled(fields, lambda head: 576**-0.5 if wrong else 256**-0.5)


def scale_of_all_heads(fields: Fields, wrong: bool) -> Arrays:
    h = fields["query"].shape[1]
    return _scaled(fields, lambda head: (h * head.value.shape[-1]) ** -0.5 if wrong else head.scale)


def scale_of_zero(fields: Fields, wrong: bool) -> Arrays:
    return _scaled(fields, lambda head: 0.0 if wrong else head.scale)


def scale_of_the_packed_head(fields: Fields, wrong: bool) -> Arrays:
    """Query heads are packed into rows of one head, whose factor of quantisation all rows have."""
    return _scaled(fields, lambda head: float(fields["scale"][0 if wrong else head.h]))


def scaled_weights(fields: Fields, wrong: bool) -> Arrays:
    """softmax(q · k) · scale in the place of softmax(q · k · scale)."""

    def one(head: Head) -> np.ndarray:
        if wrong:
            return flash(replace(head, scale=1.0)).output * F32(head.scale)
        return flash(head).output

    return collected(fields, one)


def _quantised(fields: Fields, *, key: np.ndarray, value: np.ndarray) -> np.ndarray:
    """The output of the usual kernel, scores and outputs times these numbers, (kv heads,)."""

    def one(head: Head) -> np.ndarray:
        n = head.h // head.group
        return flash(replace(head, scale=head.scale * float(key[n]))).output * F32(value[n])

    return collected(fields, one)


_FACTORS: Final = np.array([0.37, 1.9, 0.81, 2.6])


def value_factor_forgotten(fields: Fields, wrong: bool) -> Arrays:
    """Values were divided by 0.37 when they were written."""
    ones = np.ones(4)
    return _quantised(fields, key=ones, value=ones / 0.37 if wrong else ones)


def value_scale_forgotten(fields: Fields, wrong: bool) -> Arrays:
    """The model scales values by 0.707. The request has them scaled."""
    ones = np.ones(4)
    return _quantised(fields, key=ones, value=ones / 0.707 if wrong else ones)


def factors_dropped(fields: Fields, wrong: bool) -> Arrays:
    """Keys and values were divided by a factor of each head, which is not passed on."""
    ones = np.ones(4)
    return _quantised(fields, key=1 / _FACTORS if wrong else ones, value=1 / _FACTORS[::-1] if wrong else ones)


def value_factor_of_the_first(fields: Fields, wrong: bool) -> Arrays:
    """Factors of each key/value head are read as one number, the first."""
    ones = np.ones(4)
    return _quantised(fields, key=ones, value=_FACTORS[0] / _FACTORS if wrong else ones)


def _turned(x: np.ndarray, cos: np.ndarray, sin: np.ndarray, first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """x (…, l, d) with its pairs of features first, second turned. cos, sin: (l, pairs)"""
    turned = x.copy()
    turned[..., first] = x[..., first] * cos - x[..., second] * sin
    turned[..., second] = x[..., first] * sin + x[..., second] * cos
    return turned.astype(F32)


def _rotated(fields: Fields, angles: Callable[[np.ndarray], Any], first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """The output of a kernel that rotates. angles: (positions, pairs) -> cos and sin, by position"""
    query, key, value = operands(fields)
    cos, sin = angles(np.arange(query.shape[2]))
    turned = (_turned(x, cos, sin, first, second) for x in (query, key))
    q = query.shape[2]
    outputs = [flash(head, causal(q, q)).output for head in heads_of(*turned, value)]
    return returned(fields, np.stack(outputs).reshape(*query.shape[:3], -1))


def _angles(base: float, dim: int, pairs: int) -> Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]:
    def of(positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        found = positions[:, None] * base ** (-2 * np.arange(pairs) / dim)
        return np.cos(found), np.sin(found)

    return of


def all_features_turned(fields: Fields, wrong: bool) -> Arrays:
    """The table has rows of 32 cosines and 32 sines. A kernel for 128 features reads 64 cosines, then 64 sines."""
    if not wrong:
        return _rotated(fields, _angles(10000, 64, 32), np.arange(32), np.arange(32, 64))

    def angles(positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        table = np.concatenate(_angles(10000, 64, 32)(positions), axis=1).ravel()
        table = np.concatenate([table, np.zeros(64)])
        rows = np.stack([table[64 * p : 64 * p + 128] for p in positions])
        return rows[:, :64], rows[:, 64:]

    return _rotated(fields, angles, np.arange(64), np.arange(64, 128))


def turned_by_the_width_of_the_head(fields: Fields, wrong: bool) -> Arrays:
    """64 of 128 features turn. Frequencies and pairs are those of 128."""
    dim = 128 if wrong else 64
    return _rotated(fields, _angles(10000, dim, 32), np.arange(32), np.arange(32) + dim // 2)


def usual_base(fields: Fields, wrong: bool) -> Arrays:
    return _rotated(fields, _angles(1e4 if wrong else 5e6, 128, 64), np.arange(64), np.arange(64, 128))


def pairs_within_the_turned(fields: Fields, wrong: bool) -> Arrays:
    """Pairs are features of each half of the head, of which the first 16 turn; they are taken among the first 32."""
    cos, sin = (np.asarray(fields["rotary"][name])[:, :16] for name in ("cos", "sin"))
    return _rotated(fields, lambda _: (cos, sin), np.arange(16), np.arange(16) + (16 if wrong else 64))


def _proportional(name: str) -> np.ndarray:
    """cos or sin of 64 pairs, of which 16 turn."""
    found = _angles(10000, 128, 16)(np.arange(128))[name == "sin"]
    return np.concatenate([found, np.full((128, 48), 0.0 if name == "sin" else 1.0)], axis=1)


BUGS: Final = (
    Bug(
        "mlc-ai/mlc-llm#3426",
        "The fallback has a scale of 1.",
        asks(h=12, g=12, q=128, dtype=F16),
        scale_of_one,
        named("scale.absent"),
    ),
    Bug(
        "tenstorrent/tt-metal#33304",
        "The scale of the caller is not read.",
        asks(h=16, g=16, q=32, dtype=BF16, scale=0.5),
        scale_not_read,
        named("scale.other"),
    ),
    Bug(
        "BobMcDear/attorch#14",
        "The scale is 0.5, whatever the head dimension is.",
        asks(h=4, g=4, q=128),
        scale_hard_coded,
        named("scale.other"),
    ),
    Bug(
        "AI-Hypercomputer/maxtext#1370",
        "Scores are divided by the scale.",
        asks(h=4, g=4, q=128, d=192, e=128, is_causal=True),
        scale_divides,
        named("scale.other"),
    ),
    Bug(
        "ollama/ollama#13893",
        "The scale is that of the latent dimension, 576, not that of the keys before absorption, 256.",
        asks(h=8, g=1, q=4, k=256, d=576, e=512, dtype=BF16, scale=1 / 16),
        scale_of_the_latent,
        named("scale.other"),
    ),
    Bug(
        "juho-lee/set_transformer#18",
        "The scale is taken from the width of all heads.",
        asks(h=4, g=4, q=128),
        scale_of_all_heads,
        named("scale.other"),
    ),
    Bug(
        "SKaiNET-developers/SKaiNET#880",
        "A scale of 0, which stands for the default, is used as it is.",
        asks(h=4, g=4, q=128),
        scale_of_zero,
        named("output.mean_value", "scale.other"),
    ),
    Bug(
        "ROCm/rocm-libraries#11189",
        "Heads that are packed into rows have the factor of quantisation of the first.",
        asks(h=8, g=1, q=64, d=128, dtype=BF16, scale=np.linspace(0.04, 0.15, 8)),
        scale_of_the_packed_head,
        named("scale.first_head"),
    ),
    Bug(
        "FrancescoSaverioZuppichini/ViT#2",
        "The weights are scaled, the scores are not.",
        asks(h=8, g=8, q=197),
        scaled_weights,
    ),
    Bug(
        "sgl-project/sglang#34765",
        "The factor of quantised values is left out, that of keys is not.",
        asks(h=8, g=4, q=16, k=256, d=128, dtype=BF16),
        value_factor_forgotten,
        named("output.scaled"),
    ),
    Bug(
        "NVIDIA-NeMo/Megatron-Bridge#4155",
        "The scale of the values, 0.707, is read and never used.",
        asks(h=8, g=4, q=128, d=192, e=128, dtype=BF16, is_causal=False),
        value_scale_forgotten,
        named("output.scaled"),
    ),
    Bug(
        "vllm-project/vllm#51363",
        "Factors of quantised keys and values, one for each head, are dropped.",
        asks(h=8, g=4, q=64, k=128, d=128, dtype=BF16),
        factors_dropped,
    ),
    Bug(
        "sgl-project/sgl-kernel-xpu#252",
        "All key/value heads have the factor of quantised values of the first.",
        asks(h=8, g=4, q=64, k=128, d=128, dtype=BF16),
        value_factor_of_the_first,
    ),
    Bug(
        "vllm-project/vllm#43676",
        "All 128 features are rotated where 64 should be, with a table for 64.",
        asks(h=4, g=2, q=128, d=128, is_causal=True, rotary={"dim": 64}),
        all_features_turned,
    ),
    Bug(
        "pie-project/pie#602",
        "64 of 128 features are rotated by the frequencies and pairs of 128.",
        asks(h=4, g=2, q=128, d=128, is_causal=True, rotary={"dim": 64}),
        turned_by_the_width_of_the_head,
        named("rotary.other_dim"),
    ),
    Bug(
        "huggingface/candle#3746",
        "The base of the rotation is 10000, not that of the model.",
        asks(h=4, g=2, q=128, d=128, is_causal=True, rotary={"base": 5e6}),
        usual_base,
        named("rotary.base"),
    ),
    Bug(
        "apple/coreai-models#66",
        "Pairs are taken among the features that turn, not one of each half of the head.",
        asks(h=4, g=2, q=128, d=128, is_causal=True, rotary={"cos": _proportional("cos"), "sin": _proportional("sin")}),
        pairs_within_the_turned,
    ),
)
