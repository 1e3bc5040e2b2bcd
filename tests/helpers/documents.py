"""Reads the README and the docs: blocks of code, the output that they show, links, headings."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
ADDRESS = "127.0.0.1:8000"
BLOCK = re.compile(r"^```(\w*)(?: title=\"([^\"\n]*)\")?\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A fenced block of code, its page, and its first line. title: the name of the file that it shows, if any"""

    page: str
    line: int
    language: str
    text: str
    title: str | None = None

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    def run(self, address: str = ADDRESS, folder: Path = ROOT) -> str:
        """The output of the shell commands, run in a folder, with the service at this address.

        Errors: AssertionError if they fail.
        """
        programs = str(Path(sys.executable).parent)
        own = self.text.replace(ADDRESS, address).replace(".venv/bin/", f"{programs}/")
        environment = os.environ | {"PATH": f"{programs}:{os.environ['PATH']}"}
        done = subprocess.run(
            ["bash", "-euc", own], cwd=folder, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def execute(self, address: str = ADDRESS) -> list[tuple[str, Any, Any]]:
        """Run the Python code; returns (code, value, comment) of each expression with a comment behind it.

        The comment shows the value, or for an array its shape.
        """
        lines, found = self.text.splitlines(), []
        names: dict[str, Any] = {}
        for statement in ast.parse(self.text).body:
            source = "\n".join(lines[statement.lineno - 1 : statement.end_lineno]).replace(ADDRESS, address)
            code, _, comment = source.partition("  # ")
            if isinstance(statement, ast.Expr) and comment:
                found.append((code, plain(eval(code, names)), ast.literal_eval(comment)))
            else:
                exec(source, names)
        return found


def plain(value: Any) -> Any:
    """A value as a comment shows it: arrays become their shapes."""
    if isinstance(value, tuple):
        return tuple(map(plain, value))
    return value.shape if isinstance(value, np.ndarray) else value


def blocks(page: Path) -> list[Block]:
    """All blocks of a page."""
    text = page.read_text(encoding="utf-8")
    name = str(page.relative_to(ROOT))
    found = [
        Block(name, text.count("\n", 0, match.start()) + 1, match[1], match[3], match[2])
        for match in BLOCK.finditer(text)
    ]
    assert 2 * len(found) == len(re.findall(r"^\s*```", text, re.MULTILINE)), (
        f"{name}: a block that BLOCK does not match"
    )
    return found


BLOCKS = [block for page in PAGES for block in blocks(page)]


def links(page: Path) -> Iterator[str]:
    """The targets of all links and images of a page, in Markdown or HTML, outside of code."""
    text = re.sub(r"`[^`\n]*`", "", BLOCK.sub("", page.read_text(encoding="utf-8")))
    yield from re.findall(r"\]\(([^)\s]*)[^)]*\)", text)
    yield from re.findall(r"^\[[^\]]+\]: +(\S+)", text, re.MULTILINE)
    yield from re.findall(r"(?:src|href)=\"([^\"]*)\"", text)


def anchors(page: Path) -> set[str]:
    """The anchors of all headings of a page."""
    headings = re.findall(r"^#+ +(.+)$", BLOCK.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}
