"""Results as JUnit XML and as annotations of GitHub's workflows, read by what others expect of them."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from importlib import invalidate_caches
from pathlib import Path
from typing import Any, Final
from xml.etree import ElementTree

import numpy as np
import pytest

from attention_service import compare, compare_call
from attention_service.cli import main
from attention_service.commands.formats import Check, as_github, as_junit, checks_of_report
from tests.helpers.waiting import TIMEOUT

pytestmark = pytest.mark.usefixtures("without_suggestions")
# A message with all that XML and workflow commands read as their own: markup, escapes, colons, commas, line ends.
NASTY: Final = "a<b>&\"'%0A::error::x,y:z\r\n\x00\x1b[31m\ud800\ufffe é 😀"
CHECKS: Final = [
    Check("output", "failure", "wrong, 50% of it", "wrong: a\nsecond line\r\n100%25"),
    Check("logsumexp", "passed"),
    Check("a,b:c", "error", NASTY),
    Check("weights", "skipped", "too weak"),
]
SMALL: Final[dict[str, Any]] = {
    "query": [[0.0], [0.0]],
    "key": [[1.0], [5.0]],
    "value": [[2.0], [4.0]],
    "is_causal": True,
}


def counts(element: ElementTree.Element) -> dict[str, int]:
    return {name: int(element.attrib[name]) for name in ("tests", "failures", "errors", "skipped")}


def test_junit_has_the_attributes_that_readers_ask_for() -> None:
    """Those of pytest's own files, and of https://github.com/testmoapp/junitxml, which describes what is common."""
    root = ElementTree.fromstring(as_junit("compare r.npz a.npy", CHECKS))
    (suite,) = root
    assert (root.tag, suite.tag, suite.attrib["name"]) == ("testsuites", "testsuite", "compare r.npz a.npy")
    assert counts(root) == counts(suite) == {"tests": 4, "failures": 1, "errors": 1, "skipped": 1}
    assert all({"name", "classname", "time"} <= case.attrib.keys() for case in suite)
    assert [(case.tag, case.attrib["name"], [inner.tag for inner in case]) for case in suite] == [
        ("testcase", "output", ["failure"]),
        ("testcase", "logsumexp", []),
        ("testcase", "a,b:c", ["error"]),
        ("testcase", "weights", ["skipped"]),
    ]
    failure = suite[0][0]
    assert failure.attrib["message"] == "wrong, 50% of it"
    assert "second line" in (failure.text or "")


def test_junit_is_xml_whatever_the_messages_are() -> None:
    text = as_junit("suite", CHECKS)
    assert text.isascii()
    found = ElementTree.fromstring(text)[0][2][0].attrib["message"]
    # XML 1.0 has no way to write these four, and the replacement character stands for each.
    assert found == NASTY.translate(dict.fromkeys((0x00, 0x1B, 0xD800, 0xFFFE), "\ufffd"))


def test_junit_of_pytest_has_the_same_form(file_of_pytest: Path) -> None:
    """Each attribute and element of ours is one that pytest writes in the same place."""
    own = ElementTree.fromstring(as_junit("suite", [check for check in CHECKS if check.outcome != "error"]))
    other = ElementTree.parse(file_of_pytest).getroot()

    def form(root: ElementTree.Element) -> set[tuple[str, str]]:
        names = [(element.tag, name) for element in root.iter() for name in element.attrib]
        return {(tag, name) for tag, name in names if tag != "testsuites"}

    assert form(own) <= form(other)


@pytest.fixture
def file_of_pytest(tmp_path: Path) -> Path:
    """The file that pytest writes of a passed, a failed and a skipped test."""
    (tmp_path / "test_one.py").write_text(
        "import pytest\n\ndef test_a():\n    pass\n\ndef test_b():\n    assert False\n\n"
        "@pytest.mark.skip(reason='weak')\ndef test_c():\n    pass\n"
    )
    line = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--junitxml", "report.xml", "test_one.py"]
    subprocess.run(line, cwd=tmp_path, capture_output=True, check=False, timeout=TIMEOUT)
    return tmp_path / "report.xml"


def test_annotations_are_escaped_as_github_reads_them() -> None:
    """The rule of @actions/core (actions/toolkit, packages/core/src/command.ts).

    In a message % is %25, a carriage return %0D and a line feed %0A; in a property also : is %3A and a comma %2C.
    """
    lines = as_github("my suite", CHECKS).split("\n")
    assert lines == [
        "::error title=my suite%3A output::wrong: a%0Asecond line%0D%0A100%2525",
        "::error title=my suite%3A a%2Cb%3Ac::" + "a<b>&\"'%250A::error::x,y:z%0D%0A\ufffd\ufffd[31m\ufffd\ufffd é 😀",
        "my suite: 1 passed, 2 failed, 1 skipped",
    ]


def test_github_is_warned_only_if_nothing_was_judged() -> None:
    passed, skipped = Check("a", "passed"), Check("b", "skipped", "too weak")
    assert as_github("s", [passed, skipped]) == "s: 1 passed, 0 failed, 1 skipped"
    assert as_github("s", [skipped, skipped]) == "::warning title=s::too weak\ns: 0 passed, 0 failed, 2 skipped"
    assert as_github("s", []) == "::warning title=s::there is nothing to judge\ns: 0 passed, 0 failed, 0 skipped"


def test_each_array_is_a_check() -> None:
    logsumexp = [1.0, 5 + np.log1p(np.exp(-4.0))]
    request = SMALL | {"query": [[1.0], [1.0]]}
    output = [2.0, 4 - 2 / (1 + np.exp(4.0))]
    report = compare({"output": np.array(output)[:, None], "logsumexp": [9.0, 9.0]}, **request)
    assert [(check.name, check.outcome) for check in checks_of_report(report)] == [
        ("output", "passed"),
        ("logsumexp", "failure"),
    ]
    assert [check.outcome for check in checks_of_report(compare(np.array(output)[:, None], **request))] == ["passed"]
    assert checks_of_report(report)[1].message == report.verdict.message
    infinite = compare({"output": np.array(output)[:, None], "logsumexp": [np.nan, logsumexp[1]]}, **request)
    assert [check.outcome for check in checks_of_report(infinite)] == ["passed", "failure"]
    empty_batch: dict[str, Any] = dict.fromkeys("qkv", np.zeros((0, 1, 1, 1)))
    empty = compare_call("flash_attn.flash_attn_func", actual=empty_batch["q"], **empty_batch)
    assert [check.outcome for check in checks_of_report(empty)] == ["passed"]
    (nothing,) = checks_of_report(compare(**request))
    assert (nothing.name, nothing.outcome) == ("actual", "skipped")
    one: dict[str, Any] = {"query": [[0.0]], "key": [[0.0]], "value": [[2.0]]}
    (weak,) = checks_of_report(compare([[2.0]], **one))
    assert (weak.name, weak.outcome) == ("output", "skipped")


@pytest.mark.slow
def test_the_commands_print_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "request.json").write_text(json.dumps(SMALL))
    (tmp_path / "junit_kernels.py").write_text("def kernel(query, key, value):\n    return query\n")

    def printed(status: int, *arguments: str) -> str:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"[[2], [4]]")))
        assert main(arguments) == status
        return capsys.readouterr().out

    (suite,) = ElementTree.fromstring(printed(1, "compare", "request.json", "-", "--format", "junit"))
    assert (suite.attrib["name"], counts(suite)["failures"]) == ("compare request.json -", 1)
    annotation = printed(1, "compare", "request.json", "-", "--format", "github")
    assert annotation.startswith("::error title=compare request.json -%3A output::wrong: ")
    # An error is a check, too: a step that only reads the file sees it.
    (suite,) = ElementTree.fromstring(printed(3, "compare", "request.json", "absent.npy", "--format", "junit"))
    assert (counts(suite)["errors"], suite[0][0].tag) == (1, "error")
    assert printed(3, "compare", "absent.json", "--format", "github").startswith("::error title=compare absent.json%3A")
    assert printed(3, "compare", "absent.json", "--format", "json") == ""
    printed(0, "conformance", "write", "cases", "--cases", "10")
    judge = ("conformance", "run", "junit_kernels:kernel", "--dir", "cases", "--format")
    (suite,) = ElementTree.fromstring(printed(1, *judge, "junit"))
    assert counts(suite)["failures"] + counts(suite)["skipped"] == counts(suite)["tests"] == len(suite)
    assert {"plain", "combined"} <= {case.attrib["name"] for case in suite}
    assert printed(1, *judge, "github").startswith("::error title=conformance junit_kernels%3Akernel%3A plain::0000-")
    (tmp_path / "junit_kernels.py").write_text("def kernel(query, key, value):\n    raise KeyError('<tile>')\n")
    del sys.modules["junit_kernels"]
    invalidate_caches()
    (suite,) = ElementTree.fromstring(printed(1, *judge, "junit"))
    assert (counts(suite)["failures"], suite[0][0].tag) == (0, "error")
    place = "junit_kernels.py, line 2, in kernel: raise KeyError('<tile>')"
    assert suite[0][0].attrib["message"] == f"0000-plain (float32) raised KeyError: '<tile>' ({place})"
    title = "::error title=conformance junit_kernels%3Akernel%3A plain::0000-plain (float32) raised KeyError"
    assert printed(1, *judge, "github").startswith(title)
    assert printed(3, "conformance", "run", "junit_kernels:absent", "--format", "github").startswith("::error title=")
