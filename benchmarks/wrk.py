"""Throughput as wrk measures it (https://github.com/wg/wrk): a client written in C, and not by us."""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Final

from benchmarks.client import CLIENTS, TIMEOUT
from benchmarks.forms import AUTHORIZATION, Request

WRK: Final = shutil.which("wrk")
MISSING: Final = "wrk is not installed (Debian package wrk)"
SCRIPT: Final = Path(__file__).with_name("wrk.lua")
THREADS: Final = 2


class WrkError(Exception):
    """wrk failed, or counted socket errors or answers other than 2xx and 3xx."""


def wrk_throughput(port: int, request: Request, seconds: int) -> float:
    """Return the answers per second to `CLIENTS` connections of wrk.

    Errors: WrkError.
    """
    assert WRK is not None, MISSING
    headers = AUTHORIZATION | dict(request.headers)
    with tempfile.NamedTemporaryFile() as body:
        body.write(request.body)
        body.flush()
        command = [WRK, f"-t{THREADS}", f"-c{CLIENTS}", f"-d{seconds}s", f"--timeout={TIMEOUT:.0f}s", f"-s{SCRIPT}"]
        command += [f"-H{name}: {value}" for name, value in headers.items()]
        command += [f"http://127.0.0.1:{port}{request.path}", "--", body.name]
        finished = subprocess.run(command, capture_output=True, text=True, check=False)
    return read_summary(finished)


def read_summary(finished: subprocess.CompletedProcess[str]) -> float:
    """Return the answers per second that wrk.lua printed. Errors: WrkError."""
    if finished.returncode:
        raise WrkError(f"exit status {finished.returncode}: {finished.stderr or finished.stdout}")
    summary = json.loads(finished.stdout.splitlines()[-1])
    if any(summary["errors"].values()) or not summary["requests"]:
        raise WrkError(f"{summary['requests']} answers, errors: {summary['errors']}\n{finished.stdout}")
    return float(summary["requests"] / summary["microseconds"] * 1e6)
