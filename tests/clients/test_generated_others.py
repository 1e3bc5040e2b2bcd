"""The generated clients in TypeScript and Java: their examples check the responses of the service."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import httpx
import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
BUILT = ROOT / "build" / "clients"
JAR = next(Path(sys.prefix).glob("lib/python*/site-packages/openapi_generator_cli/openapi-generator.jar"), None)
ANNOTATIONS = "/usr/share/java/geronimo-annotation-1.3-spec.jar"


def run(*command: str | Path) -> str:
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_typescript_example_runs(client: httpx.Client) -> None:
    node = HERE / "typescript" / "node_modules"
    folder = BUILT / "typescript"
    (folder / "example.ts").write_text((HERE / "typescript" / "example.ts").read_text())
    (folder / "package.json").write_text('{"type": "module"}')
    if not (folder / "node_modules").exists():
        (folder / "node_modules").symlink_to(node)
    strict: tuple[str | Path, ...] = (
        "--strict",
        "--noUncheckedIndexedAccess",
        "--module",
        "nodenext",
        "--target",
        "es2022",
    )
    run(node / ".bin" / "tsc", *strict, "--types", "node", "--typeRoots", node / "@types", folder / "example.ts")
    assert "all as expected" in run("node", folder / "example.js", str(client.base_url).rstrip("/"))


def test_the_java_example_runs(client: httpx.Client) -> None:
    if JAR is None:
        pytest.fail("no openapi-generator.jar")
    path = f"{BUILT / 'java' / 'classes'}:{JAR}:{ANNOTATIONS}"
    run("javac", "-d", BUILT / "java" / "classes", "-cp", path, HERE / "java" / "Example.java")
    assert "all as expected" in run("java", "-cp", path, "Example", str(client.base_url).rstrip("/"))
