"""Run the steps that a change must pass, each a target of the Makefile, on all processors.

A step is skipped if its inputs are those of its last success on this machine; ALL=1 skips none. The first failure ends
all steps, and its log is printed last. Logs of all steps are in build/ci.
"""

from __future__ import annotations

import hashlib
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOGS = ROOT / "build" / "ci"
PASSED = Path(os.environ.get("ENVIRONMENTS") or Path.home() / ".cache" / "attention-service") / "passed"
LAST_LINES = 300  # of the log of a failed step
CLOSING = re.compile(r"^=+ (.*\d+ (?:passed|failed).*?) =+$|^(\d+ (?:passed|failed).* in [\d.]+s.*)$", re.MULTILINE)

# What all tests read: the product, what tests share, and what says how both are installed and run.
CODE = ".ci Makefile openapi pyproject.toml requirements service :(glob)tests/*.py tests/cases tests/helpers"


@dataclass
class Step:
    """A target of the Makefile.

    inputs: paths that git knows, on which its outcome depends; none if it always runs
    alone: True if it measures time or memory, or needs all processors: nothing runs beside it
    """

    target: str
    inputs: str = ""
    alone: bool = False
    process: subprocess.Popen[bytes] | None = None
    seconds: float = 0.0
    status: str = ""
    digest: str = field(default="", repr=False)

    @property
    def log(self) -> Path:
        """The output of the step."""
        return LOGS / f"{self.target}.log"

    def is_unchanged(self) -> bool:
        """True if the step passed with the same inputs before, on this machine."""
        if not self.inputs:
            return False
        listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *self.inputs.split()]
        names = sorted({*subprocess.check_output(listed, cwd=ROOT).decode().split("\0")} - {""})
        found = hashlib.sha256(sys.version.encode())
        for path in (ROOT / name for name in names):
            found.update(f"\0{path.relative_to(ROOT)}\0".encode() + (path.read_bytes() if path.is_file() else b""))
        self.digest = found.hexdigest()
        record = PASSED / self.target
        return record.exists() and record.read_text() == self.digest

    def start(self) -> None:
        """Start the target in a process group of its own."""
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
        if self.status == "passed" and self.inputs:
            PASSED.mkdir(parents=True, exist_ok=True)
            (PASSED / self.target).write_text(self.digest)

    def kill(self) -> None:
        """End the target and the processes that it started."""
        assert self.process is not None
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.seconds += time.monotonic()
        self.status = "ended"


# The quickest first, so that a plain error ends the run soon.
STEPS = (
    Step("install-all", alone=True),
    Step("test", alone=True),
    Step("docs", "docs mkdocs.yml requirements/docs.txt *.md"),
    Step("deploy-check", f"{CODE} tests/deploy deploy Dockerfile docker-compose.yml docs/deployment.md"),
    Step("test-servers", f"{CODE} tests/attack tests/servers docs/deployment.md"),
    Step("test-torch", CODE),
    Step("test-pythons", f"{CODE} tests/framing tests/memory benchmarks deploy"),
    Step("test-page", f"{CODE} tests/page"),
    Step("test-clients", f"{CODE} tests/clients docs/clients.md docs/inference-protocol.md"),
    Step("test-ray", f"{CODE} tests/ray deploy/kuberay"),
    Step(
        "test-peers",
        f"{CODE} tests/peers docs/models.md docs/conformance.md docs/coming-from.md docs/tutorial-model.md",
    ),
    Step("test-slow", f"{CODE} tests/framing tests/memory benchmarks deploy", alone=True),
    Step("test-attack", f"{CODE} tests/attack benchmarks", alone=True),
    Step("image-test", f"{CODE} tests/image deploy Dockerfile docker-compose.yml docs/deployment.md", alone=True),
)


def run(steps: list[Step]) -> Step | None:
    """Run the steps, as many at once as there are processors. The first that failed, if any."""
    running: list[Step] = []
    left = list(steps)
    lanes = os.cpu_count() or 1
    while left or running:
        while left and len(running) < lanes and not (running and (left[0].alone or running[0].alone)):
            step = left.pop(0)
            if not os.environ.get("ALL") and step.is_unchanged():
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
                for other in running:
                    other.kill()
                return step
    return None


def main() -> None:
    """Run all steps, and print how long each took."""
    LOGS.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    start = time.monotonic()
    try:
        failed = run(list(STEPS))
    finally:
        for step in STEPS:
            if step.process is not None and step.process.poll() is None:
                step.kill()
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
