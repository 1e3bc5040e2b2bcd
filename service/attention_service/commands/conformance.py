"""The commands `attention-service conformance write` and `attention-service conformance run`."""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import redirect_stdout
from typing import TYPE_CHECKING, Any

from attention_service.commands import formats, targets
from attention_service.commands.terminal import FAILED, CommandError, natural, reported
from attention_service.printable import printable

if TYPE_CHECKING:  # commands import what they need when they run
    from attention_service.conformance.runner import SuiteResult


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
        description="Call a function with the fields of each case, and judge what it returns. Exit status 0: all that "
        "it supports is right; 1: some is not; 2: nothing could be judged; 3: an error.",
    )
    runner.usage_status = FAILED
    runner.set_defaults(run=_run)
    runner.add_argument("target", metavar="TARGET", help="module:function; modules of this directory are found, too")
    runner.add_argument("--dir", metavar="DIR", help="a suite that `write` made (default: 300 cases, made at once)")
    formats.add_format(runner)
    targets.add_options(runner)


def _write(options: argparse.Namespace) -> int:
    from attention_service.conformance.files import write

    with reported():
        count = write(options.directory, options.cases, options.seed)
    print(f"{count} cases in {printable(str(options.directory))}")
    return 0


def _run(options: argparse.Namespace) -> int:
    from attention_service.conformance.report import as_json, as_text

    suite = f"conformance {options.target}"
    with formats.errors_as_checks(suite, options.format):
        result = _result(options)
    if options.format in formats.FORMATS:
        print(formats.FORMATS[options.format](suite, formats.checks_of_suite(result)))
    else:
        print(json.dumps(as_json(result), indent=2) if options.format == "json" else as_text(result))
    return result.exit_status


def _result(options: argparse.Namespace) -> SuiteResult:
    """The result that the command asks for. Errors: CommandError."""
    from attention_service.conformance.runner import run

    target = targets.load(options.target, options)
    try:
        with redirect_stdout(sys.stderr):  # standard output is for the result
            return run(options.dir, target)
    except (OSError, ValueError) as error:
        raise CommandError(str(error), FAILED) from None
