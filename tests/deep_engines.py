"""`make test-deep`: thousands of random calls of other engines, against loops over their tokens.

    python -m tests.deep_engines [NAME ...] [--draws N] [--seed N]

Each function prints how many calls were right, and their largest error. The exit status is 1 if one was wrong; its name
and seed are printed, for `tests.test_engines_random.check`.
"""

from __future__ import annotations

import argparse
import sys
import time

from tests.helpers.engine_draws import DRAWS
from tests.test_engines_random import check


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[*DRAWS, []], help="functions; all by default")
    parser.add_argument("--draws", type=int, default=10_000, help="calls of all functions together")
    parser.add_argument("--seed", type=int, default=time.time_ns() % 2**32)
    given = parser.parse_args()
    names = given.names or list(DRAWS)
    each, wrong = -(-given.draws // len(names)), 0
    print(f"seed {given.seed}", flush=True)
    for name in names:
        worst, right = 0.0, 0
        for seed in range(given.seed, given.seed + each):
            try:
                worst, right = max(worst, check(name, seed)), right + 1
            except Exception as error:
                print(f"  {name}, seed {seed}: {type(error).__name__}: {str(error)[:400]}", flush=True)
        wrong += each - right
        print(f"{name:24} {right} of {each} right, largest error {worst:.1e}", flush=True)
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
