"""Every command and program in the pages about clients runs unmodified, in the order of the page."""

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

from benchmarks.serving import free_port
from tests.attack.server import within
from tests.clients.programs import ANNOTATIONS, JAR
from tests.clients.test_page import program
from tests.helpers.documents import ADDRESS, BLOCKS, ROOT, Block

PAGES = ("docs/clients.md", "docs/inference-protocol.md")
CLIENT_BLOCKS = [block for block in BLOCKS if block.page in PAGES]
# The port of gRPC in the pages.
GRPC_PORT = "8001"
NODE = ROOT / "tests" / "clients" / "typescript" / "node_modules"
BIN = Path(sys.executable).parent
# Replaces commands that install or start: packages are installed from locks, the service is running.
INSTALLED = "set -e\npip() { :; }\nnpm() { :; }\nattention-service() { :; }\n"
# Runs in a separate process, as tritonclient and kserve have messages with the same names.
EXECUTED = """import sys
from tests.helpers.documents import Block
shown = Block("", 0, "python", sys.stdin.read()).execute()
assert shown, "no value to compare"
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


class Workspace:
    """A folder in which the blocks of a page run in turn, with a running service."""

    def __init__(self, folder: Path, port: int, grpc_port: int) -> None:
        self.folder = folder
        self._ports = {ADDRESS: f"127.0.0.1:{port}", f"127.0.0.1:{GRPC_PORT}": f"127.0.0.1:{grpc_port}"}
        for name, target in {"tests": ROOT / "tests", "openapi": ROOT / "openapi", "node_modules": NODE}.items():
            (folder / name).symlink_to(target)
        (folder / "package.json").write_text('{"type": "module"}')

    def with_ports(self, text: str) -> str:
        """The text with the addresses of the service of this test."""
        for address, found in self._ports.items():
            text = text.replace(address, found)
        return text

    def write(self, name: str, text: str) -> Path:
        path = self.folder / name
        path.write_text(self.with_ports(text), encoding="utf-8")
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
        answer = self.run("bash", self.write("snippet.sh", INSTALLED + text))
        if text.startswith("curl"):
            assert '"output' in answer, answer

    def python(self, text: str) -> None:
        self.run(sys.executable, "-c", EXECUTED, stdin=self.with_ports(text))

    def py(self, text: str) -> None:
        assert self.run(sys.executable, self.write("generated.py", text))

    def js(self, text: str) -> None:
        said = re.findall(r"console\.log\(.*\); // (.*)", text)
        printed = self.run("node", self.write("snippet.mjs", text))
        assert re.sub(r"\s", "", printed) == re.sub(r"\s", "", "".join(said))

    def html(self, text: str) -> None:
        """The script of the page runs; tests/clients/test_page.py tries its errors."""
        assert self.run("node", self.write("page.mjs", program(text, key=""))).startswith("[[1,0],[")

    def r(self, text: str) -> None:
        printed = self.run("Rscript", self.write("snippet.R", text)).splitlines()
        assert printed[1].split() == ["[1,]", "1.0000000", "0.0000000"]  # hidden by the bias

    def ts(self, text: str) -> None:
        options = shlex.split("--strict --module nodenext --target es2022 --types node --skipLibCheck")
        self.run(NODE / ".bin" / "tsc", *options, self.write("snippet.ts", text))
        assert self.run("node", "snippet.js")

    def java(self, text: str) -> None:
        sources = sorted((self.folder / "java" / "src" / "main").rglob("*.java"))
        path = f"classes:{JAR}:{ANNOTATIONS}"
        self.run("javac", "-nowarn", "-d", "classes", "-cp", path, *sources, self.write("Snippet.java", JAVA % text))
        assert self.run("java", "-cp", path, "Snippet")


@pytest.fixture(scope="module")
def ports() -> Iterator[tuple[int, int]]:
    """The HTTP and gRPC ports of a service started by the command of the page."""
    (started,) = (block.text for block in CLIENT_BLOCKS if "attention-service serve" in block.text)
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
def workspaces(ports: tuple[int, int], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Workspace]:
    return {page: Workspace(tmp_path_factory.mktemp("page"), *ports) for page in PAGES}


@pytest.mark.parametrize("block", CLIENT_BLOCKS, ids=str)
def test_every_block_runs(block: Block, workspaces: dict[str, Workspace]) -> None:
    getattr(workspaces[block.page], block.language)(block.text)


def test_the_pages_show_all_clients() -> None:
    text = "\n".join(block.text for block in CLIENT_BLOCKS)
    for client in ("curl ", "httpx", "fetch(", "openapi-python-client", "openapi-typescript", "openapi-generator-cli",
                   "tritonclient.http", "tritonclient.grpc", "kserve", "jsonlite"):  # fmt: skip
        assert client in text, client
