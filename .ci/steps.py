"""Run the steps that a change must pass, each a target of the Makefile, on all processors.

A step is skipped if its inputs are those of its last success on this machine; ALL=1 skips none. The first failure ends
all steps, and its log is printed last. Logs of all steps are in build/ci.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOGS = ROOT / "build" / "ci"
PASSED = Path(os.environ.get("ENVIRONMENTS") or Path.home() / ".cache" / "attention-service") / "passed"
LAST_LINES = 300  # of the log of a failed step
CLOSING = re.compile(r"^=+ (.*\d+ (?:passed|failed).*?) =+$|^(\d+ (?:passed|failed).* in [\d.]+s.*)$", re.MULTILINE)

# What a step may read without naming it: all but documents. `make test` always runs, and reads all documents.
CODE = (".", ":(exclude)docs", ":(exclude)*.md", ":(exclude)findings")
# What decides about an outcome and is not in git.
VARIABLES = (
    "ATTACK_CASES", "ATTACK_SEED", "BASE_IMAGE", "CHROMIUM", "GRPC", "MAKEFLAGS", "OTEL", "OTHER_PYTHONS", "PARALLEL",
    "PEERS_SEED", "PYTEST_ADDOPTS", "TARGET", "TORCH",
)  # fmt: skip
PYTHONS = Path.home() / ".pyenv" / "versions"
TORCH = ROOT / ".venv-torch" / "torch"  # the build that was chosen
ALWAYS = ("install-all", "test")  # steps that are never skipped
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PATIENCE = 20  # seconds for a step to end what it started


def known(*paths: str) -> set[str]:
    """The names of files below these paths that git tracks, or would."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *paths]
    names = subprocess.check_output(command, cwd=ROOT).decode().split("\0")
    return {name for name in names if (ROOT / name).is_file()}


@dataclass
class Step:
    """A target of the Makefile.

    documents: those on which its outcome depends, beside CODE
    alone: True if it measures time or memory, or needs all processors: nothing runs beside it
    """

    target: str
    documents: str = ""
    alone: bool = False
    process: subprocess.Popen[bytes] | None = None
    seconds: float = 0.0
    status: str = ""
    digest: str = field(default="", repr=False)

    @property
    def record(self) -> Path:
        """Holds the hash of its inputs while its last run passed."""
        return PASSED / self.target

    @property
    def log(self) -> Path:
        """The output of the step."""
        return LOGS / f"{self.target}.log"

    def read_inputs(self) -> str:
        """A hash of all that the step may read."""
        names = sorted(known(*CODE) | (known(*self.documents.split()) if self.documents else set()))
        torch = TORCH.read_text() if TORCH.exists() else ""
        versions = sorted(path.name for path in PYTHONS.glob("*"))
        others = [sys.version, torch, versions, [os.environ.get(name) for name in VARIABLES]]
        found = hashlib.sha256(repr(others).encode())
        for name in names:
            with suppress(FileNotFoundError):  # of a step beside this one
                mode, content = (ROOT / name).stat().st_mode, (ROOT / name).read_bytes()
                found.update(f"\0{name}\0{mode}".encode() + hashlib.sha256(content).digest())
        return found.hexdigest()

    def is_unchanged(self) -> bool:
        """True if the step passed with the same inputs before, on this machine."""
        if self.target in ALWAYS:
            return False
        self.digest = self.read_inputs()
        return self.record.exists() and self.record.read_text() == self.digest

    def start(self) -> None:
        """Start the target in a process group of its own."""
        self.record.unlink(missing_ok=True)
        self.seconds = -time.monotonic()
        with self.log.open("wb") as log:
            command = ["make", "--no-print-directory", *(["-j2"] if self.target == "install-all" else []), self.target]
            self.process = subprocess.Popen(
                command,
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def end(self) -> None:
        """Record how the target ended, and print the last lines of its test runners."""
        assert self.process is not None
        self.seconds += time.monotonic()
        self.status = "failed" if self.process.returncode else "passed"
        print(f"== make {self.target} {self.status} after {self.seconds:.0f} s", flush=True)
        for match in CLOSING.finditer(self.log.read_text(errors="replace")):
            print(f"   {match[1] or match[2]}", flush=True)
        self.kill()
        if self.status == "passed" and self.digest and self.read_inputs() == self.digest:
            PASSED.mkdir(parents=True, exist_ok=True)
            self.record.write_text(self.digest)

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal to the target and to all that it started and left running."""
        assert self.process is not None
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)


# The quickest first, so that a plain error ends the run soon.
STEPS = (
    Step("install-all", alone=True),
    Step("test", alone=True),
    Step("docs", "docs *.md"),
    Step("deploy-check", "docs/deployment.md"),
    Step("test-servers", "docs/deployment.md"),
    Step("test-torch", "docs/compare.md docs/notebooks.md"),
    Step("test-pythons"),
    Step("test-page"),
    Step("test-clients", "docs/clients.md docs/inference-protocol.md"),
    Step("test-ray"),
    Step("test-peers", "docs/images docs/models.md docs/conformance.md docs/coming-from.md docs/tutorial-model.md"),
    Step(
        "test-slow",
        "docs/suites.md docs/rounding.md docs/compare.md docs/agents.md docs/tutorial-kernel.md",
        alone=True,
    ),
    Step("test-attack", alone=True),
    Step("image-test", "docs/deployment.md README.md", alone=True),
)


def run(steps: list[Step]) -> Step | None:
    """Run the steps, as many at once as there are processors. The first that failed, if any."""
    running: list[Step] = []
    left = list(steps)
    lanes = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    while left or running:
        while left and len(running) < lanes and not (running and (left[0].alone or running[0].alone)):
            step = left.pop(0)
            if step.is_unchanged() and not os.environ.get("ALL"):
                step.status = "skipped"
                print(f"== make {step.target} skipped: it passed with the same inputs", flush=True)
                continue
            step.start()
            running.append(step)
        time.sleep(0.1)
        for step in [step for step in running if step.process is not None and step.process.poll() is not None]:
            running.remove(step)
            step.end()
            if step.status == "failed":
                return step
    return None


def stop(steps: list[Step]) -> None:
    """End steps that still run: first as they want to, then at once. No signal interrupts that."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    for step in steps:
        step.kill(signal.SIGTERM)
    end = time.monotonic() + PATIENCE
    for step in steps:
        assert step.process is not None
        with suppress(subprocess.TimeoutExpired):
            step.process.wait(max(0.0, end - time.monotonic()))
        step.kill()
        step.seconds += time.monotonic()
        step.status = "ended"


def main() -> None:
    """Run all steps, and print how long each took."""
    LOGS.mkdir(parents=True, exist_ok=True)
    for stream in (sys.stdout, sys.stderr):
        assert isinstance(stream, io.TextIOWrapper)
        stream.reconfigure(errors="replace")
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
            signal.signal(number, lambda *_: sys.exit(1))
    start = time.monotonic()
    try:
        failed = run(list(STEPS))
    finally:
        stop([step for step in STEPS if step.process is not None and not step.status])
    print(f"\n{'step':14} {'seconds':>7}")
    for step in STEPS:
        print(f"{step.target:14} {step.seconds:7.0f} {step.status}")
    print(f"{'together':14} {time.monotonic() - start:7.0f}")
    if failed is not None:
        lines = failed.log.read_text(errors="replace").splitlines()
        print(f"\nThe last lines of {failed.log.relative_to(ROOT)}:", *lines[-LAST_LINES:], sep="\n")
        sys.exit(1)


if __name__ == "__main__":
    main()
