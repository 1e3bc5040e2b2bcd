"""What requests take is what was estimated: never much more, and seldom less than half."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.memory.cases import CASES

MB = 2**20
# What a process takes once and not for a request, but here in the first request of each process: OpenBLAS's buffers of
# two or three megabytes for each thread, stacks, pages of code, and up to 8 MiB that the C library keeps of what is
# freed (see service.runtime.process).
SLACK = 8 * MB
# Estimates below this may be loose.
LARGE = 32 * MB

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")]


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.memory.measure", "numpy"]
    environment = os.environ | {"OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    if request.config.getoption("capture") == "no":
        print(f"\n{'case':30}{'estimate':>10}{'peak':>10}  ratio")
        for row in rows:
            estimate, peak = row["estimate"] / MB, row["peak"] / MB
            print(f"{row['name']:30}{estimate:7.1f} MB{peak:7.1f} MB{estimate / peak:7.2f}")
    assert done.stderr == ""
    return {row["name"]: row for row in rows}


@pytest.mark.parametrize("name", [case.name for case in CASES])
def test_a_request_takes_what_was_estimated(name: str, found: dict[str, Any]) -> None:
    estimate, peak = found[name]["estimate"], found[name]["peak"]
    assert peak <= 1.25 * estimate + SLACK
    assert estimate <= LARGE or estimate <= 2 * peak


def test_cases_are_large_enough_to_tell(found: dict[str, Any]) -> None:
    large = [name for name, row in found.items() if row["peak"] > LARGE]
    assert len(large) >= 30
