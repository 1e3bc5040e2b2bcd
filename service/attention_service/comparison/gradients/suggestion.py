"""Requests that show mistakes of a backward pass, and the gradients that a mistake has."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from attention_service.backends.base import Backend, Check
from attention_service.codecs.decoded import Decoded
from attention_service.comparison.case import Case
from attention_service.comparison.engine.suggestion import Suggestion, best_of
from attention_service.comparison.errors import largest_number
from attention_service.comparison.gradients.case import Gradients, stored_dtype
from attention_service.comparison.gradients.judge import GradientTruth, gradient_truth
from attention_service.comparison.gradients.mutants import GRADIENT_MUTANTS
from attention_service.comparison.gradients.mutants.table import Variant
from attention_service.comparison.inputs import TRIES, make_input
from attention_service.comparison.inputs import suggestions as suggestions_of_forward
from attention_service.comparison.mutants import MUTANTS
from attention_service.comparison.recipes import Recipe, recipe_of
from attention_service.comparison.rules import CORRECT
from attention_service.comparison.truth import GradientQuestion
from attention_service.errors import InvalidRequest, Overflow
from attention_service.pipeline.prepare import make_spec_and_plan


def gradients_of(truth: GradientTruth, variant: Variant) -> Gradients:
    """The gradients of a form of a mistake, infinite beyond the largest number of their type.

    NaN if it sees what is hidden, and is too large or no number.
    """
    right = truth.case.right
    try:
        made = {**right, **variant.run()}
    except Overflow:
        return {name: np.full(array.shape, np.nan) for name, array in right.items()}
    for name, array in made.items():
        is_beyond = np.abs(array) > largest_number(stored_dtype(truth.case, name))
        made[name] = np.where(is_beyond, np.copysign(np.inf, array), array)
    return made


def suggestions(
    truth: GradientTruth, forward: Case, wanted: Collection[str], backend: Backend, check: Check
) -> Iterator[Suggestion]:
    """Requests with random cotangents, and the mistakes of some that each shows."""
    recipe = recipe_of(replace(forward, spec=truth.case.spec))
    for seed in range(TRIES if wanted else 0):
        fields = make_input(recipe, seed)
        try:
            shown = _shown_by(fields, wanted, backend, check)
        except InvalidRequest:
            continue  # options that cannot stand together in these sizes, which is no error of the caller
        yield Suggestion(seed, fields, tuple(name for name in wanted if name in shown))


def suggest(recipe: Recipe, wanted: Collection[str], seed: int, backend: Backend, check: Check) -> Suggestion | None:
    """The request of a few seeds that shows most of the wanted mistakes, of both passes; None if none shows any.

    recipe: with cotangents for mistakes of the backward pass; seed: the first that is tried
    """
    backward = [name for name in wanted if name in GRADIENT_MUTANTS]
    forward = [name for name in wanted if name in MUTANTS]
    names = ("output", "logsumexp") if any(MUTANTS[name].needs for name in forward) else ("output",)

    def of_both() -> Iterator[Suggestion]:
        for one in suggestions_of_forward(recipe, forward, names, seed, check):
            shown = {*one.kills, *(_shown_by(one.fields, backward, backend, check) if backward else ())}
            yield replace(one, kills=tuple(name for name in wanted if name in shown))

    return best_of(of_both(), wanted)


def _shown_by(fields: dict[str, Any], wanted: Collection[str], backend: Backend, check: Check) -> set[str]:
    """The wanted mistakes that a request shows. fields: with cotangents, as `make_input` makes them"""
    spec, plan = make_spec_and_plan(Decoded(fields, frozenset()))
    assert plan.gradients is not None
    names = tuple(gradient.name for gradient in plan.gradients.wanted)
    truth = gradient_truth(GradientQuestion(spec, plan, names), {}, backend, check)
    seen, alive = set[str](), set[str]()
    for name in wanted:
        for variant in GRADIENT_MUTANTS[name].edit(truth.case):
            seen.add(name)
            with np.errstate(all="ignore"):
                made = gradients_of(truth, variant)
                if not truth.apart(made, truth.case.right) > CORRECT:
                    alive.add(name)
    return seen - alive
