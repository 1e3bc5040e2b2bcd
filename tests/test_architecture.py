"""The rules that keep the code readable: sizes of files and functions, types, private attributes."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import TypeGuard

import pytest

ROOT = Path(__file__).resolve().parent.parent
MODULES = sorted((ROOT / "service" / "attention_service").rglob("*.py"))
MAX_FILE = 400
MAX_FUNCTION = 48
MAX_TOP = 10
# Written by openapi/generate.py: parameters and docstrings are as long as the schema is.
GENERATED = {"service/attention_service/library/functions.py"}
# A private attribute of torch without a public equivalent: the kernel that scaled_dot_product_attention will run.
PRIVATE = {"torch._fused_sdp_choice"}


def name_of(module: Path) -> str:
    return str(module.relative_to(ROOT))


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


@pytest.fixture(scope="module")
def trees() -> dict[str, ast.Module]:
    return {name_of(module): ast.parse(module.read_text(encoding="utf-8")) for module in MODULES}


def test_files_are_short() -> None:
    lines = {name_of(module): len(module.read_text(encoding="utf-8").splitlines()) for module in MODULES}
    assert {name: count for name, count in lines.items() if count > MAX_FILE and name not in GENERATED} == {}


def test_functions_are_short(trees: dict[str, ast.Module]) -> None:
    long = [
        f"{name}:{function.name}"
        for name, tree in trees.items()
        for function in functions(tree)
        if name not in GENERATED and (function.end_lineno or 0) - function.lineno + 1 > MAX_FUNCTION
    ]
    assert long == []
    assert trees.keys() >= GENERATED


def test_the_package_has_few_modules_at_the_top() -> None:
    top = [
        module.name
        for module in (ROOT / "service" / "attention_service").glob("*.py")
        if not module.name.startswith("__")
    ]
    assert len(top) <= MAX_TOP


def test_every_parameter_and_result_has_a_type(trees: dict[str, ast.Module]) -> None:
    """mypy's strict mode checks functions; lambdas and the methods of protocols cannot have annotations."""
    untyped = [
        f"{name}:{function.name}"
        for name, tree in trees.items()
        for function in functions(tree)
        if function.returns is None
    ]
    assert untyped == []


def test_backends_do_not_use_unchecked_casts(trees: dict[str, ast.Module]) -> None:
    found = [
        name
        for name, tree in trees.items()
        if name.startswith("service/attention_service/backends/")
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "cast"
    ]
    assert found == []


def test_private_attributes_of_dependencies_are_known(trees: dict[str, ast.Module]) -> None:
    """An attribute counts as ours if a class of the same module has it."""
    found = set()
    for name, tree in trees.items():
        own = {node.attr for node in ast.walk(tree) if is_private(node) and base_of(node) in ("self", "cls")}
        for node in ast.walk(tree):
            if is_private(node) and base_of(node) not in ("self", "cls") and node.attr not in own:
                found.add((name.rpartition("/")[0], f"{base_of(node)}.{node.attr}"))
    # A named tuple's methods are public in spite of their names.
    public = {"_replace", "_asdict", "_fields", "_field_defaults"}
    private = {(place, text) for place, text in found if text.rpartition(".")[2] not in public}
    assert private == {("service/attention_service/backends/torch", text) for text in PRIVATE}


def is_private(node: ast.AST) -> TypeGuard[ast.Attribute]:
    return isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__")


def base_of(node: ast.AST) -> str:
    return node.value.id if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) else "…"
