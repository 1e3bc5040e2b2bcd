"""Backward passes with a planted mistake: random requests with cotangents, and the gradients that a kernel returns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from attention_service.attention.terms import FIELDS
from attention_service.codecs.decoded import Decoded
from attention_service.comparison.gradients.case import leaves, make_case
from attention_service.comparison.gradients.mutants import GRADIENT_MUTANTS
from attention_service.comparison.inputs import make_input
from attention_service.comparison.recipes import Recipe
from attention_service.library import attend
from attention_service.pipeline.prepare import make_spec_and_plan
from tests.helpers.planted import USUAL, random_recipe

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
    "sink_padding": ("sinks", "query_lengths"),
    "lse_cotangent_ignored": ("grad_logsumexp",),
    "lse_cotangent_sign": ("grad_logsumexp",),
    "lse_cotangent_base2": ("grad_logsumexp",),
    "rotary_not_undone": ("rotary",),
    "empty_nan": ("mask",),
    "empty_uniform": ("mask",),
}
# Options that leave no room for them, and sizes in which they show, by those of a random recipe.
WITHOUT: Final[dict[str, set[str]]] = {
    "causal_added": {"is_causal"},
    "value_features": {"rotary"},
    "first_chunk": {"is_causal", "window", "past"},
}
Size = Callable[[Recipe], int]
GROUPS: Final[dict[str, Size]] = {"kv_heads": lambda recipe: 2, "heads": lambda recipe: 4 + 2 * (recipe.heads % 2)}
SQUARE: Final[dict[str, Size]] = {"queries": lambda recipe: recipe.keys, "kv_heads": lambda recipe: recipe.heads}
ROWS: Final[dict[str, Size]] = {"queries": lambda recipe: min(37, recipe.keys)}
SIZES: Final[dict[str, dict[str, Size]]] = {
    "not_grouped": GROUPS,
    "group_mean": GROUPS,
    "query_head": GROUPS,
    "dq_dk_swapped": SQUARE,
    "transposed": SQUARE,
    "tail_dropped": ROWS,
    "not_accumulated": ROWS,
    "value_features": {"head_dim": lambda recipe: 4, "value_dim": lambda recipe: 8},
    "delta_layout": {"heads": lambda recipe: 2 * recipe.kv_heads},
    "dk_dv_swapped": {"value_dim": lambda recipe: recipe.head_dim},
    "first_chunk": {"keys": lambda recipe: 64, "queries": lambda recipe: 13},
    "bias_not_summed": {"batch": lambda recipe: 2},
}


@dataclass(frozen=True)
class GradientDraw:
    """A request, and the gradients that a kernel with a mistake returns for it, by name."""

    fields: dict[str, Any]
    gradients: dict[str, Any]


def draw_gradients(seed: int, name: str, extras: Sequence[str] = USUAL) -> GradientDraw | None:
    """A random request to which a mistake applies, with its gradients; None if it does not apply to it.

    extras: options that it may have beside those that the mistake needs

    The gradients are those of the mistake in float64, and the errors of the service in the type of the request.
    """
    random = np.random.default_rng(seed)
    mistake = name.removeprefix("grad.")
    field = mistake.removesuffix("_absent")
    needs = NEEDS.get(mistake, (field,) if field in FIELDS else ())
    options = {"grad_output", *needs} | ({"grad_logsumexp"} if random.random() < 0.3 else set())
    recipe = random_recipe(random, (), extras)
    sizes: dict[str, Any] = {field: make(recipe) for field, make in SIZES.get(mistake, {}).items()}
    recipe = replace(recipe, **sizes)
    recipe = replace(recipe, options=recipe.options - WITHOUT.get(mistake, set()) | options)
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
        own = leaves(attend(**fields))
        found: dict[str, Any] = {}
        for one, array in made.items():
            service = own[one].astype(np.float64)
            outer, _, inner = one.partition(".")
            gradient = (array + (service - case.right[one])).astype(own[one].dtype)
            found |= {outer: {**found.get(outer, {}), inner: gradient}} if inner else {outer: gradient}
    return GradientDraw(fields, found)
