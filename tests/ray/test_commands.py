"""Commands with --ray: each call or case is a task of the cluster, and what is printed is the same."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NoReturn

import pytest
from ray.cluster_utils import Cluster

from attention_service.backends.ray.backend import RayBackend
from attention_service.errors import Busy
from tests.helpers.recorded_engine import record_decoding

SMALL: dict[str, Any] = {"sequences": 3, "heads": (4, 2), "features": 16, "tokens": (20, 60)}
KERNELS = """
import numpy as np

def unscaled(query, key, value):
    weights = np.exp(query @ np.swapaxes(key, -1, -2))
    return weights / weights.sum(axis=-1, keepdims=True) @ value

def deadly(query, key, value):
    import os
    os._exit(1)
"""


def command(cluster: Cluster, folder: Path, *arguments: object) -> tuple[int, list[str], str]:
    """The exit status of a command in a folder, and what it printed."""
    done = subprocess.run(
        [sys.executable, "-m", "attention_service", *map(str, arguments)], capture_output=True, text=True, check=False,
        cwd=folder, env=os.environ | {"ATTENTION_RAY_ADDRESS": cluster.address},
    )  # fmt: skip
    return done.returncode, done.stdout.splitlines(), done.stderr


def test_recorded_calls_have_the_same_verdicts_in_the_same_order(cluster: Cluster, tmp_path: Path) -> None:
    record_decoding(tmp_path, 12, {7}, **SMALL)
    (folder := sorted(tmp_path.glob("*run_*"))[3] / "inputs.safetensors").write_bytes(folder.read_bytes()[:500])
    distributed = command(cluster, tmp_path, "compare", ".", "--ray")
    assert distributed == command(cluster, tmp_path, "compare", ".")
    status, (*lines, summary), _ = distributed
    assert (status, summary) == (1, "12 calls of attention: 10 correct, 1 unreadable, 1 wrong")
    assert "pages.batch_shifted" in lines[7]


def test_cases_have_the_same_outcomes(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "kernels.py").write_text(KERNELS)
    assert command(cluster, tmp_path, "conformance", "write", "cases", "--cases", "60")[0] == 0
    asked = "conformance", "run", "kernels:unscaled", "--dir", "cases"
    distributed = command(cluster, tmp_path, *asked, "--ray")
    status, printed, _ = command(cluster, tmp_path, *asked)
    # Workers have directories of their own, so they print the whole path of the file.
    assert distributed == (status, [line.replace("(kernels.py", f"({tmp_path}/kernels.py") for line in printed], "")
    assert status == 1
    assert any("proof: scale.absent" in line for line in printed)


def test_a_function_that_ends_its_process_is_an_error(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "kernels.py").write_text(KERNELS)
    status, printed, said = command(cluster, tmp_path, "conformance", "run", "kernels:deadly", "--ray")
    assert (status, printed) == (3, [])
    assert "Busy: /backend: expected workers of Ray that compute, got WorkerCrashedError" in said


def fail(number: int) -> NoReturn:
    raise Busy.at("/number", "another number", str(number))


def test_an_error_of_the_service_is_the_same_as_without_tasks(backend: RayBackend) -> None:
    with pytest.raises(Busy, match="/number: expected another number, got 3"):
        list(backend.map(fail, [3]))
    assert list(backend.map(abs, range(-20, 0))) == [*range(20, 0, -1)]
    assert list(backend.map(abs, [])) == []
