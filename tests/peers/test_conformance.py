"""What docs/conformance.md says of other libraries: each program shows what it says, and the matrix what happens."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec

import numpy as np
import pytest

from attention_service.conformance.runner import run_cases
from tests.helpers.corners import make_corner_cases
from tests.helpers.documents import BLOCKS, ROOT, Block
from tests.peers.conformance.adapters import ADAPTERS, Adapter
from tests.peers.conformance.deviations import BY_CELL, DEVIATIONS, Deviation
from tests.peers.conformance.matrix import alignment, verdict

PAGE = "docs/conformance.md"
CODES = {deviation.code for deviation in DEVIATIONS}
PROGRAMS = [
    block
    for block in BLOCKS
    if block.page == PAGE and block.text in CODES and ("onnxruntime" not in block.text or find_spec("onnxruntime"))
]
INSTALLED = {name: adapter for name, adapter in ADAPTERS.items() if adapter.is_installed}
# Corners that every library computes right.
RIGHT = ("plain", "one_query", "long_keys", "mask", "large_scores")
# Options that some libraries alone have.
OF_ONE = (
    ("flex-attention", "scale.by_head"),
    ("flex-attention", "scale.by_head_negative"),
    ("keras", "gate.map"),
    ("transformers", "sinks.by_query"),
    ("transformers", "sinks.without"),
)
pytestmark = pytest.mark.filterwarnings("ignore")


def test_every_program_is_in_the_page() -> None:
    absent = {code for code in CODES if code is not None and "onnxruntime" not in code}
    assert absent <= {block.text for block in PROGRAMS}


@pytest.mark.parametrize("block", PROGRAMS, ids=lambda block: block.text.splitlines()[0])
def test_a_program_shows_what_it_says(block: Block) -> None:
    shown = block.execute()
    assert shown, "nothing that could be compared"
    for expression, value, said in shown:
        assert value == said, expression


@pytest.mark.parametrize("name", INSTALLED)
def test_libraries_are_called_as_their_arguments_mean(name: str) -> None:
    """Corners without known defects are right, so that an adapter that misread an argument would fail."""
    target = INSTALLED[name].load()
    cases = [case for corner in RIGHT for case in make_corner_cases(corner, 1, 11, ("float32",))]
    assert run_cases(cases, target, explain=False).count("correct") == len(cases)


@pytest.mark.parametrize(("name", "corner"), OF_ONE)
def test_an_option_that_one_library_has_is_passed_on(name: str, corner: str) -> None:
    """So that an adapter that left it out would fail: the corner shows the mistake."""
    cases = make_corner_cases(corner, 3, 7, ("float32",))
    (found,) = run_cases(cases, ADAPTERS[name].load(), explain=False).corners
    assert found.status == "correct"


@pytest.mark.parametrize(("name", "corner"), BY_CELL)
def test_each_deviation_of_the_matrix_is_there(name: str, corner: str) -> None:
    if name not in INSTALLED or corner == "scale.zero":  # rounding, which some cases show and others do not
        return
    cases = make_corner_cases(corner, 2, 0, ("float32",))
    (found,) = run_cases(cases, INSTALLED[name].load(), explain=False).corners
    assert found.status in ("wrong", "imprecise")


def documentation(source: str) -> str:
    """The documentation of what is called so, in the version that is installed."""
    if source == "the operator Attention of ONNX":
        schema = pytest.importorskip("onnx").defs.get_schema("Attention", 24, "")
        return "\n".join([schema.doc, *(attribute.description for attribute in schema.attributes.values())])
    module, _, name = source.rpartition(".")
    return str(getattr(import_module(module), name).__doc__)


QUOTED = [deviation for deviation in DEVIATIONS if deviation.quote is not None]


@pytest.mark.parametrize("deviation", QUOTED, ids=lambda deviation: deviation.anchor)
def test_what_is_quoted_is_in_the_documentation(deviation: Deviation) -> None:
    assert deviation.source is not None
    assert deviation.quote is not None
    said = " ".join(documentation(deviation.source).split())
    assert all(part in said for part in deviation.quote.split(" … "))


def test_a_library_breaks_its_documentation_only_by_a_quotation() -> None:
    """And the page says of each deviation what it is."""
    assert all(deviation.quote is not None for deviation in DEVIATIONS if deviation.breaks)
    page = (ROOT / PAGE).read_text(encoding="utf-8")
    for deviation in DEVIATIONS:
        heading, sentence = f"### {deviation.title}\n", verdict(deviation)
        assert sentence.startswith(("**Another definition.**", "**Breaks its documentation.**"))
        assert f"{heading}\n{sentence}" in page
        mark = "✗" if deviation.breaks else "≠"
        assert f"[{mark}](#{deviation.anchor})" in page


def test_a_negative_scale_of_onnx_and_hidden_nan_are_other_definitions() -> None:
    """Nobody is accused of what nobody promised."""
    assert {cell for cell, deviation in BY_CELL.items() if deviation.breaks} == {
        ("onnxruntime", "past.one_query"),
        ("torch-sdpa", "scale.zero_causal"),
        ("torch-sdpa", "scale.negative_causal"),
    }
    assert "| ? |" not in (ROOT / PAGE).read_text(encoding="utf-8").partition("<!-- matrix: measured -->")[2]


def test_causal_masks_align_as_the_page_says() -> None:
    assert alignment(INSTALLED["torch-sdpa"].load()) == "first with first"
    assert alignment(lambda query, **_: np.zeros(query.shape, query.dtype)) == "neither"


def test_an_adapter_says_what_a_library_has_no_argument_for() -> None:
    (found,) = run_cases(make_corner_cases("sinks", 1, 0, ("float32",)), INSTALLED["torch-sdpa"].load()).corners
    assert (found.status, found.outcomes[0].message) == ("unsupported", "no argument for sinks")
    for name in INSTALLED.keys() - {"flex-attention"}:
        (found,) = run_cases(make_corner_cases("scale.by_head", 1, 0, ("float32",)), INSTALLED[name].load()).corners
        said = "no argument for scale" if name in ("torch-mha", "keras") else "one number for the scale only"
        assert (found.status, found.outcomes[0].message) == ("unsupported", said)


def test_a_library_that_is_missing_is_not_installed() -> None:
    assert not Adapter("none", "no_such_package", "flex:flex").is_installed
