"""The systemd unit of deploy/systemd, which docs/deployment.md installs, by systemd's own tools."""

from __future__ import annotations

import configparser
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from attention_service.settings import Settings
from benchmarks.serving import free_port
from tests.helpers.documents import ROOT
from tests.helpers.waiting import TIMEOUT

UNIT = ROOT / "deploy" / "systemd" / "attention.service"
PROGRAM = "/opt/attention/bin/attention-service"
# Exposure from 0 to 100 by `systemd-analyze security`: 2 of 10 is "OK", the best of its words.
MOST_EXPOSED = 20


@pytest.fixture
def unit(tmp_path: Path) -> Path:
    """The unit with a program that is on this machine, as systemd checks that it is."""
    program = tmp_path / "attention-service"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m attention_service "$@"\n')
    program.chmod(0o755)
    text = UNIT.read_text()
    assert PROGRAM in text
    found = tmp_path / "attention.service"
    found.write_text(text.replace(PROGRAM, str(program)))
    return found


def setting(unit: Path, name: str) -> str:
    """A setting of the section Service, which has it once."""
    parser = configparser.RawConfigParser()
    parser.optionxform = str  # type: ignore[assignment,method-assign]  # as the documentation shows it
    parser.read_string(unit.read_text())
    return parser["Service"][name]


def analyze(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = ["systemd-analyze", *arguments]
    return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)


def test_systemd_knows_every_line(unit: Path) -> None:
    """Lines that it does not know are warnings, with status 0."""
    done = analyze("verify", unit)
    assert (done.returncode, done.stdout) == (0, "")


def test_the_service_is_confined(unit: Path) -> None:
    done = analyze("security", "--offline=true", f"--threshold={MOST_EXPOSED}", unit)
    assert done.returncode == 0, done.stdout


def test_it_has_the_time_that_the_service_takes_to_stop() -> None:
    grace, drain = (Settings.model_fields[name].default for name in ("grace", "drain"))
    assert int(setting(UNIT, "TimeoutStopSec")) > grace + drain


@pytest.mark.slow
@pytest.mark.parametrize("starts", [True, False])
def test_a_start_succeeds_once_the_service_is_ready_and_fails_if_it_ends(unit: Path, starts: bool) -> None:
    """The commands of the unit as systemd would run them: it gives the second the id of the first."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ATTENTION_")}
    environment |= {"ATTENTION_PORT": str(free_port()), "ATTENTION_BACKEND": "numpy" if starts else "none"}
    with subprocess.Popen(shlex.split(setting(unit, "ExecStart")), env=environment) as process:
        try:
            if not starts:  # systemd collects what it started
                assert process.wait(TIMEOUT) == int(setting(unit, "RestartPreventExitStatus"))
            after = shlex.split(setting(unit, "ExecStartPost"))
            environment["MAINPID"] = str(process.pid)
            done = subprocess.run(after, env=environment, timeout=TIMEOUT, check=False)
            assert (done.returncode == 0) is starts
        finally:
            process.terminate()
