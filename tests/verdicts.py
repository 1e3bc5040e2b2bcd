"""The frozen table of verdicts, `tests/verdicts.txt`: what is said of kernels whose mistakes are known.

    python -m tests.verdicts write|compare [PART …] [--processes N]

`write` judges all cases anew and writes the table; with parts, the others keep their blocks. `compare` judges them,
prints what differs from the table, and exits with status 1 if anything does. It takes two minutes, so that no test runs
it: run it before and after a change of the judges, and commit the table that a wanted change makes.

A block is a case: status, hypotheses with their certainty, facts, where it is wrong, what survives, what comes next.
Numbers have two digits, so that another order of sums changes nothing.
"""

from __future__ import annotations

import argparse
import difflib
import re
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from textwrap import wrap
from typing import Any, Final

import numpy as np

from attention_service.backends.registry import Backends
from attention_service.commands.verdicts import judged as judged_recording
from attention_service.comparison.calls.compare import compare_call
from attention_service.comparison.calls.question import make_call_question
from attention_service.comparison.calls.report import make_call_report
from attention_service.comparison.gradients.mutants import GRADIENT_MUTANTS
from attention_service.comparison.mutants import MUTANTS
from attention_service.engines.table import decode
from attention_service.library import compare
from attention_service.library.recordings import read_recording
from attention_service.schemas.compare import CompareReport
from tests.helpers.engine_calls import Draw
from tests.helpers.engine_draws import DRAWS
from tests.helpers.planted import COMMON_PAIRS, draw, returned
from tests.helpers.planted_calls import MAKERS, plant
from tests.helpers.planted_gradients import draw_gradients
from tests.helpers.recorded_engine import record_decoding
from tests.helpers.right_backward import backward, random_request
from tests.helpers.right_kernels import flash

TABLE: Final = Path(__file__).with_suffix(".txt")
# Right kernels, right backward passes, and calls with each mistake.
KERNELS: Final = 30
BACKWARDS: Final = 20
CALLS: Final = 2
# Seeds that are tried for a request to which a mistake applies.
SEEDS: Final = 200
WIDTH: Final = 110
NUMBER: Final = re.compile(r"(?<![\w.])-?\d+\.\d+(?:e[+-]?\d+)?")

# From a name to the lines that are said of the case, by part.
Said = Callable[[str], Iterable[str]]


def planted(name: str) -> Iterator[str]:
    """A request to which mistakes apply, joined by " and ", and what a kernel that makes them returns."""
    names = tuple(name.split(" and "))
    drawn = next((found for seed in range(SEEDS) if (found := draw(seed, names))), None)
    if drawn is None:
        return iter(["applies to no request that was drawn"])
    arrays = ("output", "logsumexp") if any(MUTANTS[one].needs for one in names) else ("output",)
    return lines_of(compare(returned(drawn, arrays), **drawn.fields))


def kernel(seed: str) -> Iterator[str]:
    """A right kernel as production writes it, output and logsumexp."""
    from tests.deep_compare import kernel_and_request

    request, how = kernel_and_request(np.random.default_rng(int(seed)))
    options = {name: request[name] for name in ("softcap", "is_causal") if name in request}
    return lines_of(compare(flash(request["query"], request["key"], request["value"], how, **options), **request))


def right_backward(seed: str) -> Iterator[str]:
    """A right backward pass as production writes it."""
    fields, how, options = random_request(np.random.default_rng(int(seed)))
    arrays = {name: fields[name] for name in ("query", "key", "value", "grad_output")}
    with np.errstate(all="ignore"):
        answer = backward(**arrays, kernel=how, **options)
    return lines_of(compare(answer, **fields, **options))


def gradients(name: str) -> Iterator[str]:
    """A request with a cotangent to which a mistake applies, and the gradients that a kernel makes with it."""
    drawn = next((found for seed in range(SEEDS) if (found := draw_gradients(seed, name))), None)
    if drawn is None:
        return iter(["applies to no request that was drawn"])
    return lines_of(compare(drawn.gradients, **drawn.fields))


def call(name: str) -> Iterator[str]:
    """A call of another library that a kernel with a mistake of addressing answered. name: its name, and a seed"""
    mistake, _, seed = name.partition(" ")
    made = plant(mistake, int(seed))
    return lines_of(judged_call(made.function, made.arguments, made.output, made.sums, made.version))


def right_call(name: str) -> Iterator[str]:
    """A random call of a function that a right kernel answered in float32."""
    from tests.test_compare_calls import in_axes

    drawn = DRAWS[name](Draw(0))
    output, sums = in_axes(drawn, np.dtype(np.float32))
    return lines_of(judged_call(drawn.function, drawn.arguments, output, sums, drawn.version))


def judged_call(
    function: str, arguments: dict[str, Any], output: np.ndarray, sums: np.ndarray | None, version: int | None
) -> CompareReport:
    """The report on what a function returned."""
    answer = {"output": output} | ({} if sums is None else {"logsumexp": sums})
    asked = make_call_question(function, decode(function, arguments, version), answer)
    return make_call_report(compare_call(asked, Backends(threads=1).choose("numpy", "cpu")))


def real_bug(name: str) -> Iterator[str]:
    """A bug that a public thread describes."""
    bug = bugs()[name]
    fields = bug.request(np.random.default_rng(zlib.crc32(f"{bug.thread} {bug.kernel.__name__}".encode())))
    with np.errstate(all="ignore"):
        arrays = bug.kernel(fields, True)
    return lines_of(compare(arrays, **fields))


@cache
def bugs() -> dict[str, Any]:
    """The bugs of public threads, by thread and kernel."""
    found = import_module("tests.peers.real_bugs").BUGS  # peers are not type-checked
    return {f"{bug.thread} {bug.kernel.__name__}": bug for bug in found}


def recording(name: str) -> Iterator[str]:
    """A recorded engine, with one wrong call."""
    with TemporaryDirectory() as folder:
        record_decoding(Path(folder), 4, {2}, sequences=3, heads=(4, 2), features=16, tokens=(20, 60), seed=int(name))
        for number, one in enumerate(read_recording(Path(folder)).calls):
            found = judged_recording((number, one))
            said = "; ".join(filter(None, [found.status, found.mistake, found.message]))
            yield from folded(f"call {number}: {said}")


PARTS: Final[dict[str, tuple[Said, Callable[[], Iterable[str]]]]] = {
    "mistakes": (planted, lambda: MUTANTS),
    "pairs": (planted, lambda: [" and ".join(pair) for pair in COMMON_PAIRS[::3]]),
    "kernels": (kernel, lambda: map(str, range(KERNELS))),
    "gradients": (gradients, lambda: GRADIENT_MUTANTS),
    "backwards": (right_backward, lambda: map(str, range(BACKWARDS))),
    "calls": (call, lambda: (f"{name} {seed}" for name in MAKERS for seed in range(CALLS))),
    "right calls": (right_call, lambda: DRAWS),
    "real bugs": (real_bug, bugs),
    "recordings": (recording, lambda: ["0", "1"]),
}


def lines_of(report: CompareReport) -> Iterator[str]:
    """What a report says of a kernel, in short lines; numbers have two digits."""
    yield report.verdict.status
    for one in report.hypotheses:
        also = f" (the same here: {', '.join(one.also)})" if one.also else ""
        share = "" if one.certainty == "proof" else f" {one.explained:.2f}"
        yield from folded(f"{one.certainty} {one.name}{share}: {one.message}{also}")
    for fact in report.facts:
        yield from folded(f"fact {fact.name}: {fact.message}")
    for place in report.where:
        yield from folded(f"where {place.array}: {place.message}")
    power = report.power
    if power.mutants:
        yield from folded(f"survivors of {power.mutants}: {', '.join(power.survivors) or 'none'}")
    if power.options:
        yield from folded(f"options unseen: {', '.join(power.options)}")
    if report.next_input is not None:
        yield from folded(f"next seed {report.next_input.seed}: {', '.join(report.next_input.kills)}")


def folded(text: str) -> list[str]:
    """Text in lines of at most WIDTH characters, numbers with a point in two digits."""
    short = NUMBER.sub(lambda found: f"{float(f'{float(found[0]):.2g}'):g}", text)
    return wrap(short, WIDTH, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)


def said_of(case: tuple[str, str]) -> str:
    """The block of a case: its heading, and what is said of it. case: part and name"""
    part, name = case
    with np.errstate(all="ignore"):
        lines = list(PARTS[part][0](name))
    return "\n".join([f"## {part}: {name}", *lines])


def blocks(text: str) -> dict[str, str]:
    """The blocks of a table by their headings."""
    found = text.strip().split("\n\n")
    return {block.partition("\n")[0]: block for block in found if block.startswith("## ")}


def main() -> None:
    """Write the table, or compare with it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("what", choices=["write", "compare"])
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS], default=[], metavar="PART")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    before = blocks(TABLE.read_text(encoding="utf-8")) if TABLE.exists() else {}
    cases = [(part, name) for part in options.parts or PARTS for name in PARTS[part][1]()]
    with ProcessPoolExecutor(options.processes, mp_context=get_context("spawn")) as pool:
        new = blocks("\n\n".join(pool.map(said_of, cases)))
    whole = [f"## {part}: " for part in PARTS if not options.parts or part in options.parts]
    judged_before = {name: block for name, block in before.items() if name.startswith(tuple(whole))}
    if options.what == "write":
        kept = {name: block for name, block in before.items() if name not in judged_before} | new
        order = {f"## {part}": place for place, part in enumerate(PARTS)}
        found = sorted(kept, key=lambda name: order[name.partition(":")[0]])  # stable: cases keep their order
        TABLE.write_text("\n\n".join(kept[name] for name in found) + "\n", encoding="utf-8")
    different = [name for name in dict.fromkeys((*judged_before, *new)) if judged_before.get(name) != new.get(name)]
    for name in different:
        old, now = (text.get(name, "").splitlines() for text in (judged_before, new))
        print("\n".join([name, *list(difflib.unified_diff(old, now, lineterm="", n=0))[2:]]))
    print(f"{len(different)} of {len(new)} cases differ")
    sys.exit(1 if different and options.what == "compare" else 0)


if __name__ == "__main__":
    main()
