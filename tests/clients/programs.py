"""Compiles and runs the example programs of the generated clients, one function for each language."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib import resources
from pathlib import Path

HERE = Path(__file__).resolve().parent
BUILT = HERE.parents[1] / "build" / "clients"
# What compilers made of libraries, kept when clients are generated again.
CACHE = HERE.parents[1] / "build" / "clients-cache"
NODE = HERE / "typescript" / "node_modules"
JAR = resources.files("openapi_generator_cli") / "openapi-generator.jar"
ANNOTATIONS = "/usr/share/java/geronimo-annotation-1.3-spec.jar"
# Json.NET 13: NSwag brings it, Debian has version 6.
NEWTONSOFT = NODE / "nswag" / "bin" / "binaries" / "Win" / "Newtonsoft.Json.dll"
ASSEMBLIES = ("System.ComponentModel.DataAnnotations", "System.Net.Http", "System.Runtime.Serialization", "System.Web")


def run(*command: str | Path, folder: Path = HERE, stdin: str = "", **environment: str) -> str:
    """What a command prints. Errors: AssertionError if it fails."""
    done = subprocess.run(
        list(map(str, command)),
        cwd=folder,
        env=os.environ | environment,
        input=stdin,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def python(program: Path, address: str) -> str:
    return run(sys.executable, program, address, PYTHONPATH=str(BUILT / "python"))


def python_urllib3(program: Path, address: str) -> str:
    return run(sys.executable, program, address, PYTHONPATH=str(BUILT / "python-urllib3"))


def typescript(program: Path, address: str, *options: str) -> str:
    """Runs a program beside the client that is named like it."""
    folder = BUILT / program.stem
    shutil.copy(program, folder / "example.ts")
    (folder / "package.json").write_text('{"type": "module"}')
    if not (folder / "node_modules").exists():
        (folder / "node_modules").symlink_to(NODE)
    common = ("--strict", "--module", "nodenext", "--target", "es2022", "--types", "node", "--skipLibCheck")
    run(NODE / ".bin" / "tsc", *common, *options, "example.ts", folder=folder)
    return run("node", "example.js", address, folder=folder)


def stricter_typescript(program: Path, address: str) -> str:
    return typescript(program, address, "--noUncheckedIndexedAccess")


def java(program: Path, address: str) -> str:
    path, sources = f"classes:{JAR}:{ANNOTATIONS}", sorted((BUILT / "java" / "src" / "main").rglob("*.java"))
    run("javac", "-nowarn", "-d", "classes", "-cp", path, *sources, program, folder=BUILT / "java")
    return run("java", "-cp", path, "Example", address, folder=BUILT / "java")


def go(program: Path, address: str) -> str:
    """The client is a module without dependencies, so that nothing is downloaded."""
    folder = BUILT / "go" / "example"
    folder.mkdir(exist_ok=True)
    shutil.copy(program, folder)
    alone = {"GOPROXY": "off", "GOTOOLCHAIN": "local", "GOCACHE": str(CACHE / "go")}
    run(Path(sys.executable).parent / "go", "build", "./...", folder=BUILT / "go", **alone)
    run(Path(sys.executable).parent / "go", "build", "-o", "example", ".", folder=folder, **alone)
    return run(folder / "example", address)


def rust(program: Path, address: str) -> str:
    """The crates are those that Debian ships."""
    folder = BUILT / "rust" / "example"
    shutil.copytree(program.parents[1], folder, dirs_exist_ok=True)
    run("cargo", "build", "--offline", "--target-dir", CACHE / "cargo", folder=folder)
    return run(CACHE / "cargo" / "debug" / "example", address)


def csharp(program: Path, address: str) -> str:
    sources = sorted((BUILT / "csharp" / "src" / "Attention").rglob("*.cs"))
    references = [f"-r:{name}" for name in (NEWTONSOFT, *ASSEMBLIES)]
    run("mcs", "-langversion:latest", "-out:Example.exe", *references, *sources, program, folder=BUILT / "csharp")
    shutil.copy(NEWTONSOFT, BUILT / "csharp")
    return run("mono", "Example.exe", address, folder=BUILT / "csharp")


PROGRAMS: dict[str, Callable[[Path, str], str]] = {
    "python/example.py": python,
    "python-urllib3/example.py": python_urllib3,
    "typescript/openapi-typescript.ts": stricter_typescript,
    "typescript/hey-api.ts": stricter_typescript,
    "typescript/typescript-fetch.ts": typescript,
    "java/Example.java": java,
    "go/example.go": go,
    "csharp/Example.cs": csharp,
    "rust/src/main.rs": rust,
}
