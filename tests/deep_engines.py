"""`make test-deep`: thousands of random calls of other engines, and of mistakes that are planted in them.

    python -m tests.deep_engines [NAME ...] [--draws N] [--seed N]

A NAME is a function, whose answers are compared with those of loops over tokens, or a mistake of addressing, which
another loop makes. Each function prints how many calls were right, and their largest error; each mistake how often it
was named first, and how often another one was proved. The exit status is 1 if a call was wrong, if fewer than 98 % of
the mistakes that can be told were named first, or if a proof was false. Seeds are printed, for
`tests.test_engines_random.check` and `tests.helpers.planted_calls.plant`.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter

from tests.helpers.engine_draws import DRAWS
from tests.helpers.planted_calls import MAKERS, plant
from tests.test_compare_calls import judged
from tests.test_engines_random import check

# The share of mistakes that can be told which must be named first.
FIRST = 0.98


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [*DRAWS, *MAKERS]
    parser.add_argument("names", nargs="*", choices=[*names, []], metavar="NAME", help="default: all")
    parser.add_argument("--draws", type=int, default=10_000, help="calls of all these together")
    parser.add_argument("--seed", type=int, default=time.time_ns() % 2**32)
    given = parser.parse_args()
    chosen = given.names or names
    seeds = range(given.seed, given.seed - (-given.draws // len(chosen)))
    print(f"seed {given.seed}", flush=True)
    passed = [(run_function if name in DRAWS else run_mistake)(name, seeds) for name in chosen]
    sys.exit(not all(passed))


if __name__ == "__main__":
    main()
