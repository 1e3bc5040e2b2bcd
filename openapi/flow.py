"""The picture of the pipeline in CONTRIBUTING.md, drawn from the code: its callers, its steps, and its operations."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import attention_service

SERVICE = Path(attention_service.__file__).parent
RUN = "attention_service.pipeline.run"
# The interface of operations, and how a class that implements it names it.
INTERFACE = "attention_service.pipeline.operation"
OPERATION = "Operation["


def flow() -> str:
    """A Mermaid diagram of the callers of the pipeline, its steps, and the operations that the steps call."""
    run = SERVICE / "pipeline" / "run.py"
    steps = {name: module for name in called(run, "run") if (module := module_of(run, name))}
    modules = sorted(SERVICE.rglob("*.py"))
    lines = ["```mermaid", "flowchart TB"]
    lines += [f"  {node(module)} --> {next(iter(steps))}" for module in modules if RUN in imported(module)]
    lines += [f'  {step}["<b>{step}</b><br/>{path(module)}"]' for step, module in steps.items()]
    lines.append("  " + " --> ".join(steps))
    own = [step for step, module in steps.items() if module == run]
    lines.append(f"  {' & '.join(own)} -.- operation{{{{{path(SERVICE / 'pipeline/operation.py')}}}}}")
    operations = [module for module in modules if INTERFACE in imported(module) and defines_operation(module)]
    lines += [f"  operation -.- {node(module)}" for module in operations]
    return "\n".join([*lines, "```"])


def path(module: Path) -> str:
    """The path of a module in the package."""
    return module.relative_to(SERVICE).as_posix()


def node(module: Path) -> str:
    """The node of a module."""
    return f'{path(module).replace("/", "_").removesuffix(".py")}(["{path(module)}"])'


def module_of(run: Path, step: str) -> Path | None:
    """The module that defines a step: `run` itself, or the one of the pipeline with its name. None: it is no step"""
    own = {
        item.name for item in ast.parse(run.read_text(encoding="utf-8")).body if isinstance(item, ast.AsyncFunctionDef)
    }
    module = run if step in own else run.parent / f"{step}.py"
    return module if module.exists() else None


def defines_operation(module: Path) -> bool:
    """True if a class of the module is an operation."""
    classes = [item for item in ast.parse(module.read_text(encoding="utf-8")).body if isinstance(item, ast.ClassDef)]
    return any(ast.unparse(base).startswith(OPERATION) for item in classes for base in item.bases)


@cache
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
