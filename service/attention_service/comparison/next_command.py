"""The command that goes on from a report."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from attention_service.attention.arrays import BFLOAT16
from attention_service.comparison.engine.power import is_left_out
from attention_service.comparison.mutants import MUTANTS
from attention_service.comparison.recipes import MADE, is_given, recipe_as_json, recipe_of_request
from attention_service.comparison.truth import Question
from attention_service.comparison.wrong import is_open
from attention_service.schemas.compare import CompareReport

# Fields that say what is computed, beside those of MADE.
OTHERS: Final = frozenset({"normalization", "past_key", "past_value", "query_offset", "scale"})
# Where inputs are written to.
OUTPUTS: Final = ("made.npz", "made.safetensors")
# A function of the user's whose name is not known.
ANY_FUNCTION: Final = "MODULE:FUNCTION"


def next_command(
    report: CompareReport,
    question: Question | None = None,
    request: str | None = None,
    function: str | None = None,
    *,
    takes_tensors: bool = False,
) -> str | None:
    """The command line that helps most after a report, with a comment that says what for; None if nothing is left open.

    question: that the report answers, None for that of a call; request: its file, None if there is none
    function: the kernel as `module:function`, if it is known; takes_tensors: True if it takes tensors of torch
    """
    if question is None or "call" in report.metadata:  # whose laws and parts no command checks: `call_laws` does
        return None
    if report.verdict.status in ("wrong", "imprecise"):
        return _of_wrong(report, question, request, function or ANY_FUNCTION, " --torch" if takes_tensors else "")
    if report.power.options:
        made = report.next_input
        names = () if made is None else _known(filter(is_left_out, made.kills))
        return _inputs(question, request, names, "inputs that show them", made.seed) if made and names else None
    if report.next_input is None or request is None:
        return None
    # One mistake of tiles makes the input as long as all of them do.
    shown = sorted(report.next_input.kills, key=lambda name: not (name in MUTANTS and MUTANTS[name].by_tile))
    what = f"shows {len(shown)} of the mistakes that these inputs do not"
    return _inputs(question, request, _known(shown)[:1], what, report.next_input.seed)


def _of_wrong(
    report: CompareReport, question: Question, request: str | None, target: str, called_with: str
) -> str | None:
    """The command after a wrong or imprecise answer. called_with: options of commands that call the function"""
    names = _made_for(report)
    made, sizes = recipe_of_request(question.asked, question.plan, names).sizes, question.plan.sizes
    # An input that was made from a request has the sizes of those that are made from it. From one that was made for a
    # mistake leads on only what is longer, so that no commands go in a circle.
    is_made = request is not None and Path(request).name in OUTPUTS
    leads_on = made.query_length * made.key_length > sizes.query_length * sizes.key_length if is_made else made != sizes
    leads_on = (leads_on and bool(names or not is_made)) or _are_told_apart(report, names)
    if not leads_on and any(one.certainty == "proof" for one in report.hypotheses):
        return None
    if names and leads_on:
        what = "small inputs that show this mistake" if len(names) == 1 else "small inputs that show them"
        seed = report.next_input.seed if report.next_input and _are_told_apart(report, names) else 0
        return _inputs(question, request, names, what, seed)
    run = f"attention-service conformance run {target}{called_with}"
    if report.verdict.status == "imprecise":
        return f"{run} --dtypes float32  # if it is right there, only the rounding is wrong"
    if leads_on:
        return _inputs(question, request, (), "small inputs with these options")
    options = _options(question)
    if options and "output_norm" not in options:  # of which suites have no cases
        return f"{run} --only {' '.join(options)} --dtypes {question.plan.dtype_name}  # cases with these options"
    laws = f"attention-service conformance laws {target}{called_with}"
    return f"{laws}  # the laws that it breaks, with their smallest inputs"


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


def _inputs(question: Question, request: str | None, names: Sequence[str], what: str, seed: int = 0) -> str:
    """The command that makes inputs with the options of a request. request: its file; what: the inputs are for"""
    recipe = recipe_of_request(question.asked, question.plan, names)
    words = ["attention-service", "inputs"]
    words += ["--recipe", recipe_as_json(recipe)] if request is None else ["--like", request]
    words += [*(["--seed", str(seed)] if seed else []), *(["--kills", *names] if names else [])]
    words += ["--output", OUTPUTS[question.plan.dtype == BFLOAT16]]  # npz has no bfloat16
    return f"{shlex.join(words)}  # {what}"
