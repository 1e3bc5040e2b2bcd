"""Backward passes with a planted mistake: random requests with cotangents, and the gradients that a kernel returns."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from attention_service.codecs.decoded import Decoded
from attention_service.comparison.gradients.case import make_case
from attention_service.comparison.gradients.mutants import GRADIENT_MUTANTS
from attention_service.comparison.inputs import make_input
from attention_service.library import attend
from attention_service.pipeline.prepare import make_spec_and_plan
from tests.helpers.planted import random_recipe

# The options that mistakes need.
NEEDS: Final[dict[str, tuple[str, ...]]] = {
    "causal_absent": ("is_causal",),
    "window_absent": ("window",),
    "chunk_absent": ("chunk_size",),
    "mask_absent": ("mask",),
    "padding_counted": ("key_mask",),
    "segments_absent": ("segment_ids",),
    "bias_absent": ("bias",),
    "bias_not_summed": ("bias",),
    "alibi_absent": ("alibi_slopes",),
    "softcap_absent": ("softcap",),
    "softcap_other": ("softcap",),
    "softcap_after_mask": ("softcap", "bias"),
    "sink_absent": ("sinks",),
    "sink_sign": ("sinks",),
    "lse_cotangent_ignored": ("grad_logsumexp",),
    "lse_cotangent_sign": ("grad_logsumexp",),
    "lse_cotangent_base2": ("grad_logsumexp",),
    "rotary_not_undone": ("rotary",),
    "empty_nan": ("mask",),
}
GROUPED: Final = ("not_grouped", "group_mean", "query_head")


@dataclass(frozen=True)
class GradientDraw:
    """A request, and the gradients that a kernel with a mistake returns for it, by name."""

    fields: dict[str, Any]
    gradients: dict[str, np.ndarray]


def draw_gradients(seed: int, name: str) -> GradientDraw | None:
    """A random request to which a mistake applies, with its gradients; None if it does not apply to it.

    The gradients are those of the mistake in float64, and the errors of the service in the type of the request.
    """
    random = np.random.default_rng(seed)
    mistake = name.removeprefix("grad.")
    recipe = random_recipe(random, ())
    options = {"grad_output", *NEEDS.get(mistake, ())} | ({"grad_logsumexp"} if random.random() < 0.3 else set())
    if mistake == "causal_added":
        recipe = replace(recipe, options=recipe.options - {"is_causal"})
    if mistake in GROUPED:
        recipe = replace(recipe, kv_heads=2, heads=int(random.choice([4, 6])))
    if mistake in ("dk_dv_swapped",):
        recipe = replace(recipe, value_dim=recipe.head_dim)
    if mistake in ("dq_dk_swapped", "transposed"):
        recipe = replace(recipe, queries=recipe.keys, kv_heads=recipe.heads)
    if mistake in ("first_chunk",):
        recipe = replace(recipe, keys=64, queries=13, options=frozenset())
    if mistake in ("tail_dropped", "not_accumulated"):
        recipe = replace(recipe, queries=min(37, recipe.keys))
    if mistake == "bias_not_summed":
        recipe = replace(recipe, batch=2)
    recipe = replace(recipe, options=recipe.options | options)
    fields = make_input(recipe, seed)
    spec, plan = make_spec_and_plan(Decoded(fields, frozenset()), allow_non_finite=True)
    assert plan.gradients is not None
    names = tuple(one.name for one in plan.gradients.wanted)
    with np.errstate(all="ignore"):
        case = make_case(spec, plan.dtype, names)
        variants = list(GRADIENT_MUTANTS[name].edit(case))
        if not variants:
            return None
        made = {**case.right, **variants[random.integers(len(variants))].run()}
        own = attend(**fields)
        found = {}
        for one, array in made.items():
            service = np.asarray(own[one])
            found[one] = (array + (service.astype(np.float64) - case.right[one])).astype(service.dtype)
    return GradientDraw(fields, found)
