"""The memory for decoding any body stays within the estimate that is made before."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.memory.hostile import BODIES
from tests.memory.test_estimates import MB, SLACK

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")]


@pytest.fixture(scope="module")
def measurements(request: pytest.FixtureRequest) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.memory.hostile"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    rows = {row["name"]: row for row in map(json.loads, done.stdout.splitlines())}
    if request.config.getoption("capture") == "no":
        print(f"\n{'body':42}{'bound':>10}{'estimate':>10}{'peak':>10}  ratio")
        for name, row in rows.items():
            bound, estimate, peak = row["phases"]["results"] / MB, row["phases"]["decode"] / MB, row["peak"] / MB
            print(f"{name:42}{bound:7.1f} MB{estimate:7.1f} MB{peak:7.1f} MB{estimate / peak:7.2f}")
    assert done.stderr == ""
    return rows


@pytest.mark.parametrize("name", BODIES)
def test_decoding_stays_within_its_estimate_and_bound(name: str, measurements: dict[str, Any]) -> None:
    estimate, bound, peak = (
        measurements[name]["phases"]["decode"],
        measurements[name]["phases"]["results"],
        measurements[name]["peak"],
    )
    assert peak <= 1.25 * estimate + SLACK
    assert estimate <= bound
