"""`make test-deep`: thousands of random calls of other engines, mistakes that are planted in them, and a recording.

    python -m tests.deep_engines [NAME ...] [--draws N] [--seed N]

A NAME is a function, whose answers are compared with those of loops over tokens, or a mistake of addressing, which
another loop makes. `reads MISTAKE` and `merges MISTAKE` are mistakes of kernels that share no line with what is tested
(`tests.helpers.planted_reads`, `planted_merges`): named first, or explained by a fact that is true of what they read;
`reads right` and `merges right` are right kernels, none of which may be accused. `reads` and `merges` are all of these.
Each function prints how many calls were right, and their largest error; each mistake how often it was named first, and
how often another one was proved; `recording`, of 500 calls, one of them wrong, how many were judged in a second. The
exit status is 1 if a call was wrong, if fewer than 98 % of the mistakes that can be told were named first, or if a
proof was false. Seeds are printed, for `tests.test_engines_random.check` and
`tests.helpers.planted_calls.plant`.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from tests.helpers import planted_merges, planted_reads
from tests.helpers.engine_draws import DRAWS
from tests.helpers.planted_calls import MAKERS, plant
from tests.helpers.recorded_engine import record_decoding
from tests.test_compare_calls import judged
from tests.test_engines_random import check

# The share of mistakes that can be told which must be named first.
FIRST: Final = 0.98
RECORDING: Final = "recording"
RIGHT: Final = "right"
PLANTERS: Final = {"reads": planted_reads, "merges": planted_merges}
# Calls of the recording, which takes 2 GB, and the one that is wrong.
CALLS: Final = 500
WRONG: Final = 317


def run_function(name: str, seeds: range) -> bool:
    """Print how many calls of a function were right; True if all were."""
    worst, right = 0.0, 0
    for seed in seeds:
        try:
            worst, right = max(worst, check(name, seed)), right + 1
        except Exception as error:
            print(f"  {name}, seed {seed}: {type(error).__name__}: {str(error)[:400]}", flush=True)
    print(f"{name:24} {right} of {len(seeds)} right, largest error {worst:.1e}", flush=True)
    return right == len(seeds)


def run_mistake(name: str, seeds: range) -> bool:
    """Print how often a mistake was named first; True if that was often enough and no proof was false."""
    found: Counter[str] = Counter()
    for seed in seeds:
        planted = plant(name, seed)
        report = judged(planted.function, planted.arguments, planted.output, planted.sums, planted.version)
        if report.verdict.status not in ("wrong", "imprecise"):
            found["untellable"] += 1
            continue
        best = report.hypotheses[0] if report.hypotheses else None
        is_named = best is not None and name in (best.name, *best.also)
        found["first" if is_named else "missed"] += 1
        if not is_named:
            found["false proofs"] += best is not None and best.certainty == "proof"
            print(f"  {name}, seed {seed}: {report.verdict.message[:300]}", flush=True)
    told = found["first"] + found["missed"]
    print(f"{name:24} {found['first']} of {told} named first; {dict(found)}", flush=True)
    return found["first"] >= FIRST * told and not found["false proofs"]


def run_planted(kind: str, name: str, seeds: range) -> bool:
    """Print what is said of a mistake of an independent kernel; True if it is named or explained, and never falsely."""
    planter = PLANTERS[kind]
    found: Counter[str] = Counter()
    for seed in seeds:
        if (planted := planter.plant(name, seed)) is None:
            found["not possible"] += 1
            continue
        call, output, sums = planted.call
        report = judged(call.function, call.arguments, output, sums, call.version)
        best = report.hypotheses[0] if report.hypotheses else None
        if report.verdict.status not in ("wrong", "imprecise"):
            kind_of = "untellable"
        elif best is not None and best.certainty == "proof":
            names = (best.name, *best.also)
            is_true = any(one in planter.MISTAKES[name][1] or planter.says(one, planted) for one in names)
            kind_of = "named" if is_true else "false proofs"
        elif report.facts:
            kind_of = "explained" if planter.is_true(report.facts[0], planted) else "false facts"
        else:
            kind_of = "missed"
        found[kind_of] += 1
        if kind_of in ("false proofs", "false facts", "missed"):
            print(f"  {kind} {name}, seed {seed}, {kind_of}: {report.verdict.message[:300]}", flush=True)
    told = sum(found.values()) - found["not possible"] - found["untellable"]
    good = found["named"] + found["explained"]
    print(f"{kind} {name:24} {good} of {told} named or explained; {dict(found)}", flush=True)
    return good >= FIRST * told and not found["false proofs"] and not found["false facts"]


def run_right(kind: str, seeds: range) -> bool:
    """Print how many right kernels were accused; True if none was."""
    accused = 0
    for seed in seeds:
        call, output, sums = PLANTERS[kind].right(seed)
        report = judged(call.function, call.arguments, output, sums, call.version)
        if report.verdict.status != "correct":
            accused += 1
            print(f"  {kind} {RIGHT}, seed {seed}: {report.verdict.message[:300]}", flush=True)
    print(f"{kind} {RIGHT}: {accused} of {len(seeds)} right kernels accused", flush=True)
    return not accused


def judge_recording(seed: int) -> bool:
    """True if `compare` names the wrong call of a recording, and calls all others correct."""
    with TemporaryDirectory() as folder:
        record_decoding(Path(folder), CALLS, {WRONG}, seed=seed)
        started = time.monotonic()
        command = [sys.executable, "-m", "attention_service", "compare", folder]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        speed = CALLS / (time.monotonic() - started)
    lines = done.stdout.splitlines()
    others = [line for number, line in enumerate(lines[:-1]) if number != WRONG and line.split()[1] == "correct"]
    is_right = done.returncode == 1 and len(others) == CALLS - 1 and " pages.batch_shifted; " in lines[WRONG]
    print(
        f"{RECORDING:24} {'right' if is_right else done.stdout + done.stderr}, {speed:.0f} calls in a second",
        flush=True,
    )
    return is_right


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    planted = [f"{kind} {name}" for kind, planter in PLANTERS.items() for name in (*planter.MISTAKES, RIGHT)]
    names = [*DRAWS, *MAKERS, *planted, RECORDING]
    parser.add_argument("names", nargs="*", metavar="NAME", help="default: all; `reads` or `merges` for all of these")
    parser.add_argument("--draws", type=int, default=10_000, help="calls of all these together")
    parser.add_argument("--seed", type=int, default=time.time_ns() % 2**32)
    given = parser.parse_args()
    chosen = [name for name in names if not given.names or name in given.names or name.split()[0] in given.names]
    seeds = range(given.seed, given.seed - (-given.draws // len(chosen)))
    print(f"seed {given.seed}", flush=True)
    if not chosen:
        parser.error(f"expected one of {', '.join(names)}")
    passed = []
    for name in chosen:
        kind, _, mistake = name.partition(" ")
        if name == RECORDING:
            passed.append(judge_recording(given.seed))
        elif name in planted:
            passed.append(run_right(kind, seeds) if mistake == RIGHT else run_planted(kind, mistake, seeds))
        else:
            passed.append((run_function if name in DRAWS else run_mistake)(name, seeds))
    sys.exit(not all(passed))


if __name__ == "__main__":
    main()
