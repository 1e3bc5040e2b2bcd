"""The command that goes on from a report."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from typing import Final

from attention_service.comparison.actual import is_gradient
from attention_service.comparison.mutants import MUTANTS
from attention_service.comparison.power import is_left_out
from attention_service.schemas.compare import CompareReport

# A function of the user's whose name is not known.
ANY_FUNCTION: Final = "MODULE:FUNCTION"


def next_command(report: CompareReport, request: str | None = None, function: str | None = None) -> str | None:
    """The command line that helps most after a report, with a comment that says what for; None if nothing is left open.

    request: the file of the request, None if there is none; function: the kernel as `module:function`, if it is known
    """
    if "call" in report.metadata:  # whose laws and parts no command checks: `call_laws` does
        return None
    target, like = ANY_FUNCTION if function is None else function, request
    is_wrong = report.verdict.status in ("wrong", "imprecise")
    names = _made_for(report) if is_wrong else ()
    if names:
        return _inputs(
            like, names, "small inputs that show this mistake" if len(names) == 1 else "small inputs that show them"
        )
    if report.verdict.status == "imprecise":
        return f"attention-service conformance run {target} --dtypes float32  # right there: only the rounding is wrong"
    if is_wrong and like is not None:
        return _inputs(like, (), "small inputs with these options")
    if is_wrong and any(map(is_gradient, report.errors)):
        return f"attention-service conformance run {target} --torch --only grad_output  # gradients, case by case"
    if is_wrong:
        return f"attention-service conformance laws {target}  # the laws that it breaks, with their smallest inputs"
    if report.power.options:
        return _inputs(like, _known(filter(is_left_out, report.power.survivors)), "inputs that show them")
    if report.next_input is None or like is None:
        return None
    # One mistake of tiles makes the input as long as all of them do.
    shown = sorted(report.next_input.kills, key=lambda name: not (name in MUTANTS and MUTANTS[name].by_tile))
    what = f"shows {len(shown)} of the mistakes that these inputs do not"
    return _inputs(like, _known(shown)[:1], what, report.next_input.seed)


def _made_for(report: CompareReport) -> tuple[str, ...]:
    """The mistakes of the first hypothesis for which inputs can be made."""
    first = report.hypotheses[:1]
    named = (name for one in first for also in (one.name, *one.also) for name in also.split(" and "))
    return _known(named)


def _known(names: Iterable[str]) -> tuple[str, ...]:
    """Those of these mistakes for which inputs can be made."""
    return tuple(dict.fromkeys(name for name in names if name in MUTANTS and not name.startswith("precision.")))


def _inputs(like: str | None, names: Sequence[str], what: str, seed: int = 0) -> str:
    """The command that makes inputs. like: a file with the options that they have; what: they are for"""
    words = ["attention-service", "inputs", *([] if like is None else ["--like", like])]
    words += [*(["--seed", str(seed)] if seed else []), *(["--kills", *names] if names else []), "--output", "made.npz"]
    return f"{shlex.join(words)}  # {what}"
