"""A score term that is added as CONTRIBUTING.md says is known to all that reads terms: there is no list beside it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Final

from attention_service.attention.score_term import ScoreTerm
from tests.helpers.planted_term import ROOT, attributes, plant

# What `make openapi` writes first, and what is then said.
WALK: Final = """
import generate, runpy, sys
generate.write(generate.ROOT / "service/attention_service/library/functions.py", generate.functions())
runpy.run_path(sys.argv[1], run_name="__main__")
"""


def test_the_planted_term_has_every_attribute_of_terms() -> None:
    own = {name for name in vars(ScoreTerm) if not name.startswith("_")}
    assert attributes() >= own - {"noun", "arrays"}  # which follows from others; numbers for each query and key


def test_a_new_term_is_known_to_comparisons_suites_page_and_docs(tmp_path: Path) -> None:
    """In a copy of the tree, by another process. Right numbers are by definition."""
    plant(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", WALK, ROOT / "tests" / "helpers" / "planted_term_walk.py"],
        cwd=tmp_path,
        # The coverage of this tree is not measured in the copy.
        env={name: value for name, value in os.environ.items() if not name.startswith("COVERAGE_")}
        | {"PYTHONPATH": os.pathsep.join(str(tmp_path / name) for name in ("service", "openapi"))},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["right"] == ["correct"]
    assert said["ignored"] == ["wrong", "stairs.absent", "proof", {"stairs": None}]
    assert said["right gradients"] == ["correct"]
    assert said["forgotten backwards"] == ["wrong", "grad.stairs_absent", "proof", None]
    assert not said["survives"]
    seen, then = said["weak"].splitlines()
    assert seen == "Nothing wrong was seen; these inputs cannot show: stairs"
    assert "' --kills stairs.absent --output made.npz" in then
    assert said["made"].keys() >= {"stairs", "query_offset"}
    assert said["shown by the made input"]
    assert {29, 30, 59, 60, 89, 90} <= {*said["rows"]}
    assert said["judged rows"] == 16
    assert said["suites"] > 0
    assert [name for name, is_there in said["pages"].items() if not is_there] == []
