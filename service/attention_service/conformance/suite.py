"""Cases: requests with their exact answers, and how far a right answer may be from these."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from attention_service.attention.spec import AttentionSpec
from attention_service.comparison.actual import canonical
from attention_service.comparison.baseline import baselines
from attention_service.comparison.case import make_case
from attention_service.comparison.gradients.judge import gradient_truth
from attention_service.comparison.rules import CORRECT, Arrays
from attention_service.comparison.sample import everything
from attention_service.comparison.truth import GradientQuestion
from attention_service.conformance.changes import Fields
from attention_service.conformance.corners import COMBINED
from attention_service.conformance.requests import EVERYTHING, SOURCES, Choice, make_fields
from attention_service.library import attend
from attention_service.library.calls import backends
from attention_service.pipeline.prepare import plan_of_fields

# Of so many cases in a row, the last ones are of the corner `combined`.
ROUND: Final = 5
SINGLE: Final = 3
ALONE: Final = "weights_without_sinks"


@dataclass(frozen=True)
class SuiteCase:
    """A request with its exact answer.

    fields:    of the request, arrays as ndarrays
    expected:  `output`, `logsumexp` where it is defined, and `weights_without_sinks` where the request asks for them;
               of a request with gradients of the output, the gradients of its arrays; in float64 and in the axes of a
               response
    tolerance: the largest absolute error of a right answer, by the name of the array; of gradients one for each number
    """

    name: str
    corner: str
    fields: Fields
    expected: Mapping[str, np.ndarray]
    tolerance: Mapping[str, float | np.ndarray]

    @property
    def dtype(self) -> str:
        """The type of the request."""
        return str(self.fields["query"].dtype.name)

    @property
    def options(self) -> list[str]:
        """The names of the fields other than query, key and value."""
        return sorted(self.fields.keys() - SOURCES)


def make_cases(count: int, seed: int, choice: Choice = EVERYTHING) -> Iterator[SuiteCase]:
    """So many cases: three of single corners, in turn and with their types in turn, then two of many options.

    choice: of those of single corners, the ones that it has; all others have options that it allows
    """
    corners = choice.corners
    for number in range(count):
        block, place = divmod(number, ROUND)
        if place < SINGLE:
            turn, which = divmod(SINGLE * block + place, len(corners))
            corner = corners[which]
        else:
            turn, corner = (ROUND - SINGLE) * block + place - SINGLE, COMBINED
        dtype, head_dim = choice.turn(corner, turn)
        fields = make_fields(corner, dtype, np.random.default_rng([seed, number]), head_dim, choice)
        if choice.has(fields):
            yield finished(f"{number:04}-{corner.name}", corner.name, fields)


def finished(name: str, corner: str, fields: Fields) -> SuiteCase:
    """The case of a request, with its answer in float64 and its tolerances."""
    spec, plan = plan_of_fields(fields)
    if plan.gradients is not None:
        wanted = tuple(gradient.name for gradient in plan.gradients.wanted)
        truth = gradient_truth(GradientQuestion(spec, plan, wanted), {}, backends().choose("numpy", "cpu"))
        allowed = {array: CORRECT * limits for array, limits in truth.limits.limits.items()}
        return SuiteCase(name, corner, fields, dict(truth.case.right), allowed)
    names = ["logsumexp"] if plan.normalization == "softmax" else []
    names += [ALONE] if ALONE in fields.get("include", ()) else []
    exact = {**fields, "dtype": "float64", "include": names}
    result = attend(**exact)
    _, wide = plan_of_fields(exact)
    expected = {array: np.asarray(result[array]) for array in ("output", *names)}
    right = {array: canonical(numbers, array, wide) for array, numbers in expected.items()}
    limits = _limits(spec, plan.dtype, right)
    return SuiteCase(name, corner, fields, expected, {array: CORRECT * limits[array] for array in expected})


def _limits(spec: AttentionSpec, dtype: np.dtype, right: Arrays) -> dict[str, float]:
    """The baseline of each array. Weights without sinks have that of the weights of a request without sinks."""
    case = make_case(spec, dtype)
    limits = baselines(case, everything(case), right, dtype)
    if ALONE in right:
        alone = make_case(spec._replace(sinks=None), dtype)
        weights = {"attention_weights": right[ALONE]}
        limits[ALONE] = baselines(alone, everything(alone), weights, dtype)["attention_weights"]
    return limits
