"""The commands `compare` and `inputs`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from attention_service.commands import formats, on_ray, targets
from attention_service.commands.terminal import FAILED, PATIENCE, CommandError, Progress, natural, reported

if TYPE_CHECKING:  # commands import what they need when they run
    from attention_service.comparison.recipes import Recipe
    from attention_service.comparison.truth import Question
    from attention_service.schemas.compare import CompareReport

# Exit statuses by the status of a verdict.
STATUSES: Final = {"correct": 0, "imprecise": 1, "wrong": 1, "inconclusive": 2}


def add_commands(add: Callable[..., Any]) -> None:
    """Add the commands. add: adds a command by its name, function, help and description, and returns its parser"""
    _add_compare(add)
    _add_inputs(add)


def _add_compare(add: Callable[..., Any]) -> None:
    compare = add(
        "compare",
        run_compare,
        "say whether what a kernel returned is right, and which mistake it shows",
        "Compare what a kernel returned with exact attention, or judge all calls of recordings by the flight recorder "
        "of FlashInfer, a line for each. Exit status 0 if it is correct, 1 if it is wrong or imprecise, 2 if the "
        "request is too weak to tell or a call of a recording cannot be read, 3 for errors: a file cannot be read, the "
        "request is not valid, the function raises.",
    )
    compare.usage_status = FAILED
    kinds = ".json .npz .safetensors .pt, or - for standard input"
    request = (
        f"file with the fields of POST /attention or /attention/call: {kinds}; or the folder of a recording or call"
    )
    compare.add_argument("request", metavar="REQUEST", help=request)
    text = (
        f"what the kernel returned, in a file: {kinds}, by name, or .npy with the output; or the kernel, a function "
        "module:function, also of a module in this directory; none for what is in REQUEST, or for power only"
    )
    compare.add_argument("actual", metavar="ACTUAL", nargs="?", help=text)
    compare.add_argument("more", metavar="RECORDING", nargs="*", help="folders of more recordings")
    compare.add_argument(
        "--call", type=natural, metavar="N", help="print the report on this call of a recording, from 0, alone"
    )
    compare.add_argument(
        "--against", metavar="OTHER", help="what another kernel returned, as ACTUAL, to judge beside it"
    )
    on_ray.add_option(compare, "each call of a recording")
    formats.add_format(compare)
    targets.add_options(compare)


def _add_inputs(add: Callable[..., Any]) -> None:
    inputs = add(
        "inputs",
        run_inputs,
        "make a request that tells mistakes apart",
        "Make a request whose output shows known mistakes: unequal lengths, grouped heads, spiky scores, empty rows.",
    )
    inputs.add_argument("--seed", type=natural, default=0, help="the same seed makes the same request (default: 0)")
    inputs.add_argument("--kills", nargs="+", metavar="NAME", default=(), help="mistakes that it must show")
    like = inputs.add_mutually_exclusive_group()
    like.add_argument("--like", metavar="REQUEST", help="file with a request whose options it has, or -")
    like.add_argument("--recipe", metavar="JSON", help="options and sizes, as a report without a file prints them")
    sizes = {"queries": "queries, as many as keys at most", "keys": "keys, with the past"}
    sizes |= {"heads": "query heads", "head-dim": "features of a head"}
    for name, what in sizes.items():
        inputs.add_argument(f"--{name}", type=natural, metavar="N", help=f"how many {what}")
    inputs.add_argument("--tile", type=natural, metavar="N", help="keys of a tile whose mistakes it must show")
    inputs.add_argument("--output", metavar="FILE", help="file to write, .json .npz .safetensors (default: print JSON)")


def run_compare(options: argparse.Namespace) -> int:
    """Print the report on the files of the command, or the verdicts on recordings, and return the exit status."""
    names = [options.request, *([] if options.actual is None else [options.actual]), *options.more]
    suite = " ".join(["compare", *names])
    with formats.errors_as_checks(suite, options.format):
        if any(Path(name).is_dir() for name in names):
            return _run_recordings(options, [*map(Path, names)], suite)
        function = options.actual if options.actual is not None and targets.is_target(options.actual) else None
        request = None if options.request == "-" else options.request
        return _print_report(*_report(options), suite, options, request, function)


def _run_recordings(options: argparse.Namespace, paths: list[Path], suite: str) -> int:
    """Print the verdicts on the calls of recordings, or the report on one of them. Errors: CommandError."""
    from attention_service.commands.recordings import chosen_call
    from attention_service.commands.verdicts import print_verdicts
    from attention_service.library.calls import all_processors
    from attention_service.library.recording_verdicts import recorded_report
    from attention_service.library.recordings import METADATA

    for flag, value in (("--against", options.against), ("--torch", options.torch), ("--device", options.device)):
        if value:
            raise CommandError(f"{flag}: expected a request, got the recording {paths[0]}", FAILED)
    if options.call is None and not (len(paths) == 1 and (paths[0] / METADATA).is_file()):
        return print_verdicts(paths, suite, options.format, on_ray=options.ray)
    if options.ray:
        raise CommandError(f"--ray: expected all calls of recordings, got one call of {paths[0]}", FAILED)
    if len(paths) > 1:
        raise CommandError(f"--call: expected one recording, got {len(paths)}", FAILED)
    with reported(invalid=FAILED, unreadable=FAILED), Progress(PATIENCE) as progress, all_processors() as backend:
        report = recorded_report(chosen_call(paths[0], options.call, FAILED), backend, counted(progress))
    return _print_report(report, None, suite, options)


def _print_report(
    report: CompareReport,
    question: Question | None,
    suite: str,
    options: argparse.Namespace,
    request: str | None = None,
    function: str | None = None,
) -> int:
    """Print a report in the format of the command, and return the exit status.

    question: that it answers, None for a call; request: the file of it; function: the kernel, if it is one
    """
    from attention_service.comparison.next_command import next_command
    from attention_service.comparison.text import in_short

    if options.format in formats.FORMATS:
        print(formats.FORMATS[options.format](suite, formats.checks_of_report(report)))
    elif options.format == "json":
        print(report.model_dump_json(indent=2))
    else:
        takes_tensors = options.torch or options.device is not None
        then = next_command(report, question, request, function, takes_tensors=takes_tensors)
        print(in_short(report, then))
    verdicts = [report.verdict] if report.against is None else [report.verdict, report.against.verdict]
    statuses = {STATUSES[verdict.status] for verdict in verdicts}
    return 1 if 1 in statuses else max(statuses)


def _report(options: argparse.Namespace) -> tuple[CompareReport, Question | None]:
    """The report that the command asks for, and its question, None for that of a call. Errors: CommandError."""
    from attention_service.commands.files import holds_call, read_arrays, read_request
    from attention_service.comparison.actual import NAMES
    from attention_service.comparison.operation import CompareCallOperation, CompareOperation
    from attention_service.library.calls import all_processors

    if options.ray:
        raise CommandError(f"--ray: expected the folder of a recording, got {options.request}", FAILED)
    if options.more or options.call is not None:
        flag, value = ("RECORDING", options.more[0]) if options.more else ("--call", options.request)
        raise CommandError(f"{flag}: expected the folder of a recording, got {value}", FAILED)
    given = {"actual": options.actual, "against": options.against}
    functions = {field for field, name in given.items() if name is not None and targets.is_target(name)}
    if not functions and (options.torch or options.device is not None):
        flag = "--torch" if options.torch else "--device"
        raise CommandError(f"{flag}: expected ACTUAL to be module:function, got {options.actual or 'none'}", FAILED)
    if options.request == options.actual == "-":
        raise CommandError("ACTUAL: expected a file, as REQUEST is standard input, got -", FAILED)
    with reported(invalid=FAILED, unreadable=FAILED), Progress(PATIENCE) as progress:
        decoded = read_request(Path(options.request), NAMES)
        for field, name in given.items():
            if field in functions:
                decoded.fields[field] = targets.answer_of(name, options, decoded, field)
            elif name is not None:
                decoded.fields[field] = read_arrays(Path(name), NAMES)
        is_call = holds_call(decoded)
        with all_processors() as backend:
            operation: Any = CompareCallOperation(backend) if is_call else CompareOperation(backend)
            request = operation.prepare(decoded)
            report = operation.report(operation.compute(request, counted(progress)))
        return report, None if is_call else request.question


def run_inputs(options: argparse.Namespace) -> int:
    """Write the request of the command, and return the exit status: 1 if it does not show all that it should."""
    from attention_service.commands.files import write_request
    from attention_service.comparison.gradients.suggestion import suggest
    from attention_service.comparison.inputs import make_input
    from attention_service.library.calls import all_processors
    from attention_service.pipeline.json_fields import json_fields

    with reported(invalid=2):
        recipe = _recipe(options)
        fields, shown = make_input(recipe, options.seed), tuple(options.kills)
        if options.kills:
            with Progress(PATIENCE) as progress, all_processors() as backend:
                found = suggest(recipe, options.kills, options.seed, backend, counted(progress))
            fields, shown = (fields, ()) if found is None else (found.fields, found.kills)
        if options.output is None:
            print(json.dumps(json_fields(fields)))
        else:
            write_request(fields, Path(options.output))
    missing = [name for name in options.kills if name not in shown]
    if missing:
        raise CommandError(f"not shown by this request: {', '.join(missing)}")
    return 0


def _recipe(options: argparse.Namespace) -> Recipe:
    """The recipe of the request that is made. Errors: CommandError, InvalidRequest of every kind."""
    from attention_service.commands.files import read_request
    from attention_service.comparison.candidates import MESSAGES
    from attention_service.comparison.case import TILES
    from attention_service.comparison.gradients.mutants import GRADIENT_MUTANTS
    from attention_service.comparison.inputs import COTANGENTS
    from attention_service.comparison.mutants import MUTANTS
    from attention_service.comparison.question import make_question
    from attention_service.comparison.recipes import recipe_for, recipe_from_json, recipe_of_request, resized

    for name in options.kills:
        if name not in MUTANTS and name not in GRADIENT_MUTANTS:
            why = ", which is found by an estimate and has no request made for it" if name in MESSAGES else ""
            raise CommandError(f"--kills: expected names of mistakes, got {name}{why}", 2)
    tiles = TILES if options.tile is None else (options.tile,)
    recipe = recipe_for(options.kills, tiles)
    if options.like is not None:
        question = make_question(read_request(Path(options.like)))
        recipe = recipe_of_request(question.asked, question.plan, options.kills, tiles)
    elif options.recipe is not None:
        recipe = recipe_from_json(options.recipe, tiles)
    for name in options.kills:
        if name in GRADIENT_MUTANTS and not COTANGENTS.keys() & recipe.options:
            needed = f"--like FILE for {name}, a request with grad_output and without actual"
            raise CommandError(f"--kills: expected {needed}", 2)
    return resized(recipe, queries=options.queries, keys=options.keys, heads=options.heads, head_dim=options.head_dim)


def counted(progress: Progress) -> Callable[[], None]:
    """A check for comparisons that shows how often it was called."""
    steps = count(1)
    return lambda: progress.show(f"comparing: {next(steps)} steps")
