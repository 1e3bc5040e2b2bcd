"""The command that goes on from a report, or why there is none."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from attention_service.attention.arrays import BFLOAT16
from attention_service.comparison.actual import is_gradient
from attention_service.comparison.baseline import FIELDS
from attention_service.comparison.engine.power import is_left_out
from attention_service.comparison.mutants import MUTANTS
from attention_service.comparison.recipes import (
    MADE,
    Recipe,
    as_long,
    is_given,
    longest,
    recipe_as_json,
    recipe_of_request,
)
from attention_service.comparison.truth import Question
from attention_service.comparison.wrong import is_open
from attention_service.schemas.compare import AgainstReport, CompareReport

# Fields that say what is computed, beside those of MADE.
OTHERS: Final = frozenset({"normalization", "past_key", "past_value", "query_offset", "scale"})
# Where inputs are written to.
OUTPUTS: Final = ("made.npz", "made.safetensors")
# A function of the user's whose name is not known.
ANY_FUNCTION: Final = "MODULE:FUNCTION"
# Queries of the longest case of a suite, unless it has head dimensions of its own, which are these.
LONGEST_CASE: Final = 37
HEAD_DIMS: Final = range(8, 513, 8)
# What is said where no command helps.
OF_CALL: Final = (
    "none: no command makes calls; attention_service.conformance.call_laws checks laws of ragged batches and pages"
)
OF_SHORT_CALL: Final = "none: no command makes calls; more and longer sequences, of unequal lengths, show more"
OF_AGAINST: Final = "none: compare the answer in against alone, as the one in actual"
ENDED: Final = "none: the search ended early; compare without a time limit"
NOT_JUDGED: Final = "none: no other input of these options is judged"
NO_OUTPUT: Final = "none: send the output as well"
NOT_SHOWN: Final = "none: no input that was tried shows more"


def next_command(
    report: CompareReport,
    question: Question | None = None,
    request: str | None = None,
    function: str | None = None,
    *,
    takes_tensors: bool = False,
) -> str | None:
    """The command line that helps most after a report, with a comment that says what for; or why there is none.

    None after a proof that leaves nothing open, and after a right output of an input that shows enough.
    question: that the report answers, None for that of a call; request: its file, None if there is none
    function: the kernel as `module:function`, if it is known; takes_tensors: True if it takes tensors of torch
    """
    if question is None:
        return _of_call(report)
    if report.against is not None and _is_open(report.against) and not _is_open(report):
        return OF_AGAINST
    if _is_wrong(report):
        return _of_wrong(report, question, request, function or ANY_FUNCTION, " --torch" if takes_tensors else "")
    return _of_right(report, question, request) or (_why(report) if report.verdict.status == "inconclusive" else None)


def _of_call(report: CompareReport) -> str | None:
    """What is said after a call, whose inputs no command makes."""
    if report.verdict.status == "inconclusive":
        return OF_SHORT_CALL
    return OF_CALL if _is_open(report) else None


def _is_wrong(report: CompareReport | AgainstReport) -> bool:
    return report.verdict.status in ("wrong", "imprecise")


def _is_open(report: CompareReport | AgainstReport) -> bool:
    """True if an answer is wrong, and no mistake is proved."""
    return _is_wrong(report) and not any(one.certainty == "proof" for one in report.hypotheses)


def _of_right(report: CompareReport, question: Question, request: str | None) -> str | None:
    """The command after an output that is right, as far as this input can tell; None if no other input shows more."""
    if report.ended_early or not report.power.mutants or not _has_judged(report):
        return None
    made, is_made = report.next_input, _is_made(request)
    if report.power.options and not is_made:
        names = () if made is None else _known(filter(is_left_out, made.kills))
        if made is not None and names:
            recipe = recipe_of_request(question.asked, question.plan, names)
            return _inputs(question, request, recipe, names, "inputs that show them", made.seed)
    sizes = question.plan.sizes
    recipe = longest(recipe_of_request(question.asked, question.plan), sizes)
    if sizes.query_length < recipe.queries or sizes.key_length < recipe.keys:
        return _inputs(question, request, recipe, (), "inputs that are long enough for mistakes of tiles")
    if made is None or is_made:  # from which no commands lead on, so that none goes in a circle
        return None
    names = _known(made.kills)
    what = f"shows {len(names)} of the mistakes that these inputs do not"
    recipe = recipe_of_request(question.asked, question.plan, names)
    return _inputs(question, request, recipe, names, what, made.seed)


def _why(report: CompareReport) -> str:
    """Why no command follows a report that says neither right nor wrong."""
    if report.ended_early:
        return ENDED
    if not report.power.mutants:
        return NOT_JUDGED
    return NOT_SHOWN if _has_judged(report) else NO_OUTPUT


def _has_judged(report: CompareReport) -> bool:
    """True if an array was sent that shows mistakes, or none was."""
    return not report.errors or any(name in FIELDS or is_gradient(name) for name in report.errors)


def _of_wrong(
    report: CompareReport, question: Question, request: str | None, target: str, called_with: str
) -> str | None:
    """The command after a wrong or imprecise answer. called_with: options of commands that call the function"""
    names = _made_for(report)
    recipe = recipe_of_request(question.asked, question.plan, names)
    if not _is_open(report):
        if _is_made(request) or not _are_told_apart(report, names):
            return None
        assert report.next_input is not None
        what = "small inputs that show which of them it is"
        return _inputs(question, request, recipe, names, what, report.next_input.seed)
    # As long as the request: what tiles do wrong shows in long inputs only.
    sizes = question.plan.sizes
    recipe = as_long(recipe, sizes.query_length, sizes.key_length)
    leads_on = recipe.sizes != sizes
    if names and leads_on:
        return _inputs(question, request, recipe, names, f"inputs that show {'this' if len(names) == 1 else 'these'}")
    run = f"attention-service conformance run {target}{called_with}"
    if report.verdict.status == "imprecise":
        return f"{run} --dtypes float32  # if it is right there, only the rounding is wrong"
    if leads_on:
        return _inputs(question, request, recipe, (), "inputs with these options")
    options = _options(question)
    if options and "output_norm" not in options:  # of which suites have no cases
        is_long = sizes.query_length > LONGEST_CASE and sizes.head_dim == sizes.value_dim
        long = f" --head-dims {sizes.head_dim}" if is_long and sizes.head_dim in HEAD_DIMS else ""
        chosen = f"--only {' '.join(options)} --dtypes {question.plan.dtype_name}{long}"
        return f"{run} {chosen}  # cases with these options"
    laws = f"attention-service conformance laws {target}{called_with}"
    return f"{laws}  # the laws that it breaks, with their smallest inputs"


def _is_made(request: str | None) -> bool:
    """True for the file of a request that such a command made."""
    return request is not None and Path(request).name in OUTPUTS


def _are_told_apart(report: CompareReport, names: tuple[str, ...]) -> bool:
    """True if the next input shows which of several mistakes is made."""
    return len(names) > 1 and report.next_input is not None and {*names} <= {*report.next_input.kills}


def _options(question: Question) -> list[str]:
    """The fields of the request that cases of a suite are chosen by: what is computed beside query, key and value."""
    given = {name: value for name, value in question.asked._asdict().items() if is_given(value)}
    if given["normalization"] == "softmax":
        del given["normalization"]
    return sorted((MADE | OTHERS) & given.keys())


def _made_for(report: CompareReport) -> tuple[str, ...]:
    """The mistakes of the first hypothesis for which inputs can be made, unless a fact says what was sent."""
    first = [one for one in report.hypotheses[:1] if one.certainty == "proof" or is_open(report.facts)]
    named = (name for one in first for also in (one.name, *one.also) for name in also.split(" and "))
    return _known(named)


def _known(names: Iterable[str]) -> tuple[str, ...]:
    """Those of these mistakes for which inputs can be made."""
    return tuple(dict.fromkeys(name for name in names if name in MUTANTS and not name.startswith("precision.")))


def _inputs(
    question: Question, request: str | None, recipe: Recipe, names: Sequence[str], what: str, seed: int = 0
) -> str:
    """The command that makes inputs of a recipe with the options of a request.

    request: its file; names: of the mistakes that they show; what: the inputs are for
    """
    words = ["attention-service", "inputs"]
    if request is None:
        words += ["--recipe", recipe_as_json(recipe)]
    else:
        own, is_square = recipe_of_request(question.asked, question.plan, names), recipe.queries == recipe.keys
        words += ["--like", request]
        words += [] if is_square or own.queries == recipe.queries else ["--queries", str(recipe.queries)]
        words += [] if own.keys == recipe.keys else ["--keys", str(recipe.keys)]
    words += [*(["--seed", str(seed)] if seed else []), *(["--kills", *names] if names else [])]
    words += ["--output", OUTPUTS[question.plan.dtype == BFLOAT16]]  # npz has no bfloat16
    return f"{shlex.join(words)}  # {what}"
