"""The judge of gradients that a kernel returned: are they right, and which mistake do they show."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from attention_service.attention.gradients import PREFIX
from attention_service.attention.outputs import OUTPUTS
from attention_service.attention.planning import make_plan
from attention_service.attention.result import Metadata, request_axes
from attention_service.backends.base import Backend, Check, no_check
from attention_service.comparison.actual import AXES, check_array, shown_shape
from attention_service.comparison.errors import distances, measure
from attention_service.comparison.gradients.case import (
    GradientCase,
    Gradients,
    included,
    leaves,
    make_case,
    stored_dtype,
)
from attention_service.comparison.gradients.rounding import Limits, limits_of
from attention_service.comparison.judged import Judged
from attention_service.comparison.places import places, worst
from attention_service.comparison.rules import CORRECT, TINY
from attention_service.comparison.truth import GradientQuestion
from attention_service.schemas.compare import Place, WorstElement


@dataclass(frozen=True, eq=False)
class GradientTruth:
    """What is right for a request with cotangents. case: its gradients; limits: of rounding

    sent: float64 arrays by dotted name, none to ask for the power of the request; metadata: of the service
    """

    case: GradientCase
    limits: Limits
    sent: Gradients
    metadata: Metadata

    def apart(self, one: Gradients, other: Gradients) -> float:
        """The largest difference of gradients, in baselines."""
        return max((self.ratio(name, array, other[name]) for name, array in one.items()), default=0.0)

    def ratio(self, name: str, one: np.ndarray, other: np.ndarray) -> float:
        """The largest difference of one gradient, in baselines."""
        return float((distances(one, other) / self.limits.limits[name]).max(initial=0.0))

    def scaled(self, arrays: Gradients, name: str) -> np.ndarray:
        """A gradient in baselines."""
        found: np.ndarray = arrays[name] / self.limits.limits[name]
        return found


def gradient_truth(
    question: GradientQuestion, sent: Gradients, backend: Backend, check: Check = no_check
) -> GradientTruth:
    """What is right, and the limits of rounding. sent: of a kernel, by dotted name. Errors: InvalidRequest."""
    spec, dtype, names = question.spec, question.plan.dtype, question.names
    with np.errstate(all="ignore"):
        case = make_case(spec, dtype, names, check)
        include = included(names)
        plain = spec._replace(dtype=dtype.name, backend="numpy", device="cpu", gradients=None, include=include)  # type: ignore[arg-type]  # names of arrays
        plain = plain._replace(allow_non_finite=True)
        found = backend.run(make_plan(plain), plain, plain.sources, check)
        served = leaves(found.arrays)
        limits = limits_of(case, case.right, {name: served[name] for name in names})
        return GradientTruth(case, limits, sent, found.metadata)


def read_gradients(given: Mapping[str, np.ndarray], question: GradientQuestion, field: str) -> dict[str, np.ndarray]:
    """The gradients of a kernel as float64 arrays, by dotted name. Errors: InvalidArray, ShapeMismatch."""
    found = {}
    for name in question.names:
        if name not in given:
            continue
        array, plan = given[name], question.plan
        wanted = shown_shape(name, plan) if name in OUTPUTS else plan.output_shape(name)
        check_array(array, wanted, f"/{field}/{name.replace('.', '/')}")
        found[name] = array.astype(np.float64)
    return found


def judge_gradients(truth: GradientTruth) -> dict[str, Judged]:
    """The errors of all gradients that were sent."""
    judged = {}
    for name, array in truth.sent.items():
        right, limits = truth.case.right[name], truth.limits.limits[name]
        stored = stored_dtype(truth.case, name)
        worst_ratio = float((distances(array, right) / limits).max(initial=0.0))
        rounded = np.asarray(truth.limits.worst[name], np.float64)
        errors, baseline = (measure(one, right, stored) for one in (array, rounded))
        # Each number has a limit of its own: one for all says the same ratio.
        is_scaled = errors.max_abs and 0 < worst_ratio < math.inf
        limit = errors.max_abs / worst_ratio if is_scaled and errors.max_abs else float(limits.max(initial=TINY))
        judged[name] = Judged(errors, baseline, limit)
    return judged


def where_gradients(truth: GradientTruth, judged: Mapping[str, Judged]) -> list[Place]:
    """The places of the first gradient that is wrong."""
    return next((_where(truth, name) for name, one in judged.items() if one.ratio > CORRECT), [])


def _where(truth: GradientTruth, name: str) -> list[Place]:
    """The places of a gradient that is wrong."""
    sent, right = truth.scaled(truth.sent, name), truth.scaled(truth.case.right, name)
    axes = axes_of(truth.case, name, sent.ndim)
    found = places(name, sent, right, CORRECT, axes)
    for whole in found[:1]:  # none where what is wrong is right by the last digit of the ratio
        whole.axes = list(axes)
        whole.worst = [_as_sent(one, truth, name) for one in worst(sent, right)]
    return found


def _as_sent(one: WorstElement, truth: GradientTruth, name: str) -> WorstElement:
    """One of the worst elements in baselines, with the numbers that were sent and that are right."""
    at = tuple(one.index)
    actual, reference = (float(array[at]) for array in (truth.sent[name], truth.case.right[name]))
    return WorstElement(index=one.index, actual=actual, reference=reference)


def axes_of(case: GradientCase, name: str, rank: int) -> tuple[str, ...]:
    """What each axis of a gradient counts."""
    field, plan = name.removeprefix(PREFIX), case.plan
    if name in OUTPUTS:
        return tuple(AXES[letter] for letter in request_axes(name, plan)[1])
    if field in ("query", "key", "value", "past_key", "past_value") and rank == len(plan.layout):
        heads = "head" if field == "query" else AXES["g"]
        tokens = "row" if field == "query" else "key"
        return tuple({"h": heads, "l": tokens}.get(letter, AXES[letter]) for letter in plan.layout)
    if field in ("sinks", "alibi_slopes", "scale") and rank == 1:
        return ("head",)
    return tuple(f"axis {place}" for place in range(rank))
