"""The picture of the pipeline in CONTRIBUTING.md, drawn from the code: who calls it, its steps, and what each uses."""

from __future__ import annotations

import ast
from pathlib import Path

import attention_service

SERVICE = Path(attention_service.__file__).parent
RUN = "attention_service.pipeline.run"
# Packages that a step works with; all others are details of it.
PACKAGES = ("codecs", "schemas", "attention", "backends")


def flow() -> str:
    """A Mermaid diagram of the callers of the pipeline and its steps."""
    steps = [
        name for name in called(SERVICE / "pipeline" / "run.py", "run") if (SERVICE / f"pipeline/{name}.py").exists()
    ]
    lines = ["```mermaid", "flowchart TB"]
    for module in sorted(SERVICE.rglob("*.py")):
        if RUN in imported(module):
            name = module.relative_to(SERVICE).as_posix()
            lines.append(f'  {name.replace("/", "_").removesuffix(".py")}(["{name}"]) --> {steps[0]}')
    lines += [f'  {step}["<b>{step}</b><br/>pipeline/{step}.py"]' for step in steps]
    lines.append("  " + " --> ".join(steps))
    for step in steps:
        used = {name.split(".")[1] for name in imported(SERVICE / "pipeline" / f"{step}.py") if name.count(".") > 0}
        lines += [f"  {step} -.- {package}[({package}/)]" for package in PACKAGES if package in used]
    return "\n".join([*lines, "```"])


def imported(module: Path) -> set[str]:
    """The modules of the service that a module imports."""
    tree = ast.parse(module.read_text(encoding="utf-8"))
    found = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    return {name for name in found if name.startswith("attention_service.")}


def called(module: Path, function: str) -> list[str]:
    """The functions that a function of a module calls, in order."""
    tree = ast.parse(module.read_text(encoding="utf-8"))
    (body,) = [node for node in tree.body if isinstance(node, ast.AsyncFunctionDef) and node.name == function]
    calls = [node for node in ast.walk(body) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    calls.sort(key=lambda node: (node.lineno, node.col_offset))
    return [node.func.id for node in calls if isinstance(node.func, ast.Name)]
