"""The gradient of scores as a stage. Expected numbers are by hand, or by the definition in NumPy."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from playwright.sync_api import BrowserContext, Page, expect

from attention_service import attend
from tests.page.helpers import download, fill, numbers, paste_text, wait
from tests.page.test_numbers import by_hand
from tests.page.test_python_pages import opened

Open = Callable[..., Page]
STAGE: Final = "grad_masked_scores"
# Weights 1/4 and 3/4, values 1 and 5: the output is 4, and the gradient of the masked scores (-3/4, 3/4).
BY_HAND: Final[dict[str, Any]] = {
    "query": [[1.0]],
    "key": [[0.0], [math.log(3)]],
    "value": [[1.0], [5.0]],
    "scale": 1.0,
    "query_offset": 0,
    "grad_output": [[1.0]],
}
RANDOM: Final = np.random.default_rng(7)
# Two heads of two features, whose outputs stand beside each other.
JOINED: Final[dict[str, Any]] = {
    name: RANDOM.normal(size=(4, 4)).round(2).tolist() for name in ("query", "key", "value", "grad_output")
} | {"num_heads": 2}


def gradient(request: dict[str, Any], heads: int = 1, *, causal: bool = False) -> np.ndarray:
    """P ⊙ (dP - D) of each head, (h, q, k)."""
    names = ("query", "key", "value", "grad_output")
    query, key, value, cotangent = (
        np.array(request[name]).reshape(len(request[name]), heads, -1).swapaxes(0, 1) for name in names
    )
    scores = query @ key.swapaxes(-1, -2) / math.sqrt(query.shape[-1])
    if causal:
        scores = np.where(np.tri(*scores.shape[-2:], dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    of_weights = cotangent @ value.swapaxes(-1, -2)
    return np.asarray(weights * (of_weights - (weights * of_weights).sum(axis=-1, keepdims=True)))


def open_own(open_page: Open, request: dict[str, Any], stage: str = STAGE) -> Page:
    """The page with a request of one's own, at a stage."""
    page = open_page()
    paste_text(page, json.dumps(request))
    wait(page)
    page.locator(f"#pipeline button[value={stage}]").click(position={"x": 12, "y": 8})
    return page


def test_the_lesson_shows_which_score_would_have_to_change(open_page: Open) -> None:
    """Weights and outputs are those that the notebook prints: 0.157823895 · (9.8 - 2.70444657) = 1.119847."""
    page = open_page(example="gradient")
    expect(page.locator("#large-title")).to_have_text("Score gradient")
    expect(page.locator("#readout")).to_contain_text("key 0 “\u2068kitten\u2069”: 1.1198")
    steps = page.locator("#steps")
    expect(steps).to_contain_text("Value · grad_output3.4·0 + 1.3·0 + 0.4·0 + 9.8·1 = 9.8")
    expect(steps).to_contain_text("2.704447·1 ≈ 2.704447")
    expect(steps).to_contain_text("Gradient0.157824 × (9.8 − 2.704447) ≈ 1.11984")
    page.locator("#large").press("ArrowLeft")
    for _ in range(4):
        page.locator("#large").press("ArrowRight")
    expect(page.locator("#readout")).to_contain_text("key 4 “\u2068wolf\u2069”: −1.18")
    expect(page.locator("#loss")).to_be_visible()
    page.locator("#pipeline button[value=attention_weights]").click(position={"x": 12, "y": 8})
    expect(page.locator("#loss")).to_be_hidden()


def test_colours_have_both_signs_around_0(open_page: Open) -> None:
    page = open_page(example="gradient")
    assert page.locator("#large .range").all_text_contents() == ["−1.190", "1.190"]
    expect(page.locator("#loss")).to_contain_text("Red, above 0: a higher score raises the loss.")
    pixels = page.locator(f"#pipeline button[value={STAGE}] canvas").evaluate(
        "canvas => [...canvas.getContext('2d').getImageData(0, 0, 5, 1).data]"
    )
    kitten, wolf = pixels[:3], pixels[16:19]
    assert kitten[0] > 100 > kitten[2]
    assert wolf == [5, 48, 97], "the blue end of RdBu"


def test_a_number_of_the_output_asks_for_its_gradient(open_page: Open) -> None:
    """From a lesson it becomes one's own request, which a link keeps.

    By the weights and the output of the notebook: 0.741576662 · (1.1 - 2.70444657) = -1.18982.
    """
    page = open_page(example="dot_product", stage="output", query=0, feature=3)
    ask = page.locator("#ask")
    page.evaluate("performance.clearMeasures()")
    ask.click()
    wait(page)
    expect(page.locator("#example")).to_have_value("data")
    expect(page.locator("#large-title")).to_have_text("Score gradient")
    expect(page.locator("#readout")).to_contain_text("key 4 “\u2068wolf\u2069”: −1.1898")
    assert json.loads(page.locator("#pasted").input_value())["grad_output"] == [[0, 0, 0, 1], [0, 0, 0, 0]]
    expect(ask).to_be_hidden()
    page.reload()
    wait(page)
    expect(page.locator("#readout")).to_contain_text("key 4 “\u2068wolf\u2069”: −1.1898")


@pytest.mark.parametrize("layout", ["ld", "dl"])
def test_the_gradient_is_that_of_the_head_that_has_the_feature(layout: str, open_page: Open) -> None:
    page = open_own(open_page, {**JOINED, "grad_output": None}, "output")
    if layout == "dl":
        fill(page, "layout", layout)
    for key in ("ArrowDown", *["ArrowRight"] * 3) if layout == "ld" else ("ArrowRight", *["ArrowDown"] * 3):
        page.locator("#large").press(key)
    expect(page.locator("#readout")).to_contain_text("query 1, feature 3")
    page.evaluate("performance.clearMeasures()")
    page.locator("#ask").click()
    wait(page)
    expect(page.locator("#large-title")).to_have_text("Score gradient, head 1")
    one = np.zeros((4, 4))
    one[1, 3] = 1
    shown = np.array(numbers(page, STAGE))
    right = gradient({**JOINED, "grad_output": one}, 2)[1]
    np.testing.assert_allclose(shown.T if layout == "dl" else shown, right, atol=1e-12)


def test_heads_and_batch_entries_of_large_requests_are_asked_for(open_page: Open) -> None:
    """A request that is too long to be edited stays as it is."""
    names = ("query", "key", "value")
    request = {name: RANDOM.normal(size=(2, 2, 30, 16)).tolist() for name in names}
    page = open_page()
    paste_text(page, json.dumps(request))
    wait(page)
    page.locator("#batch").fill("1")
    page.locator("#heads button").nth(1).click()
    page.locator("#pipeline button[value=output]").click(position={"x": 12, "y": 8})
    page.locator("#large").press("ArrowDown")
    page.evaluate("performance.clearMeasures()")
    page.locator("#ask").click()
    wait(page)
    one = np.zeros((30, 16))
    one[1, 0] = 1
    right = gradient({name: request[name][1][1] for name in names} | {"grad_output": one})[0]
    np.testing.assert_allclose(numbers(page, STAGE), right, atol=1e-12)


def test_there_is_no_gradient_without_a_cotangent(open_page: Open) -> None:
    page = open_page(example="gradient")
    page.evaluate("performance.clearMeasures()")
    expect(page.locator("#loss")).to_be_visible()
    page.locator("#example").select_option("dot_product")
    wait(page)
    expect(page.locator(f"#pipeline button[value={STAGE}]")).to_be_hidden()
    expect(page.locator("#loss")).to_be_hidden()
    page = open_page(example="dot_product", stage=STAGE)
    expect(page.locator("#large-title")).to_have_text("Weights")


def test_the_sentence_has_the_numbers_by_hand(open_page: Open) -> None:
    page = open_own(open_page, BY_HAND)
    np.testing.assert_allclose(numbers(page, STAGE), [[-0.75, 0.75]], rtol=1e-12)
    page.locator("#row tr").nth(1).click()
    steps = page.locator("#steps dd")
    expect(steps).to_have_text(["5·1 = 5", "4·1 = 4", "0.75 × (5 − 4) = 0.75"])
    page.locator("#row tr").nth(0).click()
    expect(steps.last).to_have_text("0.25 × (1 − 4) = −0.75")


@pytest.mark.parametrize("layout", ["ld", "dl"])
@pytest.mark.parametrize("dtype", ["", "float16"])
def test_each_head_has_its_own_gradient(layout: str, dtype: str, open_page: Open) -> None:
    page = open_own(open_page, JOINED | ({"dtype": dtype} if dtype else {}))
    if layout == "dl":
        fill(page, "layout", layout)
    right = gradient(JOINED, 2)
    places = page.locator("#row tr")
    for head in range(2):
        page.locator("#heads button").nth(head).click()
        shown = np.array(numbers(page, STAGE))
        np.testing.assert_allclose(shown.T if layout == "dl" else shown, right[head], atol=2e-3 if dtype else 1e-12)
        for key in range(4):
            places.nth(key).click()
            steps = page.locator("#steps dd")
            expect(steps).to_have_count(3)
            for step in steps.all_inner_texts():
                written = float(re.split("[=≈] ", step)[1].replace("−", "-"))
                assert by_hand(step) == pytest.approx(written, rel=1e-2 if dtype else 1e-5, abs=1e-2 if dtype else 1e-5)


def test_a_hidden_key_says_why_its_gradient_is_0(open_page: Open) -> None:
    page = open_own(open_page, JOINED | {"is_causal": True})
    np.testing.assert_allclose(numbers(page, STAGE), gradient(JOINED, 2, causal=True)[0], atol=1e-12)
    page.locator("#row tr").nth(2).click()
    expect(page.locator("#readout")).to_contain_text("hidden by the causal mask")
    expect(page.locator("#steps")).to_contain_text("0: hidden by the causal mask")
    expect(page.locator("#large .legend")).to_have_text(["hidden by the causal mask"])


@pytest.mark.parametrize(
    "change",
    [
        {"normalization": "sigmoid"},
        {"grad_output": None, "grad_logsumexp": [2.0]},
        {"grad_logsumexp": [2.0]},
        {"projection": {"output": {"weight": [[2.0]]}}},
    ],
    ids=str,
)
def test_other_options_have_no_sentence(change: dict[str, Any], open_page: Open) -> None:
    """With a gradient of the logsumexp, or one that has come through the output map, the terms are others."""
    page = open_own(open_page, {**BY_HAND, **change})
    expect(page.locator("#steps dd")).to_have_text(
        re.compile(r"^−?\d\.\d+, after other options, not written out here$")
    )


def test_a_request_with_a_cotangent_is_edited_compared_and_copied(open_page: Open) -> None:
    page = open_page(example="gradient")
    page.locator("#example").select_option("data")
    expect(page.locator("#pasted")).to_have_value(re.compile(r'"grad_output"'))
    page.locator("#compare-title").click()
    page.locator("#actual").fill("[[0, 0, 0, 0], [0, 0, 0, 0]]")
    page.locator("#compare button").click()
    expect(page.locator("#report .verdict")).to_contain_text("wrong")


def test_a_window_of_a_long_sequence_has_its_gradient(open_page: Open) -> None:
    names = ("query", "key", "value", "grad_output")
    request = {name: RANDOM.normal(size=(600, 2)).round(2).tolist() for name in names}
    page = open_page()
    paste_text(page, json.dumps(request))
    expect(page.locator("#long")).to_be_visible()
    page.locator("#long-query").fill("300")
    page.locator("#long-key").fill("100")
    page.locator("#long-window button").first.click()
    expect(page.locator("#short")).to_be_visible()
    rows = (
        page.locator("#large [data-query]").first.text_content(),
        page.locator("#large [data-key]").first.text_content(),
    )
    first, column = (int(text or "") for text in rows)
    shown = np.array(numbers(page, STAGE))
    right = gradient(request)[0][first : first + shown.shape[0], column : column + shown.shape[1]]
    np.testing.assert_allclose(shown, right, atol=1e-12)
    expect(page.locator("#steps dt").nth(2)).to_have_text("Gradient")
    step = page.locator("#steps dd").nth(2).inner_text()
    assert by_hand(step) == pytest.approx(float(re.split("[=≈] ", step)[1].replace("−", "-")), abs=1e-5)


def test_saved_pages_have_the_gradient(open_page: Open, context: BrowserContext, folder: Path) -> None:
    """Those of Python and those of the page, without a server."""
    attend(**BY_HAND, gradients="all").page(folder / "it.html")
    page = opened(context, folder / "it.html")
    np.testing.assert_allclose(numbers(page, STAGE), [[-0.75, 0.75]], rtol=1e-12)
    expect(page.locator("#steps dd").last).to_have_text("0.25 × (1 − 4) = −0.75")
    attend(**{**BY_HAND, "grad_output": None}).page(folder / "other.html")
    expect(opened(context, folder / "other.html").locator(f"#pipeline button[value={STAGE}]")).to_be_hidden()
    path = download(open_page(example="gradient"), "#save-html", folder)
    expect(opened(context, path).locator("#readout")).to_contain_text("1.1198")
