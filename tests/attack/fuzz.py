"""`make fuzz`: mutate bodies of every wire format, guided by which lines of the codecs and of zipfile they reach.

Invariant: decoding a body succeeds or raises a ServiceError, within the bounds of bounds.py. libFuzzer saves others.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import time

from tests.attack.corpus import TARGETS

# Limits for one body, which takes milliseconds. bounds.py limits its processor time; this limit ends what hangs.
SECONDS = 120
MEMORY_MB = 2048


def fuzz(media_type: str, runs: int, seconds: int, seed: int) -> tuple[int, str]:
    """The number of bodies with which a separate process fuzzed the codec, and its failure ("" if none)."""
    command = [sys.executable, "-m", "tests.attack.fuzz_one", media_type, f"-atheris_runs={runs}", f"-seed={seed}"]
    command += [f"-max_total_time={seconds}", f"-timeout={SECONDS}", f"-rss_limit_mb={MEMORY_MB}", "-verbosity=0"]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    told = re.findall(r"^executed (\d+)$", done.stderr, re.MULTILINE)
    wrong = f"exit status {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-6000:]}" if done.returncode else ""
    return int(told[-1]) if told else 0, wrong


def main() -> None:
    """Fuzz all chosen codecs in turn; exit status 1 if one fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=1_000_000, help="executions of each codec")
    parser.add_argument("--seconds", type=int, default=0, help="at most, for each codec; 0: no end")
    parser.add_argument("--seed", type=int, default=time.time_ns() % 2**31)
    parser.add_argument("--codecs", nargs="+", choices=list(TARGETS), default=list(TARGETS), help="only these")
    options = parser.parse_args()
    found = []
    for media_type in options.codecs:
        start = time.monotonic()
        executed, wrong = fuzz(media_type, options.runs, options.seconds, options.seed)
        took = time.monotonic() - start
        print(f"{media_type}: {executed} executions in {took:.0f} s, seed {options.seed} {wrong}", flush=True)
        found.append(wrong)
    sys.exit(any(found))


if __name__ == "__main__":
    main()
