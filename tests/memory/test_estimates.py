"""Requests need at most the estimated memory, and large ones at least half of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.memory.cases import CASES

MB = 2**20
# Memory that a process needs once, here in its first request: OpenBLAS's buffers of
# two or three megabytes for each thread, stacks, pages of code, and up to 8 MiB of freed memory that the C library
# keeps (see attention_service.runtime.process).
SLACK = 8 * MB
# Smaller estimates need not be tight.
LARGE = 32 * MB

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")]


@pytest.fixture(scope="module")
def measurements(request: pytest.FixtureRequest) -> dict[str, Any]:
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
def test_the_peak_memory_of_a_request_matches_its_estimate(name: str, measurements: dict[str, Any]) -> None:
    estimate, peak = measurements[name]["estimate"], measurements[name]["peak"]
    assert peak <= 1.25 * estimate + SLACK
    assert estimate <= LARGE or estimate <= 2 * peak


def test_most_cases_are_large_enough_to_check_the_estimate(measurements: dict[str, Any]) -> None:
    large = [name for name, row in measurements.items() if row["peak"] > LARGE]
    assert len(large) >= 30
