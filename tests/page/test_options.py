"""Options of a request that have no control: their effect on stages, on the arithmetic, and on what is hidden."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from playwright.sync_api import Page, expect

from tests.page.helpers import numbers, paste_text, wait
from tests.page.test_numbers import by_hand

Open = Callable[..., Page]
RANDOM = np.random.default_rng(3)
SOURCE = RANDOM.normal(size=(4, 6)).round(2)
PARTS = {"query": "query", "key": "present_key", "value": "present_value", "output": "output"}


@pytest.fixture
def paste(open_page: Open) -> Callable[..., Page]:
    """Opens the page with a request in JSON, and shows its weights."""

    def paste_request(**request: Any) -> Page:
        page = open_page()
        paste_text(page, json.dumps({"input": SOURCE.tolist(), **request}))
        expect(page.locator("#status")).to_contain_text("4 × ")
        return page

    return paste_request


def check_step(page: Page, title: str) -> str:
    """The calculation with this title, whose sides agree."""
    step = page.locator(f"#steps dt:text-is('{title}') + dd").inner_text()
    right = float(re.split("[=≈] ", step)[1].replace("−", "-"))
    assert by_hand(re.sub(r"\(\w+\)", "", step)) == pytest.approx(right, rel=1e-5, abs=1e-5), step
    return step


def weights(out: int, kind: str, heads: int = 0) -> dict[str, Any]:
    """A linear map of six features, with one matrix or one for each head, as weight or kernel."""
    matrix = RANDOM.normal(size=(heads, out // heads, 6) if heads else (out, 6)).round(2)
    bias = RANDOM.normal(size=out).round(2).tolist()
    return {kind: (matrix if kind == "weight" else matrix.swapaxes(-1, -2)).tolist(), "bias": bias}


@pytest.mark.parametrize("heads", [0, 2])
@pytest.mark.parametrize("kind", ["weight", "kernel"])
def test_projections_are_written_out(kind: str, heads: int, paste: Callable[..., Page]) -> None:
    maps = {name: weights(4, kind, heads) for name in ("query", "key", "value")}
    output = RANDOM.normal(size=(3, 4) if kind == "weight" else (4, 3)).round(2)
    page = paste(projection={**maps, "output": {kind: output.tolist()}}, num_heads=2)
    page.locator("#heads button").nth(1).click()
    for stage in PARTS.values():
        shown = numbers(page, stage)
        page.locator("#large").press("ArrowDown")
        page.locator("#large").press("ArrowRight")
        found = check_step(page, "Linear map")
        assert found.count("·") == (4 if stage == "output" else 6)
        row, column = re.findall(r"(?:query|key) (\d+) → feature (\d+)", page.locator("#row-title").inner_text())[0]
        shown_value = float(re.split("[=≈] ", found)[1].replace("−", "-"))
        assert shown_value == pytest.approx(shown[int(row)][int(column)], abs=1e-5)


def test_an_output_is_a_mean_of_values(paste: Callable[..., Page]) -> None:
    page = paste(num_heads=3)
    page.locator("#pipeline button[value=head_outputs]").click()
    page.locator("#heads button").nth(2).click()
    page.locator("#large").press("ArrowRight")
    assert check_step(page, "Weighted values").count("·") == 4
    for stage in ("query", "output"):
        page.locator(f"#pipeline button[value={stage}]").click()
        expect(page.locator("#steps dd")).to_have_text(re.compile(r"^−?\d\.\d{6}$"))


def test_a_gate_multiplies_what_a_head_returns(paste: Callable[..., Page]) -> None:
    gate = RANDOM.normal(size=(2, 4, 1)).round(2)
    page = paste(num_heads=2, gate=gate.tolist())
    page.locator("#pipeline button[value=output]").click()
    for _ in range(4):
        page.locator("#large").press("ArrowRight")
    page.locator("#large").press("ArrowDown")
    step = check_step(page, "Heads joined")
    assert f"·{gate[1, 1, 0]:g}".replace("-", "−") in step.replace("(", "").replace(")", "")


def test_numbers_behind_other_options_are_not_written_out(paste: Callable[..., Page]) -> None:
    page = paste(query_norm={"kind": "rms"}, rotary={"base": 100})
    page.locator("#pipeline button[value=query]").click()
    page.locator("#large").press("ArrowDown")
    expect(page.locator("#steps")).to_contain_text("after query_norm and rotary, not written out here")
    page.locator("#pipeline button[value=present_value]").click()
    expect(page.locator("#steps")).not_to_contain_text("not written out")
    page.locator("#pipeline button[value=attention_weights]").click()
    for title in ("Score", "Scaled", "Exponential", "Sum", "Weight"):
        check_step(page, title)


@pytest.mark.parametrize(
    "sinks", [[0.5, -1.0], [[0.5, 1.0, 1.5, 2.0], [-1.0, -2.0, -3.0, -4.0]]], ids=["head", "query"]
)
def test_sinks_take_their_part_of_the_row(sinks: Any, paste: Callable[..., Page]) -> None:
    mask = [[True] * 4, [True] * 4, [False] * 4, [True] * 4]
    page = paste(num_heads=2, sinks=sinks, mask=mask)
    page.locator("#heads button").nth(1).click()
    page.locator("#large").press("ArrowDown")
    for title in ("Exponential", "Weight"):
        check_step(page, title)
    logit = sinks[1] if len(np.shape(sinks)) == 1 else sinks[1][1]
    expect(page.locator("#row tr", has_text="sink")).to_contain_text(f"{logit:.4f}".replace("-", "−"))
    assert "(sink)" in check_step(page, "Sum")
    page.locator("#large").press("ArrowDown")
    expect(page.locator("#steps")).to_contain_text("hidden by the mask (false for this query and key)")
    cells = page.locator("#row .sum td").all_inner_texts()
    assert cells[4:6] == ["1.0000", "0.0000"]
    expect(page.locator("#row")).not_to_contain_text("∞1")
    expect(page.locator("#row th", has_text="sink")).to_have_count(1)


def test_keys_that_are_not_selected_say_so(paste: Callable[..., Page]) -> None:
    page = paste(selected_keys=[[0, 1], [1, -1], [2, 3], [0, 3]], is_causal=True)
    page.locator("#large").press("ArrowDown")
    expect(page.locator("#readout")).to_contain_text("hidden by selected keys (the key is not one of those")
    expect(page.locator("#large .legend")).to_have_text(["hidden by the causal mask", "hidden by selected keys"])
    marks = [page.locator(f"#large rect[fill='url(#stripes-{cause})']") for cause in ("is_causal", "selected_keys")]
    assert [mark.count() for mark in marks] == [1, 1]
    texts = page.locator("#large text").all_inner_texts()
    assert "0.000" not in texts, "a hidden cell has no number"


def test_a_typed_offset_is_a_number(paste: Callable[..., Page]) -> None:
    offset = {"dtype": "int64", "shape": [1], "data": "AQAAAAAAAAA="}
    page = paste(input=[SOURCE.tolist()], query_offset=offset, is_causal=True)
    page.locator("#large").press("ArrowRight")
    page.locator("#large").press("ArrowRight")
    expect(page.locator("#readout")).to_contain_text("key 2 comes after position 1")


def test_windows_end_at_the_last_key(paste: Callable[..., Page]) -> None:
    page = paste(window={"left": 0}, key_tokens=["a", "b", "c", "d"])
    page.locator("#large").press("ArrowDown")
    expect(page.locator("#readout")).to_contain_text("only keys 1 “\u2068b\u2069” to 3 “\u2068d\u2069”")


def test_each_batch_entry_can_be_chosen(open_page: Open) -> None:
    page = open_page()
    paste_text(page, json.dumps({"input": [SOURCE.tolist(), (2 * SOURCE).tolist()]}))
    expect(page.locator("#batch-label")).to_be_visible()
    first = numbers(page, "query")
    page.locator("#batch").fill("1")
    assert numbers(page, "query") == (2 * np.array(first)).tolist()


def test_a_small_rotation_has_no_arithmetic(paste: Callable[..., Page]) -> None:
    identity = {"weight": np.eye(6).tolist()}
    rotary = {"base": 1e12, "query_positions": [0] * 4, "key_positions": [0] * 4}
    page = paste(projection={"query": identity, "key": identity}, rotary=rotary)
    for stage in ("query", "present_key"):
        page.locator(f"#pipeline button[value={stage}]").click()
        expect(page.locator("#steps")).to_contain_text("after rotary, not written out here")
        expect(page.locator("#steps dd")).not_to_contain_text("·")


def test_gates_near_one_are_written_out(paste: Callable[..., Page]) -> None:
    gate = [[[0.99], [0.985], [0.995], [0.999]]] * 2
    output = {"weight": RANDOM.normal(size=(3, 6)).round(2).tolist(), "bias": [1, 2, 3]}
    page = paste(num_heads=2, gate=gate, projection={"output": output})
    page.locator("#pipeline button[value=output]").click()
    page.locator("#large").press("ArrowDown")
    step = check_step(page, "Linear map")
    assert step.count("·0.985") == 6
    assert step.count("·") == 12
    page = paste(num_heads=2, projection={"gate": {"weight": (9 + 0 * SOURCE[:2]).tolist()}, "output": output})
    page.locator("#pipeline button[value=output]").click()
    expect(page.locator("#steps")).to_contain_text("not written out here")


@pytest.mark.parametrize(("offset", "place"), [(9, "9"), (-3, "−3")])
def test_a_window_outside_the_keys_sees_no_key(offset: int, place: str, paste: Callable[..., Page]) -> None:
    page = paste(window={"left": 0, "right": 0}, query_offset=offset)
    expect(page.locator("#readout")).to_contain_text(f"hidden by the window (from position {place} only no key)")


def test_a_sum_of_zero_divides_nothing(open_page: Open) -> None:
    page = open_page()
    request = {"query": [[1, 0]], "key": [[1, 0], [-1, 0]], "value": [[1, 0], [0, 1]], "normalization": "sum"}
    paste_text(page, json.dumps(request | {"query_offset": 0}))
    expect(page.locator("#status")).to_contain_text("1 × 2")
    expect(page.locator("#steps")).to_contain_text("Weight0 by definition, as the sum is 0")


def test_weights_of_half_types_are_rounded_to_them(paste: Callable[..., Page]) -> None:
    page = paste(dtype="bfloat16", num_heads=2)
    page.locator("#large").press("ArrowDown")
    steps = page.locator("#steps")
    expect(steps.locator("dt:text-is('Weight') + dd")).to_have_text(re.compile(r", rounded to bfloat16: 0\.\d+$"))
    for title in ("Score", "Scaled"):
        expect(steps.locator(f"dt:text-is('{title}') + dd")).not_to_have_text(re.compile("≈"))
    check_step(page, "Exponential")
    page.locator("#pipeline button[value=query]").click()
    expect(steps).to_contain_text("rounded to bfloat16")


def test_past_keys_are_as_sent(paste: Callable[..., Page]) -> None:
    past = RANDOM.normal(size=(1, 2, 6)).round(2).tolist()
    page = paste(past_key=past, past_value=past, rotary={})
    for stage in ("present_key", "present_value"):
        page.locator(f"#pipeline button[value={stage}]").click()
        expect(page.locator("#steps")).to_contain_text("From the past")
        expect(page.locator("#steps")).to_contain_text(f"{past[0][0][0]:.6f}, as sent".replace("-", "−"))


def test_what_is_added_to_scores_has_a_name(paste: Callable[..., Page]) -> None:
    page = paste(num_heads=2, bias=[1, 2, 3, 4], alibi_slopes=[0.5, 0.25])
    assert re.split(" [=≈]", check_step(page, "Masked"))[0].endswith("+ 1 (bias) (alibi_slopes)")


def test_what_keys_of_distances_add_to_a_score_stands_beside_its_products(paste: Callable[..., Page]) -> None:
    """The products of query and key alone are not the score: each side is computed anew."""
    page = paste(relative_keys={"key": [[1.5] * SOURCE.shape[1]]})
    terms = re.split(" [=≈]", check_step(page, "Score, with relative_keys"))[0].split(" + ")
    assert len(terms) == SOURCE.shape[1] + 1


def test_the_exponential_of_zero_is_one(paste: Callable[..., Page]) -> None:
    page = paste(input=[[1 / 3, 0], [0, 0], [0, 0], [0, 0]])
    expect(page.locator("#steps dt:text-is('Exponential') + dd")).to_have_text(re.compile(" = 1$"))


@pytest.mark.parametrize(
    ("request_", "layout", "output"),
    [
        ({"layout": "hld", "input": [SOURCE.tolist(), SOURCE.tolist()]}, "hld", "of each head"),
        ({"layout": "bdl", "input": [SOURCE.tolist()]}, "bdl", "heads joined"),
        ({"projection": {"output": {"weight": np.eye(SOURCE.shape[1]).tolist()}}}, "ld", "joined · output map"),
    ],
)
def test_layout_and_output_say_what_they_are(
    request_: dict[str, Any], layout: str, output: str, open_page: Open
) -> None:
    page = open_page()
    paste_text(page, json.dumps({"input": SOURCE.tolist()} | request_))
    wait(page)
    select = page.locator("[name=layout]")
    expect(select).to_have_value(layout)
    assert select.is_disabled() == (layout != "ld")
    expect(page.locator("#pipeline [value=output] small")).to_have_text(output)
    page.locator("#example").select_option("causal")
    expect(select).to_have_value("ld")
    expect(select).to_be_enabled()


def test_capped_scores_are_a_step_by_hand(open_page: Open) -> None:
    """Scores 1 · 3 and 1 · 0, softcap 2: 2 · tanh(1.5) = 1.8103, and exp(-1.8103) = 0.16361 for the other key."""
    page = open_page()
    request = {"query": [[1]], "key": [[3], [0]], "value": [[1], [2]], "scale": 1, "softcap": 2, "query_offset": 0}
    paste_text(page, json.dumps(request))
    expect(page.locator("#steps")).to_contain_text("2 · tanh(3 / 2) ≈ 1.810297")
    expect(page.locator("#steps")).to_contain_text("1 / 1.163606 ≈ 0.859398")
    head = page.locator("section:has(#row) thead th").all_inner_texts()
    assert head == ["key", "score", "scaled", "capped", "masked", "exp(· − max)", "weight", "weight · v"]
    first = page.locator("#row tr").first.locator("td").all_inner_texts()
    assert first == ["3.0000", "3.0000", "1.8103", "1.8103", "1.0000", "0.8594", "0.859"]
    page.locator("[name=softcap]").fill("")
    expect(page.locator("section:has(#row) th", has_text="capped")).to_be_hidden()


def test_labels_of_queries_stand_at_as_many_keys(open_page: Open) -> None:
    """Of a query, key and value as of an input, unless the keys are of a context."""
    page = open_page()
    rows = [[1, 0], [0, 1]]
    for request, name in (
        ({"query": rows, "key": rows, "value": rows}, "0 “\u2068a\u2069”"),
        ({"input": rows, "context": rows}, "0:"),
        ({"input": rows}, "0 “\u2068a\u2069”"),
    ):
        paste_text(page, json.dumps({**request, "query_tokens": ["a", "b"]}))
        expect(page.locator("#readout")).to_contain_text(f"key {name}")
