"""The table of generated clients in docs/clients.md is true: each program of it compiles, and answers as it should."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest

from attention_service.settings.keys import new_key
from tests.cases import CASES
from tests.clients.programs import HERE, PROGRAMS
from tests.conftest import app, serving

ROOT = HERE.parents[1]
KEY, HASH = new_key()
PAGE = (ROOT / "docs" / "clients.md").read_text(encoding="utf-8")
ROW = re.compile(
    r"^\| (?P<generator>[^|]+) (?P<version>\d[\d.]*) \| (?P<document>3\.[01]) \| (?P<options>[^|]*) \| [^|]+ \| [^|]+ "
    r"\| \[[^]]+\]\(\.\./tests/clients/(?P<program>[^)]+)\) \|$",
    re.MULTILINE,
)
ROWS = {row["program"]: row.groupdict() for row in ROW.finditer(PAGE)}
DOCUMENTS = {"3.0": "openapi/openapi-3.0.json", "3.1": "openapi/openapi.json"}


# The files in which generators find their options; those of the others are in the Makefile.
CONFIGURED = {"openapi-generator": "generator.yaml", "@hey-api/openapi-ts": "hey-api.config.js"}


def generation(generator: str, program: str) -> str:
    """The file or the command that says how a client is generated."""
    if generator in CONFIGURED:
        return (HERE / program.partition("/")[0] / CONFIGURED[generator]).read_text(encoding="utf-8")
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    (command,) = re.findall(rf"^\t.*\b{generator} .*\\\n.*$", makefile, re.MULTILINE)
    return str(command)


def test_the_table_has_every_program() -> None:
    assert ROWS.keys() == PROGRAMS.keys()
    assert len(re.findall(r"^\|.*\.\./tests/clients/", PAGE, re.MULTILINE)) == len(ROWS)


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_version_document_and_options_of_the_table_are_those_used(row: dict[str, str]) -> None:
    python = (ROOT / "requirements" / "clients.txt").read_text(encoding="utf-8")
    node = json.loads((HERE / "typescript" / "package.json").read_text(encoding="utf-8"))["devDependencies"]
    generator = row["generator"].partition(",")[0]
    package = "openapi-generator-cli" if generator == "openapi-generator" else generator
    assert f"{package}=={row['version']} " in python or node.get(package) == row["version"]
    how = generation(generator, row["program"]).replace(": ", "=")
    assert DOCUMENTS[row["document"]] in how
    for option in re.findall(r"`([^`]+)`", row["options"]):
        assert option.replace(": ", "=") in how, option


@pytest.fixture(scope="module")
def protected() -> Iterator[str]:
    """The address of a service that requires an API key."""
    with serving(app(api_keys=HASH)) as client:
        assert client.post("/attention", json={}).status_code == 401
        yield str(client.base_url).rstrip("/")


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_prints_a_golden_output_and_the_place_of_a_fault(
    program: str, protected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("API_KEY", KEY)
    printed = PROGRAMS[program](HERE / program, protected)
    output, fault = printed.splitlines()
    (case,) = (case for case in CASES if case.name == "animals_two_queries")
    (expected,) = (expected for expected in case.expected if expected.name == "output")
    expected.compare({"output": json.loads(output)})
    assert fault == "shape_mismatch /key"
