"""Many sequences: short ones cut at every byte, long ones at random offsets; `make test-deep` runs it."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from itertools import count, product
from random import Random
from typing import Final

from tests.framing.client import Server
from tests.framing.run import PARSERS, Case, check, every_byte, random_cases, serving

SHOWN: Final = 20  # failures of each server


def sequences_to_try(server: Server, short: int, cuts: int, seed: int) -> Iterator[tuple[str, list[Case]]]:
    """Names of sequences, each with its cases."""
    for index in range(short):
        name = f"short-{seed}.{index}"
        yield name, every_byte(server, name)
    for index in count():
        if cuts <= 0:
            return
        name = f"long-{seed}.{index}"
        cases = random_cases(server, name, Random(name), 10)
        cuts -= sum(len(case.cuts) for case in cases)
        yield name, cases


def try_all(server: Server, options: argparse.Namespace) -> int:
    """Send all sequences; print progress and the first failures; return the number of failed cases."""
    label = f"{server.parser}{', TLS' * server.tls}"
    tried = failed = sequences = 0
    start = time.monotonic()
    for name, cases in sequences_to_try(server, options.short, options.count, options.seed):
        outcome = check(server, name, cases)
        for failure in outcome.failures[: max(0, SHOWN - failed)]:
            print(failure)
        tried, failed, sequences = tried + outcome.tried, failed + len(outcome.failures), sequences + 1
        seconds = time.monotonic() - start
        print(
            f"\r{label}: {failed} of {tried} cases in {sequences} sequences fail, {seconds:.0f} s", end="", flush=True
        )
    print()
    return failed


def main() -> int:
    """Exit status 1 if any case fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=20_000, help="random cuts of long sequences")
    parser.add_argument("--short", type=int, default=40, help="short sequences, each cut at every byte")
    parser.add_argument("--seed", type=int, default=0, help="other sequences")
    parser.add_argument("--parser", choices=PARSERS, help="default: all")
    parser.add_argument("--tls", type=int, choices=[0, 1], help="default: both")
    parser.add_argument("--port", type=int, help="of a server that runs already, with --parser and --tls")
    options = parser.parse_args()
    if options.port:
        return try_all(Server(options.port, options.parser, bool(options.tls)), options) > 0
    failed = 0
    for name, tls in product(PARSERS, (False, True)):
        if options.parser in (None, name) and options.tls in (None, tls):
            try:
                with serving(name, tls) as server:
                    failed += try_all(server, options)
            except AssertionError as error:  # a defect in the log
                print(f"{error}"[:10_000])
                failed += 1
    return failed > 0


if __name__ == "__main__":
    sys.exit(main())
