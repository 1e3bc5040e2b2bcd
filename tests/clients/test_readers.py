"""The table of readers and writers in docs/clients.md: their versions are those that the tests ran."""

from __future__ import annotations

import json
import re
from functools import cache

import pytest

from tests.clients.programs import HERE, run

ROOT = HERE.parents[1]
PAGE = (ROOT / "docs" / "clients.md").read_text(encoding="utf-8")
SECTION = PAGE.partition("\n## Readers and writers\n")[2].partition("\n## ")[0]
ROWS = dict(re.findall(r"^\| ([\w-]+) (\d[\d.]*) \|", SECTION, re.MULTILINE))


@cache
def installed() -> dict[str, str]:
    """Versions by names: of the locks of pip and npm, and of what Debian's packages install."""
    locks = ((ROOT / "requirements" / name).read_text(encoding="utf-8") for name in ("clients.txt", "mlserver.txt"))
    python = dict(re.findall(r"^([\w-]+)==(\S+)", "\n".join(locks), re.MULTILINE))
    node = json.loads((HERE / "typescript" / "package.json").read_text(encoding="utf-8"))["devDependencies"]
    return python | node | {
        "JDK": run("java", "--version").split()[1].partition(".")[0],
        "jsonlite": run("Rscript", "-e", "cat(as.character(packageVersion('jsonlite')))"),
        "librsvg": run("rsvg-convert", "--version").split()[-1],
    }  # fmt: skip


def test_the_table_has_every_reader() -> None:
    assert len(ROWS) == len(re.findall(r"^\| \S", SECTION, re.MULTILINE)) - 1
    assert ROWS.keys() >= {"JDK", "npyjs", "fflate", "unzipper", "stream-unzip", "jsonlite", "mlserver", "librsvg"}


@pytest.mark.parametrize("name", ROWS)
def test_versions_are_those_that_were_tried(name: str) -> None:
    assert installed()[name] == ROWS[name]
