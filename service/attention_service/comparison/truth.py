"""A question about what a kernel returned, and what is right for it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import numpy as np

from attention_service.attention.operands import as_cast
from attention_service.attention.outputs import OUTPUT
from attention_service.attention.plan import Plan
from attention_service.attention.planning import make_plan
from attention_service.attention.result import Result
from attention_service.attention.spec import AttentionSpec
from attention_service.backends.base import Backend, Check, no_check
from attention_service.backends.threads import TilePool
from attention_service.comparison.actual import Actual, canonical, is_gradient, read_actual
from attention_service.comparison.baseline import FIELDS, arrays_of, limit, rounded_cases, stored_dtype
from attention_service.comparison.case import Case, make_case
from attention_service.comparison.engine.comparison import Asked
from attention_service.comparison.engine.power import Power
from attention_service.comparison.errors import distance, epsilon, largest, measure
from attention_service.comparison.floors import floors, floors_of_others, right_weights
from attention_service.comparison.judged import Judged
from attention_service.comparison.legal import LIBERTIES
from attention_service.comparison.local_errors import place_of
from attention_service.comparison.recipes import MAX_DIM, options_of
from attention_service.comparison.row_errors import RowErrors, evened, judges_rows, mean_squares, put_rows
from attention_service.comparison.sample import MAX_THREADS, Sample, blocks, everything
from attention_service.comparison.solve import solve
from attention_service.comparison.tolerances import Tolerance

HEAD_OUTPUTS: Final = "head_outputs"


@dataclass(frozen=True, eq=False)
class GradientQuestion:
    """A request with cotangents, and the dotted names of the gradients that are asked about."""

    spec: AttentionSpec
    plan: Plan
    names: tuple[str, ...]

    @property
    def weak(self) -> tuple[str, ...]:
        """Why the cotangents hide mistakes; empty for numbers that differ."""
        array = self.spec.grad_output
        if array is None or array.size < 2:
            return ()
        if (array == array.flat[0]).all():
            return (f"grad_output is {float(array.flat[0]):g} everywhere",)
        if array.shape[-1] > 1 and (array == array[..., :1]).all():
            return ("grad_output is one number along each row",)
        return ()


@dataclass(frozen=True)
class Question(Asked):
    """A request, and what a kernel returned for it.

    base2:  True if the logsumexp has base 2; tolerance: of the caller's own test
    liberties: what right kernels of half types may do, see `legal`
    field: that `actual` came in
    gradients: what is asked about gradients; spec and plan are those without
    is_decoded: True if its numbers are those that a kernel computes from, which the type of the plan may not hold
    """

    spec: AttentionSpec
    plan: Plan
    base2: bool = False
    tolerance: Tolerance | None = None
    liberties: frozenset[str] = LIBERTIES
    field: str = "actual"
    gradients: GradientQuestion | None = None
    is_decoded: bool = False

    @property
    def type_name(self) -> str:
        """The type of the request."""
        return self.plan.dtype.name

    @property
    def units(self) -> Mapping[str, float]:
        """The factor of a logsumexp of base 2."""
        return {"logsumexp": math.log(2)} if self.base2 else {}

    @property
    def weak(self) -> tuple[str, ...]:
        """Why the cotangents hide mistakes."""
        return () if self.gradients is None else self.gradients.weak

    @property
    def showing(self) -> tuple[str, ...]:
        """The names of the outputs that show mistakes; gradients do, too."""
        return tuple(FIELDS)

    def shows(self, name: str) -> bool:
        """True if an array shows mistakes."""
        return name in FIELDS or is_gradient(name)

    def unseen_options(self, power: Power) -> tuple[str, ...]:
        """The options of the request that a kernel could ignore unseen.

        A causal mask of one query is none, as it hides none of the keys before it: no other numbers would show it.
        """
        found = options_of(power.ignored, self.spec)
        sizes, offset = self.plan.sizes, self.spec.query_offset
        is_step = sizes.query_length == 1 and (offset is None or int(np.min(offset)) >= sizes.key_length - 1)
        return tuple(name for name in found if not (is_step and name == "is_causal"))

    @property
    def note(self) -> str | None:
        """How inputs that are suggested differ from the request; None if they are alike."""
        sizes = self.plan.sizes
        if max(sizes.head_dim, sizes.value_dim) <= MAX_DIM:
            return None
        dims = min(sizes.head_dim, MAX_DIM), min(sizes.value_dim, MAX_DIM)
        return f"It is narrower than this request: it has {dims[0]} features per head, and {dims[1]} per value."

    @property
    def cast_spec(self) -> AttentionSpec:
        """The request with the numbers that a kernel computes from. Errors: as of `as_cast`."""
        return self.spec if self.is_decoded else as_cast(self.spec, self.plan.dtype)

    @property
    def asked(self) -> AttentionSpec:
        """The request, with cotangents if gradients are asked about."""
        return self.spec if self.gradients is None else self.gradients.spec

    @property
    def forward(self) -> Question:
        """The question about the outputs alone."""
        sent = self.actual
        kept = None if sent is None else {name: array for name, array in sent.items() if not is_gradient(name)}
        return replace(self, actual=kept, gradients=None)

    @property
    def has_gradients_alone(self) -> bool:
        """True if gradients were sent, and no output."""
        return bool(self.actual) and not self.forward.actual


@dataclass(frozen=True)
class Truth:
    """What is right for a question: the reference, and what was sent beside it.

    plan: of the reference; right: the arrays that mutants change, canonical; judged: each array that was sent, by its
    name
    """

    plan: Plan
    reference: Result
    case: Case
    actual: Actual
    right: Mapping[str, np.ndarray]
    judged: Mapping[str, Judged]


@np.errstate(all="ignore")
def reference_and_baseline(question: Question, backend: Backend, check: Check = no_check) -> Truth:
    """The reference of a question, and the baselines of all that was sent. Arguments: as of compare_question"""
    dtype, backend = question.plan.dtype, backend.cut_for(MAX_THREADS)
    spec = question.cast_spec
    include = tuple({name: None for name in question.actual or () if name != OUTPUT} | {HEAD_OUTPUTS: None})
    exact = spec._replace(dtype="float64", backend="numpy", device="cpu", include=include, top_k=None)  # type: ignore[arg-type]  # names of arrays
    exact = exact._replace(allow_non_finite=True)
    plan = make_plan(exact)
    actual = Actual({}, {})
    if question.actual is not None:
        actual = read_actual(question.actual, plan, base2=question.base2, field=question.field)
    reference = backend.run(plan, exact, exact.sources, check)
    case = replace(make_case(spec, dtype, check, question.liberties), pool=pool_of(backend))
    if HEAD_OUTPUTS in reference.arrays:
        case = replace(case, head_outputs=canonical(reference[HEAD_OUTPUTS], HEAD_OUTPUTS, plan))
    right = {name: canonical(reference[name], name, plan) for name in actual.canonical}
    judged = _judged_by_rounding(case, actual, right, check)
    others = [name for name in actual.as_sent if name not in actual.canonical]
    judged |= _judged_by_service(case, exact, others, actual, reference.arrays, backend, check)
    return Truth(plan, reference, case, actual, right, {name: judged[name] for name in actual.as_sent})


def pool_of(backend: Backend) -> TilePool | None:
    """The threads of a backend that a comparison uses: what each computes takes memory."""
    return None if backend.pool is None else backend.pool.at_most(MAX_THREADS)


def _judged_by_rounding(case: Case, actual: Actual, right: Mapping[str, np.ndarray], check: Check) -> dict[str, Judged]:
    """Output, logsumexp and weights, beside the worst of the legal roundings of a kernel."""
    if not right:
        return {}
    kept = {name: stored_dtype(name, case.dtype) for name in right}
    variants = rounded_cases(case, case.dtype)
    results = [{name: np.empty(array.shape, kept[name]) for name, array in right.items()} for _ in variants]
    least = dict.fromkeys(right, 0.0)
    rows = {name: RowErrors.empty(array.shape[:3]) for name, array in right.items() if judges_rows(case, name)}

    def rounded_block(block: Sample) -> dict[str, float]:
        check()
        here = {name: block.of(array) for name, array in right.items()}
        squares: dict[str, list[np.ndarray]] = {name: [] for name in rows}
        weights = None
        for variant, arrays in zip(variants, results, strict=True):
            answer = solve(variant, block)
            weights = right_weights(variant, answer) if variant is variants[0] else weights
            for name, array in arrays_of(answer, right).items():
                stored = array.astype(kept[name])
                block.put(arrays[name], stored)
                if name in rows:
                    squares[name].append(mean_squares(stored, here[name]))
        for name, both in rows.items():
            put_rows(case, block, name, both, squares[name], block.of(actual.canonical[name]), here[name], weights)
        found = floors(case, variants[0], block, here, weights)
        block.forget()
        return found

    for found in case.each(rounded_block, blocks(case, everything(case), right)):
        least.update({name: max(least[name], floor) for name, floor in found.items()})
    judged = {}
    for name, array in right.items():
        stored = kept[name]
        check()
        rounded = [arrays.pop(name) for arrays in results]
        apart = list(case.each(partial(_distance, array), rounded))
        worst = rounded[apart.index(max(apart))]
        del rounded
        both = (worst, actual.canonical[name])
        baseline, errors = case.each(partial(measure, reference=array, dtype=stored), both)
        most = limit(baseline.max_abs or 0.0, least[name], array, stored)
        of_rows = replace(rows[name], legal=evened(case, rows[name].legal)) if name in rows else None
        one = Judged(errors, baseline, most, of_rows)
        judged[name] = replace(one, place=place_of(case, name, array, one))
    return judged


def _distance(one: np.ndarray, other: np.ndarray) -> float:
    """The largest difference of two arrays; -1 if it is not finite."""
    found = distance(one, other)
    return found if math.isfinite(found) else -1.0


def _judged_by_service(
    case: Case,
    exact: AttentionSpec,
    names: list[str],
    actual: Actual,
    reference: Mapping[str, np.ndarray],
    backend: Backend,
    check: Check,
) -> dict[str, Judged]:
    """Other arrays, beside those that the service computes in the type of the request."""
    if not names:
        return {}
    same = exact._replace(dtype=case.dtype.name, include=tuple(names))  # type: ignore[arg-type]  # names of arrays
    plain = backend.run(make_plan(same), same, same.sources, check)
    judged, least = {}, floors_of_others(case, reference, names)
    for name in names:
        array = reference[name]
        stored = plain[name].dtype
        baseline = measure(plain[name], array, stored)
        floor = max(least[name], epsilon(stored) / 4 * (1 + largest(array)))
        most = limit(baseline.max_abs or 0.0, floor, array, stored)
        judged[name] = Judged(measure(actual.as_sent[name], array, stored), baseline, most)
    return judged
