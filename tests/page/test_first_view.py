"""What a newcomer sees: a trained head, lessons by name, few controls, help for each, pictures before options."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

import pytest
from playwright.sync_api import Page, expect

from attention_service.routes.page import FOLDER
from tests.page.helpers import fill, wait

Open = Callable[..., Page]
EXAMPLES = json.loads((FOLDER / "examples.json").read_text(encoding="utf-8"))
LESSONS = [name for name, example in EXAMPLES.items() if "text" in example]
MOST_CONTROLS = 10
FRONT = ["num_heads", "scale", "softcap", "is_causal", "key_lengths"]
REST = ["layout", "window.left", "window.right", "query_offset", "chunk_size", "query_norm.kind", "key_norm.kind",
        "value_norm.kind", "normalization", "dtype"]  # fmt: skip


def test_the_first_example_is_a_trained_head_at_its_cell(open_page: Open) -> None:
    page = open_page()
    expect(page.locator("#example")).to_have_value("trained_head")
    expect(page.locator("#status")).to_contain_text("14 × 14 · 4 heads")
    expect(page.locator("#readout")).to_contain_text("query 9 “\u2068it\u2069”, key 2 “\u2068animal\u2069”: 0.65")
    expect(page.locator("#lesson")).to_have_text(EXAMPLES["trained_head"]["text"])
    assert page.url.endswith("/#example=trained_head")


def test_examples_stand_in_groups_the_lessons_first(open_page: Open) -> None:
    page = open_page()
    groups = page.locator("#example optgroup").evaluate_all(
        "groups => groups.map(group => [group.label, [...group.children].map(option => option.value)])"
    )
    notebooks = [name for name in EXAMPLES if name not in LESSONS]
    assert groups == [["Lessons", LESSONS], ["Yours", ["sentence", "data"]], ["From the notebooks", notebooks]]


@pytest.mark.parametrize("name", LESSONS)
def test_a_lesson_shows_its_text_and_what_it_is_about(name: str, open_page: Open) -> None:
    page = open_page()
    page.evaluate("performance.clearMeasures()")
    page.locator("#example").select_option("causal")
    wait(page)
    expect(page.locator("#lesson")).to_be_hidden()
    page.locator("#example").select_option(name)
    expect(page.locator("#lesson")).to_have_text(EXAMPLES[name]["text"])
    choice = EXAMPLES[name].get("choice", {})
    chosen = page.locator(f"#pipeline button[value={choice.get('stage', 'attention_weights')}]")
    expect(chosen).to_have_attribute("aria-pressed", "true")
    expect(page.locator("#readout")).to_have_text(
        re.compile(rf"^query {choice.get('query', 0)}\b.*key {choice.get('key', 0)}\b")
    )
    expect(page.locator("#problem")).to_be_hidden()


def test_a_link_keeps_the_cell_that_was_chosen_in_a_lesson(open_page: Open) -> None:
    """The first row and column, too, which are not those of the lesson."""
    page = open_page()
    page.locator("#large image").click(position={"x": 2, "y": 2})
    readout = page.locator("#readout")
    expect(readout).to_contain_text("query 0 “\u2068[CLS]\u2069”, key 0")
    page.reload()
    wait(page)
    expect(readout).to_contain_text("query 0 “\u2068[CLS]\u2069”, key 0")
    page.locator("#example").select_option("positions")
    expect(readout).to_contain_text("query 0 “\u2068la\u2069”, key 1")
    assert page.url.endswith("/#example=positions")


def test_few_controls_are_visible_at_first(open_page: Open) -> None:
    """Those of the request, without the buttons of help."""
    page = open_page()
    controls = page.locator(":is(#source, aside) :is(input, select, textarea, summary, button:not(.help)):visible")
    assert 6 <= controls.count() <= MOST_CONTROLS
    names = page.locator("#options [name]:visible").evaluate_all("all => all.map(one => one.name)")
    assert names == FRONT
    page.locator("#more summary").click()
    names = page.locator("#options [name]:visible").evaluate_all("all => all.map(one => one.name)")
    assert names == FRONT + REST


SETS = {"window.left": 1, "query_offset": 2, "layout": "dl", "key_norm.kind": "rms", "dtype": "float32"}


@pytest.mark.parametrize("name", SETS)
def test_more_is_open_where_a_link_sets_one_of_its_options(name: str, open_page: Open) -> None:
    page = open_page(example="causal_mask", num_heads=2, softcap=3)
    expect(page.locator("[name=softcap]")).to_have_value("3")
    expect(page.locator(f"[name='{name}']")).to_be_hidden()
    page = open_page(example="causal_mask", **{name: SETS[name]})
    expect(page.locator(f"[name='{name}']")).to_be_visible()
    expect(page.locator(f"[name='{name}']")).to_have_value(str(SETS[name]))


def test_more_opens_for_an_example_and_for_an_error(open_page: Open) -> None:
    page = open_page()
    expect(page.locator("[name=layout]")).to_be_hidden()
    page.locator("#example").select_option("multihead")
    expect(page.locator("[name=layout]")).to_be_visible()
    page = open_page()
    page.locator("#example").select_option("data")
    page.locator("#pasted").fill('{"input": [[1]], "chunk_size": "x"}')
    expect(page.locator("[name=chunk_size] + .fault")).to_be_visible()


def test_each_option_has_a_sentence_and_a_formula(open_page: Open) -> None:
    """By the keyboard: Enter opens the help, Escape closes it, and the focus stays at its button."""
    page = open_page(example="causal_mask", window__left=1)
    for name in FRONT + REST:
        check_help(page, name)


def check_help(page: Page, name: str) -> None:
    option = page.locator(f".option:has([name='{name}'])")
    button, text = option.get_by_role("button", name="Help: "), option.locator("[popover]")
    label = option.locator("label").evaluate("label => label.firstChild.textContent || label.textContent")
    named = (button.get_attribute("aria-label") or "").removeprefix("Help: ")
    assert re.split(": ", label.strip())[0].startswith(named)
    expect(text).to_be_hidden()
    button.press("Enter")
    expect(text).to_be_visible()
    expect(text).to_have_text(re.compile(r"^[A-Z].*\. "))
    expect(text.locator("code")).not_to_be_empty()
    box, width = text.bounding_box(), page.evaluate("innerWidth")
    assert box is not None
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= width
    page.keyboard.press("Escape")
    expect(text).to_be_hidden()
    expect(button).to_be_focused()


def test_the_scale_is_explained_as_a_temperature(open_page: Open) -> None:
    page = open_page()
    page.get_by_role("button", name="Help: Scale").click()
    expect(page.locator("[popover]:popover-open")).to_contain_text("temperature")


def test_padding_is_the_number_of_keys_that_count(open_page: Open) -> None:
    page = open_page(example="six_tokens_all_pairs")
    shown, slider = page.locator("#padding"), page.locator("[name=key_lengths]")
    expect(shown).to_have_text("all 6 keys count")
    expect(slider).to_have_value("6")
    assert "key_lengths" not in page.url
    fill(page, "key_lengths", 2)
    expect(shown).to_have_text("2 of 6 keys count")
    expect(page.locator("#large .legend")).to_have_text(["hidden by key padding"])
    assert "key_lengths=2" in page.url
    page.reload()
    wait(page)
    expect(shown).to_have_text("2 of 6 keys count")
    fill(page, "key_lengths", 6)
    expect(page.locator("#large .legend")).to_have_count(0)
    assert "key_lengths" not in page.url
    page.locator("#example").select_option("padding")
    expect(shown).to_have_text("4 of 6 keys count")


def test_the_padding_of_a_batch_stays_as_sent(open_page: Open) -> None:
    page = open_page()
    page.locator("#example").select_option("data")
    page.locator("#pasted").fill('{"input": [[[1], [2], [3]], [[1], [2], [3]]], "key_lengths": [1, 2]}')
    expect(page.locator("#status")).to_contain_text("3 × 3")
    expect(page.locator("[name=key_lengths]")).to_be_disabled()
    expect(page.locator("#padding")).to_have_text("as the request has it for each entry")
    expect(page.locator("#row .sum td").nth(5)).to_have_text("1.0000")


@pytest.mark.parametrize("width", [390, 1024])
def test_the_chosen_stage_is_in_view(width: int, open_page: Open) -> None:
    """The strip of stages scrolls, and the page does not."""
    page = open_page()
    page.set_viewport_size({"width": width, "height": 844})
    inside = """button => {
      const [own, strip] = [button, button.closest("ol")].map(part => part.getBoundingClientRect());
      return own.left >= strip.left && own.right <= strip.right && scrollY === 0;
    }"""
    for name, stage in {"gradient": "grad_masked_scores", "causal_mask": "attention_weights"}.items():
        page.locator("#example").select_option(name)
        chosen = page.locator(f"#pipeline [value={stage}]")
        expect(chosen).to_have_attribute("aria-pressed", "true")
        assert chosen.evaluate(inside)


def test_on_a_phone_the_picture_comes_before_the_options(open_page: Open) -> None:
    """For the eye and for the tab key."""
    page = open_page()
    page.set_viewport_size({"width": 390, "height": 844})
    tops = [page.locator(part).bounding_box() for part in ("#example", "#pipeline", "#large", "#options", "#share")]
    ys = [box["y"] for box in tops if box]
    assert len(ys) == 5
    assert ys == sorted(ys)
    assert ys[2] < 844, "the large picture begins on the first screen"
    page.locator("#example").focus()
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.closest('#pipeline') !== null")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
