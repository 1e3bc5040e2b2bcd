"""Every command and every program in the pages about clients runs, as it stands there, in the order of the page."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.attack.server import free_port, within
from tests.clients.test_generated_others import ANNOTATIONS, JAR
from tests.helpers.documents import ADDRESS, BLOCKS, ROOT, Block

PAGES = ("docs/clients.md", "docs/inference-protocol.md")
OF_PAGES = [block for block in BLOCKS if block.page in PAGES]
# Where the pages have gRPC.
GRPC_PORT = "8001"
NODE = ROOT / "tests" / "clients" / "typescript" / "node_modules"
BIN = Path(sys.executable).parent
# What the pages install has been installed from locks, and what they start is running.
INSTALLED = "set -e\npip() { :; }\nnpm() { :; }\nattention-service() { :; }\n"
# In a process of its own, as tritonclient and kserve have messages of the same names.
EXECUTED = """import sys
from tests.helpers.documents import Block
shown = Block("", 0, "python", sys.stdin.read()).execute()
assert shown, "nothing that could be compared"
for expression, value, said in shown:
    assert value == said, f"{expression} is {value}"
"""
JAVA = """import attention.ApiClient;
import attention.api.AttentionApi;
import attention.model.AttentionRequest;
import java.util.List;

public final class Snippet {
    public static void main(String[] arguments) throws Exception {
%s
    }
}
"""


class Place:
    """A folder in which the blocks of a page run one after the other, beside a service."""

    def __init__(self, folder: Path, port: int, grpc_port: int) -> None:
        self.folder = folder
        self._ports = {ADDRESS: f"127.0.0.1:{port}", f"127.0.0.1:{GRPC_PORT}": f"127.0.0.1:{grpc_port}"}
        for name, target in {"tests": ROOT / "tests", "openapi": ROOT / "openapi", "node_modules": NODE}.items():
            (folder / name).symlink_to(target)
        (folder / "package.json").write_text('{"type": "module"}')

    def own(self, text: str) -> str:
        """The same for the service of this test."""
        for address, found in self._ports.items():
            text = text.replace(address, found)
        return text

    def written(self, name: str, text: str) -> Path:
        path = self.folder / name
        path.write_text(self.own(text), encoding="utf-8")
        return path

    def run(self, *command: str | Path, stdin: str = "") -> str:
        environment = os.environ | {"PATH": f"{BIN}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            list(map(str, command)), cwd=self.folder, env=environment, input=stdin, capture_output=True, text=True,
            check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def sh(self, text: str) -> None:
        answer = self.run("bash", self.written("snippet.sh", INSTALLED + text))
        if text.startswith("curl"):
            assert '"output' in answer, answer

    def python(self, text: str) -> None:
        self.run(sys.executable, "-c", EXECUTED, stdin=self.own(text))

    def py(self, text: str) -> None:
        assert self.run(sys.executable, self.written("generated.py", text))

    def js(self, text: str) -> None:
        said = re.findall(r"console\.log\(.*\); // (.*)", text)
        printed = self.run("node", self.written("snippet.mjs", text))
        assert re.sub(r"\s", "", printed) == re.sub(r"\s", "", "".join(said))

    def ts(self, text: str) -> None:
        options = shlex.split("--strict --module nodenext --target es2022 --types node --skipLibCheck")
        self.run(NODE / ".bin" / "tsc", *options, self.written("snippet.ts", text))
        assert self.run("node", "snippet.js")

    def java(self, text: str) -> None:
        sources = sorted((self.folder / "java" / "src" / "main").rglob("*.java"))
        path = f"classes:{JAR}:{ANNOTATIONS}"
        self.run("javac", "-nowarn", "-d", "classes", "-cp", path, *sources, self.written("Snippet.java", JAVA % text))
        assert self.run("java", "-cp", path, "Snippet")


@pytest.fixture(scope="module")
def ports() -> Iterator[tuple[int, int]]:
    """A service started by the command of the page, on ports of our own."""
    (started,) = (block.text for block in OF_PAGES if "attention-service serve" in block.text)
    port, grpc_port = free_port(), free_port()
    environment = os.environ | {"PATH": f"{BIN}:{os.environ['PATH']}", "ATTENTION_PORT": str(port)}
    serve = started.replace(GRPC_PORT, str(grpc_port)).replace(
        "attention-service serve", "exec attention-service serve"
    )
    with subprocess.Popen(
        ["bash", "-c", f"pip() {{ :; }}\n{serve}"], env=environment, stderr=subprocess.DEVNULL
    ) as process:
        try:
            health = [BIN / "attention-service", "health"]
            assert within(60, lambda: not subprocess.run(health, env=environment, capture_output=True).returncode)
            yield port, grpc_port
        finally:
            process.send_signal(signal.SIGTERM)


@pytest.fixture(scope="module")
def places(ports: tuple[int, int], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Place]:
    return {page: Place(tmp_path_factory.mktemp("page"), *ports) for page in PAGES}


@pytest.mark.parametrize("block", OF_PAGES, ids=str)
def test_a_block_runs(block: Block, places: dict[str, Place]) -> None:
    getattr(places[block.page], block.language)(block.text)


def test_all_clients_are_shown() -> None:
    text = "\n".join(block.text for block in OF_PAGES)
    for client in ("curl ", "httpx", "fetch(", "openapi-python-client", "openapi-typescript", "openapi-generator-cli",
                   "tritonclient.http", "tritonclient.grpc", "kserve"):  # fmt: skip
        assert client in text, client
