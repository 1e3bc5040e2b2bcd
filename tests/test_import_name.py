"""The import name is `attention_service`: `service` is a name that users have modules of their own for."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import attention_service

ROOT = Path(__file__).resolve().parent.parent
SOURCES = (
    "service",
    "tests",
    "openapi",
    "docs",
    "benchmarks",
    "deploy",
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
)
TEXT = {".py", ".pyi", ".md", ".ipynb", ".toml", ".yaml", ".yml", ".sh", ".txt", ""}
OLD_NAME = re.compile(r"\b(from service(\.\w+)* import|import service\b|-m service\b)")

# A repository of a user whose own modules are called `service`.
SCRIPT = """
import numpy as np
import service
from attention_service import assert_attention, attend, compare

assert service.OWN == "package"
rows = np.random.default_rng(0).normal(size=(8, 4))
result = attend(rows, rows, rows)
assert compare(result.output, query=rows, key=rows, value=rows).verdict.status == "correct"
assert_attention(result.output, query=rows, key=rows, value=rows)
"""
CAPTURE = """
import torch
from transformers import LlamaConfig, LlamaModel
from attention_service.transformers import capture

sizes = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
with capture() as captured, torch.no_grad():
    LlamaModel(LlamaConfig(**sizes))(torch.arange(5)[None])
assert captured[0].attention_weights.shape == (1, 2, 5, 5)
"""


@pytest.fixture(scope="module", params=["checkout", "wheel"])
def installation(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder that has the package: empty for the environment of the checkout, or an installed wheel."""
    if request.param == "checkout":
        return ""
    wheels, installed = tmp_path_factory.mktemp("wheels"), tmp_path_factory.mktemp("installed")
    build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(wheels)]
    subprocess.run(build, cwd=ROOT, capture_output=True, check=True)
    (wheel,) = wheels.glob("*.whl")
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(installed)]
    subprocess.run([*install, str(wheel)], capture_output=True, check=True)
    assert {entry.name.partition("-")[0] for entry in installed.iterdir()} == {"attention_service", "bin"}
    return str(installed)


@pytest.mark.slow
@pytest.mark.parametrize("script", [SCRIPT, pytest.param(SCRIPT + CAPTURE, marks=pytest.mark.torch)])
def test_a_users_modules_called_service_do_not_collide(script: str, installation: str, tmp_path: Path) -> None:
    """Neither in a script nor in a test suite that lies beside `service.py` and `service/`."""
    (tmp_path / "service").mkdir()
    (tmp_path / "service" / "__init__.py").write_text("OWN = 'package'\n")
    (tmp_path / "service.py").write_text("OWN = 'module'\n")
    (tmp_path / "script.py").write_text(script)
    (tmp_path / "test_kernel.py").write_text("def test_kernel():" + script.replace("\n", "\n    "))
    (tmp_path / "conftest.py").write_text("")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("COVERAGE", "PYTEST"))}
    environment["PYTHONPATH"] = installation
    for command in (["script.py"], ["-m", "pytest", "-q", "-p", "no:cacheprovider"]):
        done = subprocess.run(
            [sys.executable, *command], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr


def test_no_source_or_document_uses_the_old_name() -> None:
    """From the root `import service` would even succeed: the source root is an empty namespace package there."""
    uses = [
        f"{file.relative_to(ROOT)}: {match[0]}"
        for source in SOURCES
        for file in ([ROOT / source] if (ROOT / source).is_file() else (ROOT / source).rglob("*"))
        if file.is_file() and file.suffix in TEXT and "node_modules" not in file.parts and ".venv" not in file.parts
        if file != Path(__file__).resolve()
        for match in OLD_NAME.finditer(file.read_text(encoding="utf-8", errors="replace"))
    ]
    assert uses == []


def test_completion_lists_the_public_names() -> None:
    assert dir(attention_service) == attention_service.__all__


def test_attend_loads_neither_server_nor_pictures_nor_comparisons() -> None:
    code = "import sys; from attention_service import attend; attend(input=[[1.0]]); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = {name.partition(".")[0] for name in done.stdout.split()} | set(done.stdout.split())
    others = {"fastapi", "starlette", "uvicorn", "anyio", "PIL", "pydantic_settings", "simdjson", "orjson"}
    others |= {"attention_service.comparison"}
    assert not others & loaded
