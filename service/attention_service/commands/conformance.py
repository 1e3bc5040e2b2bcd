"""The commands `attention-service conformance write`, `run` and `laws`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext, redirect_stdout
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from attention_service.commands import formats, on_ray, targets
from attention_service.commands.formats import Check
from attention_service.commands.terminal import FAILED, PATIENCE, CommandError, Progress, natural, reported
from attention_service.printable import printable

if TYPE_CHECKING:  # commands import what they need when they run
    from attention_service.conformance.judge import Outcome
    from attention_service.conformance.law_checks import LawsResult
    from attention_service.conformance.runner import Mapper, SuiteResult
    from attention_service.conformance.suite import SuiteCase
    from attention_service.conformance.target import Target

Result = TypeVar("Result", "SuiteResult", "LawsResult")


def add_commands(commands: Any) -> None:
    """Add the command `conformance` to the subcommands of a parser, as `add_subparsers` returns them."""
    top = commands.add_parser("conformance", help="cases with exact answers, and a judge of implementations")
    inner = top.add_subparsers(required=True, metavar="COMMAND")
    writer = inner.add_parser("write", help="write cases with exact answers", description="Write a suite of cases.")
    writer.set_defaults(run=_write)
    writer.add_argument("directory", metavar="DIR", help="directory, which is made if it is missing")
    writer.add_argument("--cases", type=natural, default=1000, help="how many (default: 1000)")
    writer.add_argument("--seed", type=natural, default=0, help="the same seed makes the same requests (default: 0)")
    runner = inner.add_parser(
        "run",
        help="judge an implementation",
        description="Call a function with the fields of each case, and judge what it returns; its gradients too, if it "
        "has a parameter grad_output, is called with --torch, or returns arrays of JAX. Exit status 0: all that it "
        "supports is right; 1: some is not; 2: nothing could be judged; 3: an error.",
    )
    runner.usage_status = FAILED
    runner.set_defaults(run=_run)
    runner.add_argument("--dir", metavar="DIR", help="a suite that `write` made (default: 420 cases, made at once)")
    on_ray.add_option(runner, "each case")
    for parser in (writer, runner):
        _add_choice(parser)
    lawyer = inner.add_parser(
        "laws",
        help="check what holds without a reference",
        description="Call a function with inputs whose answers must agree: twice, alone and in a batch, with other "
        "hidden numbers. Exit status 0: all laws that it supports hold; 1: some are broken; 2: none was checked; 3: an "
        "error.",
    )
    lawyer.usage_status = FAILED
    lawyer.set_defaults(run=_laws)
    _add_dtypes(lawyer, "float32")
    for parser in (runner, lawyer):
        parser.add_argument(
            "target", metavar="TARGET", help="module:function; modules of this directory are found, too"
        )
        formats.add_format(parser)
        targets.add_options(parser)


def _add_choice(parser: argparse.ArgumentParser) -> None:
    """Add the options that say which cases a suite has."""
    text = "fields that requests may have beside query, key and value; cases with others are left out"
    parser.add_argument("--only", nargs="*", metavar="NAME", help=text)
    text = "head dimensions, such as 64 128, of cases as long as kernels for tensor cores take them"
    parser.add_argument("--head-dims", nargs="+", type=natural, default=(), metavar="N", help=text)
    _add_dtypes(parser, "all")


def _add_dtypes(parser: argparse.ArgumentParser, default: str) -> None:
    """Add the option that says which types the arrays of requests have."""
    text = f"types of requests (default: {default})"
    parser.add_argument("--dtypes", nargs="+", default=(), metavar="NAME", help=text)


def _choice(options: argparse.Namespace) -> dict[str, Any]:
    return {name: getattr(options, name) for name in ("only", "head_dims", "dtypes")}


def _write(options: argparse.Namespace) -> int:
    from attention_service.conformance.files import write

    with reported():
        try:
            count = write(options.directory, options.cases, options.seed, **_choice(options))
        except ValueError as error:
            raise CommandError(str(error)) from None
    print(f"{count} cases in {printable(str(options.directory))}")
    return 0


def _run(options: argparse.Namespace) -> int:
    from attention_service.conformance.report import as_json, as_text
    from attention_service.conformance.runner import run

    def judge(target: Target) -> SuiteResult:
        with Progress(PATIENCE) as progress, on_ray.ray_map() if options.ray else nullcontext(map) as mapper:
            return run(options.dir, target, **_choice(options), mapper=partial(_shown, progress, mapper))

    return _printed(options, "conformance", judge, formats.checks_of_suite, as_json, as_text)


def _shown(
    progress: Progress, mapper: Mapper, judge: Callable[[SuiteCase], Outcome], cases: Iterable[SuiteCase]
) -> Iterator[Outcome]:
    """What a mapper returns, with progress on a terminal."""
    from attention_service.conformance.runner import FAILURES

    cases, failed = list(cases), 0
    for done, outcome in enumerate(mapper(judge, cases), 1):
        failed += outcome.status in FAILURES
        progress.show(f"{done} judged, {failed} of them not right, {len(cases) - done} left")
        yield outcome


def _laws(options: argparse.Namespace) -> int:
    from attention_service.conformance.law_checks import laws
    from attention_service.conformance.report import laws_as_json, laws_as_text

    return _printed(
        options,
        "laws",
        lambda target: laws(target, dtypes=options.dtypes),
        formats.checks_of_laws,
        laws_as_json,
        laws_as_text,
    )


def _printed(
    options: argparse.Namespace,
    command: str,
    judge: Callable[[Target], Result],
    checks: Callable[[Result], list[Check]],
    as_json: Callable[[Result], Any],
    as_text: Callable[[Result], str],
) -> int:
    """Print what a judge finds of the function that the command names, and return the exit status.

    Errors: CommandError.
    """
    suite = f"{command} {options.target}"
    with formats.errors_as_checks(suite, options.format):
        result = _judged(options, judge)
    if options.format in formats.FORMATS:
        print(formats.FORMATS[options.format](suite, checks(result)))
    else:
        print(json.dumps(as_json(result), indent=2) if options.format == "json" else as_text(result))
    return result.exit_status


def _judged(options: argparse.Namespace, judge: Callable[[Target], Result]) -> Result:
    """What a judge finds of the function that the command names. Errors: CommandError."""
    target = targets.load(options.target, options)
    try:
        with redirect_stdout(sys.stderr):  # standard output is for the result
            return judge(target)
    except (OSError, ValueError) as error:
        raise CommandError(str(error), FAILED) from None
