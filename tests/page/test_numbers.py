"""The numbers on the page: those that the notebooks print, and those that options change."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import httpx
import numpy as np
import pytest
from playwright.sync_api import Page, expect

from tests.cases import CASES, Case, as_array
from tests.page.helpers import STAGES, fill, numbers, paste_text

Open = Callable[..., Page]
# Requests of options over the first example, and what the service answers to them.
OPTIONS: list[dict[str, Any]] = [
    {"scale": 0.25}, {"softcap": 0.3}, {"is_causal": True}, {"window.left": 1}, {"window.left": 1, "window.right": 0},
    {"is_causal": True, "query_offset": 2}, {"chunk_size": 2}, {"normalization": "sum"},
    {"normalization": "sigmoid", "is_causal": True}, {"num_heads": 2},
    {"query_norm.kind": "rms"}, {"key_norm.kind": "layer", "value_norm.kind": "rms"},
    {"dtype": "float32"}, {"layout": "dl", "is_causal": True},
]  # fmt: skip


def listed(array: np.ndarray) -> Any:
    """An array as lists, with None for minus infinity, as in JSON."""
    return np.where(np.isneginf(array), None, array).tolist()  # type: ignore[call-overload]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_each_example_has_the_numbers_that_its_notebook_prints(case: Case, open_page: Open) -> None:
    """The tables have all digits; of several heads, each is chosen."""
    page = open_page(example=case.name)
    for expected in case.expected:
        field = expected.name.removesuffix(")").rpartition("(")[2]
        if field == "logsumexp":  # no picture: the sum is in the table of the row
            continue
        stage = STAGES.get(field, field)
        shape = as_array(expected.values).shape
        found = []
        for head in range(page.locator("#heads button").count() if len(shape) == 3 else 1):
            page.locator("#heads button").nth(head).click()
            found.append(numbers(page, stage))
        shown = np.array(found)
        expected.compare({field: listed(shown.reshape(shape) if shape else shown)})


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_each_option_sends_a_request_and_repaints(
    options: dict[str, Any], open_page: Open, service: httpx.Client
) -> None:
    page = open_page(example="animals_self_attention" if "num_heads" not in options else "causal")
    for name, value in options.items():
        fill(page, name, value)
    name = "causal" if "num_heads" in options else "animals_self_attention"
    (case,) = (case for case in CASES if case.name == name)
    request = {**case.request, **{key: value for key, value in options.items() if "." not in key}}
    for key, value in options.items():
        part, _, inner = key.partition(".")
        if inner:
            request[part] = {**request.get(part, {}), inner: value}
    if options.get("layout") == "dl":
        request["input"] = np.transpose(request["input"]).tolist()
    request["include"] = ["attention_weights", "masked_scores"]
    answer = service.post("/attention", json=request).json()
    for stage in request["include"]:
        want = as_array(answer[stage])
        np.testing.assert_allclose(numbers(page, stage), want[0] if want.ndim == 3 else want, rtol=1e-4)


def test_the_numbers_of_one_cell_are_written_out(open_page: Open) -> None:
    page = open_page(example="six_tokens_softmax", key=1)
    steps = page.locator("#steps")
    expect(steps).to_contain_text("0.55·0.55 + 0.87·0.87 + 0.66·0.66 = 1.495")
    expect(steps).to_contain_text("1.495 × 1 = 1.495")
    expect(steps).to_contain_text("Largest score1.495")
    expect(steps).to_contain_text("exp(1.495 − 1.495) = 1")
    expect(steps).to_contain_text("1 / 4.203601 ≈ 0.237891")
    expect(steps).to_contain_text("so that no exponential overflows")
    page.locator("[name=scale]").fill("2")  # 2 · 0.9544 = 1.9088, and exp(1.9088 − 2.99) = 0.3392
    heads = page.locator(".by-hand th[scope=col]:visible")
    expect(heads).to_have_text(["key", "score", "scaled", "exp(· − max)", "weight", "weight · v"])
    expect(page.locator("#row tr").first.locator("td:visible")).to_have_text(
        ["0.9544", "1.9088", "0.3392", re.compile("."), re.compile(".")]
    )
    page.locator("[name=scale]").fill("1")
    expect(heads).to_have_text(["key", "score", "exp(· − max)", "weight", "weight · v"])
    expect(page.locator("#row .sum")).to_contain_text("1.0000")


def by_hand(text: str) -> float:
    """The value of the left side of a calculation as it is shown."""
    left = re.split("[=≈]", text)[0]
    for sign, operator in {"−": "-", "·": "*", "×": "*"}.items():
        left = left.replace(sign, operator)
    value: float = eval(left, {"exp": math.exp, "tanh": math.tanh})
    return value


@pytest.mark.parametrize("normalization", ["", "sum", "sigmoid"])
@pytest.mark.parametrize("layout", ["ld", "dl"])
def test_each_step_can_be_done_by_hand(layout: str, normalization: str, open_page: Open) -> None:
    fields = {"layout": layout, "normalization": normalization, "softcap": 3, "scale": 0.3}
    page = open_page(example="sentence", text="a b c d e", dim=5, query=1, key=2, **fields)
    expect(page.locator("#normalization")).to_have_text(normalization or "softmax")
    titles, steps = page.locator("#steps dt").all_inner_texts(), page.locator("#steps dd").all_inner_texts()
    if normalization == "sigmoid":
        assert titles == ["Score", "Scaled", "Capped", "Weight"]
        assert "1 / (1 + exp(−" in steps[-1]
        expect(page.locator("#part-title")).to_have_text("1 / (1 + exp(−·))")
    assert ("Largest score" in titles) == (not normalization)
    for title, step in zip(titles, steps, strict=True):
        if not title.startswith("Largest"):
            right = float(re.split("[=≈] ", step)[1].replace("−", "-"))
            assert by_hand(step) == pytest.approx(right, rel=5e-6, abs=5e-6), step
            if "= " in step:
                assert by_hand(step) == pytest.approx(right, rel=1e-12)


def test_each_head_has_its_own_scale(open_page: Open) -> None:
    page = open_page()
    paste_text(page, '{"input": [[1, 0, 2, 1], [0, 1, 1, 3]], "num_heads": 2, "scale": [0.5, 0.25]}')
    expect(page.locator("#steps")).to_contain_text("1 × 0.5 = 0.5")
    page.locator("#heads button").nth(1).click()
    expect(page.locator("#steps")).to_contain_text("5 × 0.25 = 1.25")
    expect(page.locator("[name=scale]")).to_be_disabled()


def test_before_the_masks_nothing_is_hidden(open_page: Open) -> None:
    page = open_page(example="causal", is_causal="true", query=0, key=2, stage="scores")
    expect(page.locator("#readout")).to_have_text(re.compile(r"key 2.*: −?\d\.\d+$"))
    expect(page.locator("#large .legend")).to_have_count(0)
    page.locator("#pipeline button[value=masked_scores]").click()
    expect(page.locator("#readout")).to_contain_text("hidden by the causal mask")
    expect(page.locator("#large .legend")).to_have_text(["hidden by the causal mask"])
    page.locator("#pipeline button[value=query]").click()
    expect(page.locator("#readout")).to_have_text(re.compile(r"^query 0.*, feature 0: −?\d\.\d+$"))


@pytest.mark.parametrize("layout", ["ld", "dl"])
def test_the_axes_have_names(layout: str, open_page: Open) -> None:
    page = open_page(example="sentence", layout=layout)
    for stage, words in {"attention_weights": ["query", "key"], "present_value": ["key", "feature"]}.items():
        page.locator(f"#pipeline button[value={stage}]").click()
        shown = page.locator("#large text").evaluate_all("texts => texts.map(text => text.textContent)")
        shown = [text for text in shown if text in ("query", "key", "feature")]
        assert shown == (words if layout == "ld" else words[::-1])


def test_a_hidden_cell_says_why(open_page: Open) -> None:
    page = open_page(example="causal", is_causal="true", window__left=1, query=3, key=1)
    expect(page.locator("#readout")).to_contain_text("hidden by the window (from position 3 only keys 2 to")
    for key in ("ArrowUp", "ArrowUp", "ArrowRight"):
        page.locator("#large").press(key)
    expect(page.locator("#readout")).to_contain_text("query 1")
    expect(page.locator("#readout")).to_contain_text("hidden by the causal mask (key 2 comes after position 1)")
    expect(page.locator("#large .legend")).to_have_text(["hidden by the window", "hidden by the causal mask"])
    expect(page.locator("#steps")).to_contain_text("−∞: hidden by the causal mask")


def test_cells_are_chosen_by_click_and_arrow_keys(open_page: Open) -> None:
    page = open_page(example="six_tokens_trained")
    box = page.locator("#large image").bounding_box()
    assert box is not None
    page.locator("#large image").click(position={"x": box["width"] * 5.5 / 6, "y": box["height"] * 1.5 / 6})
    expect(page.locator("#readout")).to_contain_text("query 1 “\u2068journey\u2069”, key 5 “\u2068step\u2069”: 0.182")
    page.locator("#large").press("ArrowLeft")
    expect(page.locator("#row-title")).to_have_text("By hand: query 1 “\u2068journey\u2069” → key 4 “\u2068one\u2069”")
    page.locator("#row tr").nth(2).click()
    expect(page.locator("#row-title")).to_contain_text("starts")
    page.locator("#pipeline button[value=scores] canvas").click(position={"x": 3, "y": 3})
    expect(page.locator("#readout")).to_contain_text("query 1 “\u2068journey\u2069”, key 2 “\u2068starts\u2069”: ")
    assert "stage=scores" in page.url


def test_pointing_at_a_token_shows_its_lines_and_weights(open_page: Open) -> None:
    page = open_page(example="causal", num_heads=2, is_causal="true")
    lines = page.locator("#lines path")
    expect(lines).to_have_count(10)
    page.locator("#lines [data-axis=query][data-index='1']").hover()
    expect(lines).to_have_count(2)
    expect(page.locator("#lines [data-axis=key][data-index='0']")).to_contain_text("0.")
    expect(page.locator("#lines [data-axis=key][data-index='3']")).to_contain_text("0.000")
    page.locator("#all-heads").check()
    page.locator("#lines [data-axis=key][data-index='3']").focus()
    expect(lines).to_have_count(2)
    page.locator("#lines [data-axis=key][data-index='3']").click()
    assert "key=3" in page.url
    page.locator("#heads button").nth(1).click()
    assert "head=1" in page.url
