"""The notebooks of docs/notebooks and the page about them: valid, executed, and with the outputs that they show."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.documents import BLOCKS, ROOT

PAGE = ROOT / "docs" / "notebooks.md"
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
# What nbformat 4.5 requires of each kind of cell, and allows.
REQUIRED: dict[str, set[str]] = {
    "markdown": {"cell_type", "id", "metadata", "source"},
    "code": {"cell_type", "id", "metadata", "source", "outputs", "execution_count"},
}


def read(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text(encoding="utf-8")))


def text_of(lines: str | list[str]) -> str:
    return lines if isinstance(lines, str) else "".join(lines)


def run(source: str, names: dict[str, Any]) -> Any:
    """Run a cell, as a notebook does. Returns the value of a last expression, else None."""
    *before, last = ast.parse(source).body
    if not isinstance(last, ast.Expr):
        exec(source, names)
        return None
    exec(compile(ast.Module(before, []), "cell", "exec"), names)
    return eval(compile(ast.Expression(last.value), "cell", "eval"), names)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_has_the_form_of_nbformat(path: Path) -> None:
    notebook = read(path)
    assert notebook.keys() == {"cells", "metadata", "nbformat", "nbformat_minor"}
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert notebook["metadata"]["kernelspec"]["name"] == "python3"
    identifiers = [cell["id"] for cell in notebook["cells"]]
    assert all(re.fullmatch(r"[a-zA-Z0-9_-]{1,64}", identifier) for identifier in identifiers)
    assert len(set(identifiers)) == len(identifiers)
    for cell in notebook["cells"]:
        assert cell.keys() == REQUIRED[cell["cell_type"]], cell["id"]
        assert isinstance(cell["metadata"], dict)
        assert all(isinstance(line, str) for line in cell["source"])
        for output in cell.get("outputs", []):
            assert output.keys() == {"data", "execution_count", "metadata", "output_type"}
            assert output["output_type"] == "execute_result"
            assert output["execution_count"] == cell["execution_count"]
    counts = [cell["execution_count"] for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert counts == list(range(1, len(counts) + 1))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_runs_and_shows_what_its_cells_return(path: Path) -> None:
    """All cells in one namespace, from the first to the last."""
    names: dict[str, Any] = {"__name__": "__main__"}
    for cell in read(path)["cells"]:
        if cell["cell_type"] != "code":
            continue
        value = run(text_of(cell["source"]), names)
        shown = [{kind: text_of(text) for kind, text in output["data"].items()} for output in cell["outputs"]]
        assert shown == ([] if value is None else [shown_by(value)]), cell["id"]


def shown_by(value: Any) -> dict[str, str]:
    """What a notebook shows of a value, by media type."""
    found = {"text/plain": repr(value)}
    return found | {"text/html": value._repr_html_()} if hasattr(value, "_repr_html_") else found


def test_the_page_links_every_notebook() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert NOTEBOOKS
    assert [path.name for path in NOTEBOOKS if f"](notebooks/{path.name})" not in page] == []


def test_the_page_begins_with_an_installation_and_a_program() -> None:
    install, program = [block for block in BLOCKS if block.page == "docs/notebooks.md"][:2]
    assert (install.language, install.text.count("\n")) == ("sh", 1)
    assert install.text.startswith("pip install ")
    assert program.language == "python"
    lines = [line for line in program.text.splitlines() if line]
    assert len(lines) == 4
    result = run(program.text, {})
    assert result.heatmap().svg == (ROOT / "docs" / "images" / "notebook.svg").read_text(encoding="utf-8")
    assert result.heatmap().svg in shown_by(result)["text/html"]


@pytest.mark.torch
def test_the_example_with_torch_and_jax_on_docs_notebooks_md() -> None:
    """Of notebooks.md."""
    (block,) = (block for block in BLOCKS if block.page == "docs/notebooks.md" and "import torch" in block.text)
    shown = block.execute()
    assert len(shown) > 2
    for expression, value, said in shown:
        assert value == said, expression
