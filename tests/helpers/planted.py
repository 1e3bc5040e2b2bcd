"""Kernels with a planted mistake: random requests, and what a kernel that makes a known mistake returns for them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from attention_service.attention.terms import FIELDS
from attention_service.codecs.decoded import Decoded
from attention_service.comparison.baseline import baselines, rounded_cases
from attention_service.comparison.case import Case, make_case
from attention_service.comparison.errors import distance
from attention_service.comparison.inputs import OPTIONS, make_input
from attention_service.comparison.mutants import MUTANTS
from attention_service.comparison.recipes import Recipe, needs_tiles, recipe_for
from attention_service.comparison.sample import everything
from attention_service.comparison.solve import solve
from attention_service.pipeline.prepare import make_spec_and_plan
from attention_service.schemas.compare import CompareReport

TYPES: Final = ("float32", "float32", "bfloat16", "float16", "float64")
# Options that a random request may have beside those that its mistake needs: of quick tests, whose seeds are chosen by
# what they show, and of deep ones, which draw all that terms make.
USUAL: Final = (
    "is_causal",
    "window",
    "key_mask",
    "mask",
    "bias",
    "alibi_slopes",
    "softcap",
    "sinks",
    "rotary",
    "clip_qkv",
    "past",
)
EVERY: Final = (*USUAL, *sorted(FIELDS - {*USUAL}))
KEYS: Final = (23, 37, 67, 131)
# Outputs are different ones if so many baselines are between them: both a kernel and a verdict may be off by two.
APART: Final = 4.0


@dataclass(frozen=True)
class Draw:
    """A request, and the names of the mistakes of a kernel, whose cases are `wrong`."""

    fields: dict[str, Any]
    case: Case
    names: tuple[str, ...]
    wrong: Case


def draw(seed: int, names: tuple[str, ...], extras: Sequence[str] = USUAL) -> Draw | None:
    """A random request to which these mistakes apply, one after the other; None if they do not apply to it.

    extras: options that it may have beside those that its mistakes need
    """
    random = np.random.default_rng(seed)
    recipe = random_recipe(random, names, extras)
    fields = make_input(recipe, seed)
    spec, plan = make_spec_and_plan(Decoded(fields, frozenset()), allow_non_finite=True)
    case = make_case(spec, plan.dtype)
    found = [case]
    for name in names:
        found = [wrong for before in found for wrong in shown(before, name)]
    return Draw(fields, case, names, found[random.integers(len(found))]) if found else None


def shown(case: Case, name: str) -> Iterator[Case]:
    """The cases that a mistake makes of one, without those of tiles that it need not show."""
    return (wrong for wrong in MUTANTS[name].edit(case) if wrong.tile is None or wrong.tile in case.tiles)


def random_recipe(random: np.random.Generator, names: tuple[str, ...], may_have: Sequence[str] = USUAL) -> Recipe:
    """A recipe of random options, sizes and type, to which these mistakes likely apply. may_have: see `draw`, extras"""
    recipe = recipe_for(names)
    extras = {name for name in may_have if random.random() < 0.15}
    if "causal.added" in names:
        extras.discard("is_causal")
    if recipe.normalization != "softmax":
        extras.discard("sinks")
    g = int(random.integers(1, 4))
    h = g * int(random.integers(1, 4))
    head_dim = int(random.choice([4, 8, 16]))
    value_dim = head_dim if random.random() < 0.5 or "value.is_key" in names else int(random.choice([3, 5, 8]))
    keys = int(random.choice(KEYS))
    if needs_tiles(names):
        keys = recipe.keys
    queries = keys if random.random() < 0.5 or "mask.transposed" in names else int(random.choice([5, 13, 19]))
    if "value.transposed" in names:
        extras.discard("past")
        keys = value_dim = head_dim
        queries = min(queries, keys)
    if {"heads.tiled", "heads.keys_only", "heads.kv_reversed", "causal.packed_group"} & {*names}:
        g, h = 2, 6
    return replace(
        recipe,
        options=(recipe.options | extras) & (OPTIONS.keys() | {"past"}),
        dtype=str(random.choice(TYPES)),
        batch=int(random.integers(2, 4)) if any("first" in name for name in names) else int(random.integers(1, 3)),
        heads=max(h, 2)
        if "head" in str(names)
        or "output" in str(names)
        or "layout" in str(names)
        or "sinks" in str(names)
        or recipe.scales_heads
        else h,
        kv_heads=g if h >= 2 or g == 1 else 1,
        queries=min(queries, keys),
        keys=keys,
        head_dim=head_dim,
        value_dim=value_dim,
        scale=(float(random.choice([0.2, 0.5])) if random.random() < 0.2 else None)
        if recipe.scale is None
        else recipe.scale,
    )


def returned(drawn: Draw, names: tuple[str, ...] = ("output",)) -> dict[str, np.ndarray]:
    """What the kernel returns, in layout bhld, rounded as a right kernel of the type of the request may round."""
    random = np.random.default_rng(len(str(drawn.names)))
    roundings = [one.rounding for one in rounded_cases(drawn.case, drawn.case.dtype)]
    rounding = roundings[random.integers(len(roundings))]
    own = drawn.wrong.rounding != drawn.case.rounding  # a mistake of rounding, or one that overflows
    found = solve(drawn.wrong if own else replace(drawn.wrong, rounding=rounding), everything(drawn.case))
    arrays = {"output": found.output.astype(drawn.case.dtype)}
    if "logsumexp" in names and found.logsumexp is not None:
        arrays["logsumexp"] = found.logsumexp.astype(np.float32 if drawn.case.dtype.itemsize < 8 else np.float64)
    return arrays


# Mistakes that are common, and all pairs of them.
COMMON: Final = (
    "scale.absent",
    "causal.offset_plus_one",
    "window.left_plus_one",
    "mask.absent",
    "heads.tiled",
    "softcap.absent",
    "sinks.absent",
    "rotary.interleaving",
    "bias.absent",
    "alibi.absent",
)
COMMON_PAIRS: Final = tuple(itertools.combinations(COMMON, 2))


def named_first(report: CompareReport, names: tuple[str, ...]) -> bool:
    """True if these mistakes, and no others, are the best hypothesis of a report, or have the same output as it."""
    if not report.hypotheses:
        return False
    best = report.hypotheses[0]
    return any(set(name.split(" and ")) == set(names) for name in (best.name, *best.also))


def tells_apart(drawn: Draw) -> bool:
    """True if the request shows what each of the mistakes adds to the others: that their output is another one."""
    sample = everything(drawn.case)
    output = {"output": solve(drawn.wrong, sample).output}
    limits = baselines(drawn.case, sample, {"output": solve(drawn.case, sample).output}, drawn.case.dtype)
    fewer = [drawn.names[:i] + drawn.names[i + 1 :] for i in range(len(drawn.names))]
    for names in fewer:
        cases = [drawn.case]
        for name in names:
            cases = [wrong for case in cases for wrong in MUTANTS[name].edit(case)]
        if any(distance(output["output"], solve(case, sample).output) <= APART * limits["output"] for case in cases):
            return False
    return True
