"""What `compare` returns: text, one line, a picture in notebooks, and the reference if it is asked for."""

from __future__ import annotations

import copy
import json
import pickle
import re
from typing import Any, Final
from xml.etree import ElementTree

import httpx
import numpy as np
import pytest

from attention_service import compare
from attention_service.codecs.decoded import Decoded
from attention_service.comparison.memory import REFERENCE_BYTES, comparison_bytes
from attention_service.comparison.question import make_question
from attention_service.comparison.text import as_text
from attention_service.library.report import MOST, Report
from attention_service.schemas.compare import CompareReport, ReportedPower
from tests.helpers.documents import BLOCKS

pytestmark = pytest.mark.usefixtures("without_suggestions")

# Queries of zeros: each output is the mean of the values that are seen, each logsumexp the logarithm of their number.
QUERY: Final = np.zeros((2, 3, 4))
KEY: Final = np.random.default_rng(0).standard_normal((2, 3, 4))
VALUE: Final = np.random.default_rng(1).standard_normal((2, 3, 4))
REQUEST: Final[dict[str, Any]] = {"query": QUERY, "key": KEY, "value": VALUE, "layout": "hld", "is_causal": True}
# The same where a test reads no names of mistakes, whose search takes most of the time.
QUICK: Final = {**REQUEST, "time_limit": 0}
OUTPUT: Final = VALUE.cumsum(axis=1) / np.arange(1, 4)[:, None]
LOGSUMEXP: Final = np.broadcast_to(np.log(np.arange(1, 4)), (2, 3))


def compared(actual: Any, **request: Any) -> Report:
    report = compare(actual, **request)
    assert isinstance(report, Report)
    return report


def test_a_report_is_printed_as_text_and_named_in_two_lines() -> None:
    acausal = np.broadcast_to(VALUE.mean(axis=1, keepdims=True), OUTPUT.shape)
    report = compared(acausal, **REQUEST)
    assert str(report) == as_text(report)
    line, message = repr(report).split("\n")
    assert re.fullmatch(r"CompareReport\(wrong in output, ratio \S+, proof: output\.mean_value\)", line)
    assert message == f"  {report.verdict.message}"
    assert re.match(r"CompareReport\(inconclusive\)\n  \w", repr(compare(**QUICK)))
    assert re.match(r"CompareReport\(\w+, ratio \S+\)\n  \w", repr(compare(OUTPUT, **QUICK)))
    for other in (pickle.loads(pickle.dumps(report)), copy.deepcopy(report)):
        assert (repr(other), other._repr_html_()) == (repr(report), report._repr_html_())
    # Over HTTP and on the command line it has the same fields.
    assert CompareReport.model_validate_json(report.model_dump_json()).model_dump() == report.model_dump()


def test_the_repr_names_the_first_hypotheses_that_are_equally_certain() -> None:
    report = compared(np.broadcast_to(VALUE.mean(axis=1, keepdims=True), OUTPUT.shape), **REQUEST)
    first = report.hypotheses[0]
    for certainties, named in (
        (["resembles"] * 4, "resembles: a, b, c"),
        (["proof", "proof", "resembles"], "proof: a, b"),
        (["proof", "resembles", "resembles"], "proof: a"),
    ):
        made = zip("abcd", certainties, strict=False)
        report.hypotheses = [first.model_copy(update={"name": name, "certainty": how}) for name, how in made]
        assert repr(report).partition("\n")[0].endswith(f", {named})")
        # rich asks for these in place of `repr`.
        shown = {"verdict": report.verdict, "hypotheses": named.partition(": ")[2].split(", ")}
        assert dict(report.__repr_args__()) == shown


def picture(html: str) -> ElementTree.Element:
    found = re.match(r"<div>(<svg .*</svg>)\s*</div><pre>", html, re.DOTALL)
    assert found, html
    return ElementTree.fromstring(found[1])


def test_notebooks_show_where_an_array_is_wrong() -> None:
    wrong = OUTPUT.copy()
    wrong[1, 2, 0] += 1
    report = compared(wrong, **QUICK)
    html = report._repr_html_()
    svg = picture(html)
    assert (
        svg.findtext("{*}title") == "output: rows down, features across, 3 × 4. Red: wrong in any batch entry or head"
    )
    assert svg.find("{*}image") is not None
    assert report._wrong is not None
    assert (report._wrong.grid > 10).tolist() == [[False] * 4, [False] * 4, [True, False, False, False]]
    assert "&lt;" not in html  # nothing in this text needs it
    right = compared({"output": OUTPUT, "logsumexp": LOGSUMEXP / np.log(2)}, logsumexp_base="2", **QUICK)
    assert right._repr_html_().startswith("<pre>")
    second = compared({"output": OUTPUT, "logsumexp": LOGSUMEXP}, logsumexp_base="2", **QUICK)
    assert (picture(second._repr_html_()).findtext("{*}title") or "").startswith("logsumexp: heads down, rows across")


def test_places_and_worst_elements_name_their_array_and_its_axes() -> None:
    """In the layout blhd rows come before heads; wrong are head 1, row 2, feature 0."""
    wrong = OUTPUT.copy()
    wrong[1, 2, 0] += 1
    query, key, value, output = (array.swapaxes(0, 1)[None] for array in (QUERY, KEY, VALUE, wrong))
    report = compared(output, query=query, key=key, value=value, layout="blhd", is_causal=True, time_limit=0)
    assert [(place.array, place.message) for place in report.where] == [
        ("output", "1 of 24 elements of the output (4.2%) are wrong"),
        ("output", "head 1 only"),
        ("output", "row 2 only"),
        ("output", "feature 0 only"),
    ]
    assert report.where[0].axes == ["batch entry", "row", "head", "feature"]
    worst = (
        f"output at batch entry 0, row 2, head 1, feature 0: {wrong[1, 2, 0]:.8g} where {OUTPUT[1, 2, 0]:.8g} is right"
    )
    assert f"\nworst:\n  {worst}\n" in str(report)
    assert repr(report).startswith("CompareReport(wrong in output, ")


def test_places_of_an_array_of_keys_count_keys() -> None:
    """Rows see 1, 2 and 3 keys with equal weights: what keys receive is 1 + 1/2 + 1/3, 1/2 + 1/3 and 1/3."""
    received = np.broadcast_to([11 / 6, 5 / 6, 1 / 3], (2, 3)).copy()
    received[1, 2] *= 2
    report = compared({"received": received}, **QUICK)
    assert [place.message for place in report.where] == [
        "1 of 6 elements of received (16.7%) are wrong",
        "head 1 only",
        "key 2 only",
    ]
    assert "\n  received at head 1, key 2: 0.66666667 where 0.33333333 is right\n" in str(report)
    assert (picture(report._repr_html_()).findtext("{*}title") or "").startswith("received: heads down, keys across")
    some = {**QUICK, "select_heads": [1]}
    assert compared({"received": received[1:]}, **some).where[1].message == "key 2 only"


def test_the_verdict_says_which_array_is_right_and_which_is_wrong() -> None:
    report = compared({"output": OUTPUT, "logsumexp": LOGSUMEXP / np.log(2)}, **REQUEST)
    assert report.hypotheses[0].certainty == "proof"
    assert report.verdict.message.startswith("Wrong: the output is right; the logsumexp is wrong: ")
    report = compared({"output": OUTPUT * 1.01, "logsumexp": LOGSUMEXP}, **QUICK)
    assert report.verdict.message.startswith("Wrong: the logsumexp is right; the output is wrong: ")
    noise = np.array([[0, 0, 0.3], [0.1, 0, 0]])
    report = compared({"output": OUTPUT, "logsumexp": LOGSUMEXP + noise}, **REQUEST)
    assert re.fullmatch(
        r"Wrong: the output is right; the logsumexp is wrong: the largest error is \S+ times what legal rounding "
        r"explains, and no known mistake explains it\.",
        report.verdict.message,
    )


def test_what_explains_half_of_the_error_is_not_in_the_verdict() -> None:
    """Beside a factor of 2, noise as large as the error leaves half of it; noise of a tenth leaves a hundredth."""
    random = np.random.default_rng(2)
    query, key, value = random.standard_normal((3, 8, 16))
    weights = np.exp(query @ key.T / 4)
    right = weights @ value / weights.sum(axis=1, keepdims=True)
    noise = random.standard_normal(right.shape)
    noise *= np.linalg.norm(right) / np.linalg.norm(noise)
    half, most = (compared(2 * right + by * noise, query=query, key=key, value=value) for by in (0.8, 0.1))
    assert (half.hypotheses[0].name, most.hypotheses[0].name) == ("output.scaled", "output.scaled")
    assert half.verdict.message.endswith(" rounding explains, and no known mistake explains it.")
    assert " It resembles this, which explains 99% of the error: the output is multiplied" in most.verdict.message
    assert "\n  resembles: output.scaled, which explains 99." in str(most)
    assert "% of the error, but is not proved\n" in str(most)


def test_what_the_inputs_show_is_said_once_of_each_mistake() -> None:
    report = compared(OUTPUT, **QUICK)
    report.power = ReportedPower(
        mutants=5,
        killed=1,
        survivors=["mask.finite", "softmax.last_tile", "keys.tail_dropped", "scale.by_tile"],
        indistinguishable=[],
        tiles={"softmax.last_tile": [16, 32], "keys.tail_dropped": [], "scale.by_tile": [16, 32, 64]},
        options=[],
    )
    report.next_input = None
    assert str(report).endswith(
        "\npower:\n"
        "  this request shows 1 of 5 known mistakes\n"
        "  it is too short for mistakes between tiles of 16 queries or more, or of 16 keys or more\n"
        "  not shown: mask.finite, keys.tail_dropped\n"
        "  shown only if the kernel's tiles have 16 or 32 keys: softmax.last_tile\n"
        "  shown only if the kernel's tiles have 16, 32 or 64 keys: scale.by_tile\n"
        "\n"
        "next: none: the search ended early; compare without a time limit"
    )


@pytest.mark.torch
def test_the_mistake_of_the_kernel_in_torch_is_named_as_the_page_says() -> None:
    (block,) = (one for one in BLOCKS if one.page == "docs/compare.md" and one.text.startswith("import torch"))
    ((expression, value, said),) = block.execute("")
    assert value == said, expression


def test_the_text_in_notebooks_is_escaped() -> None:
    report = compared(OUTPUT, **QUICK)
    report.verdict.message = "<script>&"
    assert "&lt;script&gt;&amp;" in report._repr_html_()


@pytest.mark.parametrize("place", [(0, 0), (99, 129), (50, 64)])
def test_a_large_picture_shows_a_single_wrong_element(place: tuple[int, int]) -> None:
    value = np.random.default_rng(0).standard_normal((2, 130))
    output = np.broadcast_to(value.mean(axis=0), (100, 130)).copy()
    output[place] = np.nan
    report = compared(output, query=np.zeros((100, 1)), key=np.zeros((2, 1)), value=value, time_limit=0)
    assert report._wrong is not None
    assert report._wrong.grid.shape == (MOST, MOST)
    assert len(report._repr_html_()) < 6000, "a page of text, and one image"
    (found,) = np.argwhere(report._wrong.grid > 2)
    assert np.abs(found / MOST - np.array(place) / output.shape).max() <= 1 / MOST


def test_the_reference_is_returned_if_it_is_asked_for() -> None:
    sent = {"output": OUTPUT, "logsumexp": LOGSUMEXP / np.log(2)}
    report = compare(sent, **QUICK, logsumexp_base="2", reference=True)
    assert report.reference is not None
    assert list(report.reference) == ["output", "logsumexp"]
    np.testing.assert_allclose(report.reference["output"], OUTPUT, rtol=1e-14)
    np.testing.assert_allclose(report.reference["logsumexp"], LOGSUMEXP / np.log(2), atol=1e-14)
    alone = compare(**QUICK, reference=True)
    assert alone.reference is not None
    np.testing.assert_allclose(alone.reference["output"], OUTPUT, rtol=1e-14)
    assert compare(sent, **QUICK).reference is None
    assert json.loads(report.model_dump_json())["reference"]["output"] == report.reference["output"].tolist()


def test_the_reference_is_in_the_report_over_http(client: httpx.Client) -> None:
    body = {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in QUICK.items()}
    mask = {"mask": np.zeros((3, 3), bool).tolist(), "actual": {"logsumexp": [[None] * 3] * 2}}
    for more, expected in (({}, {"output": OUTPUT.tolist()}), (mask, {"logsumexp": [[None] * 3] * 2})):
        found = client.post("/attention/compare", json=body | more | {"reference": True}).json()["reference"]
        assert found.keys() == expected.keys()
        for name, array in expected.items():
            np.testing.assert_allclose(np.array(found[name], float), np.array(array, float), rtol=1e-14)
    assert client.post("/attention/compare", json=body).json()["reference"] is None
    refused = client.post("/attention/compare", json=body | {"reference": "output"})
    assert refused.json()["errors"][0]["pointer"] == "/reference"


def test_the_memory_of_the_reference_is_counted() -> None:
    for sent, size in (({}, OUTPUT.size), ({"actual": {"logsumexp": LOGSUMEXP}}, LOGSUMEXP.size)):
        questions = [make_question(Decoded({**REQUEST, **sent, "reference": on}, frozenset())) for on in (False, True)]
        without, with_reference = map(comparison_bytes, questions)
        assert with_reference - without == REFERENCE_BYTES * size
