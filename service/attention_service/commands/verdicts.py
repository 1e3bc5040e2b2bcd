"""Verdicts on the calls of recordings, which the command `compare` prints one by one.

Calls are judged in parallel processes, each with one thread: most are small, and take as long to decode as to judge.
"""

from __future__ import annotations

import json
import multiprocessing
import shlex
import signal
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import nullcontext
from dataclasses import asdict, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Final

from attention_service.backends.base import Backend
from attention_service.backends.registry import Backends
from attention_service.backends.threads import single_threaded_blas
from attention_service.commands.formats import FORMATS, Check, Outcome
from attention_service.commands.on_ray import ray_map
from attention_service.commands.terminal import FAILED, CommandError, Progress, reported
from attention_service.library.recording_verdicts import CallVerdict, lost_lines, verdict_on
from attention_service.library.recordings import RecordedCall, Recording, is_recording, read_recording
from attention_service.render.drawing import counted
from attention_service.runtime.machine import cpu_count
from attention_service.runtime.process import end_with_parent

Judge = Callable[[list[tuple[int, RecordedCall]]], Iterator[CallVerdict]]
OUTCOMES: Final[dict[str, Outcome]] = {"correct": "passed", "wrong": "failure", "imprecise": "failure"}


def print_verdicts(paths: Sequence[Path], suite: str, format_name: str, *, on_ray: bool = False) -> int:
    """Judge all calls of recordings, print what is said of each, and return the exit status. Errors: CommandError.

    on_ray: True to judge them by the workers of a Ray cluster, which find the folders at the same paths
    """
    with reported(invalid=FAILED, unreadable=FAILED):
        recordings = [_read(path) for path in paths]
    verdicts = []
    with Progress() as progress, ray_map() if on_ray else nullcontext() as mapper:
        judge = judged_in_parallel if mapper is None else partial(mapper, judged)
        for verdict in _verdicts(recordings, paths, judge, progress):
            verdicts.append(verdict)
            if format_name == "text":
                progress.print_above(str(verdict))
    counts = Counter(verdict.status for verdict in verdicts)
    others, lost = (sum(getattr(one, name) for one in recordings) for name in ("others", "lost"))
    if format_name == "text":
        print(_summary(counts, others, lost))
        for verdict in [one for one in verdicts if one.is_open][:1]:
            folder = paths[0] / verdict.name if len(paths) == 1 else Path(verdict.name)
            print(f"next: attention-service compare {shlex.quote(str(folder))}  # all that is said of this call")
    elif format_name == "json":
        found = {"calls": [_fields(one) for one in verdicts], "counts": counts, "other_functions": others, "lost": lost}
        print(json.dumps(found, indent=2))
    else:
        cut = [Check("lost lines", "skipped", lost_lines(lost))] if lost else []
        print(FORMATS[format_name](suite, [*(_check_of(one) for one in verdicts), *cut]))
    if counts["wrong"] or counts["imprecise"]:
        return 1
    return 0 if verdicts and counts["correct"] == len(verdicts) and not lost else 2


def _read(path: Path) -> Recording:
    if not is_recording(path):
        raise CommandError(f"{path}: expected the folder of a recording", FAILED)
    return read_recording(path.resolve())


def _verdicts(
    recordings: Sequence[Recording], paths: Sequence[Path], judge: Judge, progress: Progress
) -> Iterator[CallVerdict]:
    """The verdicts in the order of the calls, as they come. paths: of the recordings. Errors: as of `judge`."""
    of = [
        (path, number, call)
        for path, one in zip(paths, recordings, strict=True)
        for number, call in enumerate(one.calls)
    ]
    failed = 0
    for done, verdict in enumerate(judge([(number, call) for _, number, call in of])):
        folder = of[done][0]
        failed += verdict.status != "correct"
        left = len(of) - done - 1
        progress.show(f"{done + 1} judged, {failed} of them not correct, {left} left")
        yield verdict if len(paths) == 1 else replace(verdict, name=str(folder / verdict.name))


def judged_in_parallel(calls: list[tuple[int, RecordedCall]]) -> Iterator[CallVerdict]:
    """The verdicts in the order of the calls. Errors: CommandError if a process ends."""
    processes = min(cpu_count(), len(calls))
    if processes < 2:
        yield from map(judged, calls)
        return
    # A copy of a process that has threads may wait for their locks for ever: spawned ones have no threads.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(processes, mp_context=context, initializer=_start_process)
    try:
        yield from pool.map(judged, calls)
    except BrokenProcessPool:
        raise CommandError("a process that judges calls was ended; it may have had too little memory", FAILED) from None
    finally:
        pool.shutdown(cancel_futures=True)


def _start_process() -> None:
    """Prepare a process that judges calls: it ends with its parent, which is the one that Ctrl-C interrupts."""
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def judged(numbered: tuple[int, RecordedCall]) -> CallVerdict:
    """The verdict on a recorded call, in short, without its report. numbered: its number, and the call"""
    with single_threaded_blas():
        return replace(verdict_on(*numbered, _backend(), is_brief=True), report=None)


@cache
def _backend() -> Backend:
    """The backend of a process, of one thread."""
    return Backends(threads=1).choose("numpy", "cpu")


def _check_of(verdict: CallVerdict) -> Check:
    """The verdict as a check of continuous integration."""
    outcome = OUTCOMES.get(verdict.status, "skipped")
    message = "; ".join(filter(None, [verdict.mistake, verdict.message]))
    return Check(f"{verdict.number} {verdict.name}", outcome, message, "" if outcome == "passed" else str(verdict))


def _fields(verdict: CallVerdict) -> dict[str, Any]:
    """The verdict as JSON has it, which has no reports."""
    return {name: value for name, value in asdict(verdict).items() if name != "report"}


def _summary(counts: Counter[str], others: int, lost: int) -> str:
    """The last line."""
    statuses = ", ".join(f"{count} {status}" for status, count in counts.items())
    said = [f"{counted(counts.total(), 'call')} of attention{': ' * bool(statuses)}{statuses}"]
    if others:
        said.append(f"{counted(others, 'call')} of other functions")
    if lost:
        said.append(lost_lines(lost))
    return "; ".join(said)
