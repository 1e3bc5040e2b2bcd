"""The comparison of what a kernel returned with the reference."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator
from dataclasses import replace

import numpy as np

from attention_service.attention.planning import make_plan
from attention_service.backends.base import Backend, Check, no_check
from attention_service.comparison.case import Case, make_case, unknown_options
from attention_service.comparison.engine.comparison import Comparison, judge
from attention_service.comparison.engine.power import no_power
from attention_service.comparison.engine.subject import Judgement
from attention_service.comparison.engine.suggestion import Suggestion
from attention_service.comparison.gradients.judge import gradient_truth, read_gradients
from attention_service.comparison.gradients.subject import JudgedGradients
from attention_service.comparison.inputs import suggestions
from attention_service.comparison.outputs import JudgedOutputs
from attention_service.comparison.recipes import recipe_of
from attention_service.comparison.tolerances import usual_tolerances
from attention_service.comparison.truth import Question, Truth, pool_of, reference_and_baseline


def compare_question(
    question: Question, backend: Backend, check: Check = no_check, truth: Truth | None = None
) -> Comparison[Question]:
    """Judge what a kernel returned, and what another did. backend: computes the reference; check: raises to end it all

    truth: of the question, None to compute it

    Errors: InvalidRequest of every kind, and what `check` raises.
    """
    end = None if question.time_limit is None else time.monotonic() + question.time_limit
    found = _compared(question, backend, check, end, truth)
    if question.against is None:
        return found
    other = replace(question, actual=question.against, against=None, field="against")
    return replace(found, against=_compared(other, backend, check, end))


@np.errstate(all="ignore")
def _compared(
    question: Question, backend: Backend, check: Check, end: float | None, truth: Truth | None = None
) -> Comparison[Question]:
    """The comparison of one answer. end: of its time, see `limited`; others: of compare_question"""
    tolerances = usual_tolerances(question.plan.dtype)
    if unknown := unknown_options(question.plan):
        spec = question.spec._replace(backend="numpy", device="cpu", include=(), top_k=None, average_heads=False)
        metadata = backend.run(make_plan(spec), spec, spec.sources, check).metadata
        return Comparison(question, metadata, {}, {}, tolerances, [], [], no_power(tolerances), None, unknown)
    tolerances += () if question.tolerance is None else (question.tolerance,)
    if truth is None and not question.has_gradients_alone:
        truth = reference_and_baseline(question.forward, backend, check)
    parts: list[Judgement] = [] if truth is None else [JudgedOutputs(truth, _inputs)]
    if question.gradients is not None:
        sent = read_gradients(question.actual or {}, question.gradients, question.field)
        gradients = gradient_truth(question.gradients, sent, backend, check)
        forward = make_case(question.spec, question.plan.dtype, check) if truth is None else truth.case
        outputs = () if truth is None else tuple(truth.judged.values())
        parts.append(JudgedGradients(gradients, replace(forward, pool=pool_of(backend)), backend, outputs))
    return judge(question, parts, check, end, tolerances)


def _inputs(
    case: Case, wanted: Collection[str], names: Collection[str], check: Check, apart: bool
) -> Iterator[Suggestion]:
    """Inputs that show some mistakes of outputs. Arguments: as of `suggestions`"""
    return suggestions(recipe_of(case, wanted), wanted, names, 0, check, case.pool, apart=apart)
