"""What everybody can use: without a mouse, at 200 % zoom, with a screen reader, on paper, and in older browsers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest
from playwright.sync_api import Browser, Page, Route, expect

from tests.page.helpers import fill, open_details, paste_text, wait

Open = Callable[..., Page]
HERE: Final = Path(__file__).parent
AXE: Final = HERE / "node_modules" / "axe-core" / "axe.min.js"


def zoomed(page: Page) -> None:
    paste_text(page, json.dumps({"input": [[n % 7, n % 5] for n in range(600)], "is_causal": True}))
    wait(page)
    page.locator("#long-query").fill("400")
    page.evaluate("performance.clearMeasures()")
    page.locator("#long-window button").first.click()
    wait(page)


def overview(page: Page) -> None:
    zoomed(page)
    page.locator("#zoom-out").click()
    expect(page.locator("#long-overview")).to_be_visible()


def difference(page: Page) -> None:
    fill(page, "is_causal", True)
    page.locator("#change").check()
    page.locator("#numbers summary").click()
    open_details(page, "share")
    page.locator("#save-options summary").click()


def comparison(page: Page) -> None:
    page.evaluate("performance.clearMeasures()")
    page.locator("#example").select_option("six_tokens_trained")
    wait(page)
    page.locator("#compare-title").click()
    page.locator("#actual").fill(json.dumps({"output": [[0.1, 0.2]] * 6}))
    page.locator("#compare button").click()
    expect(page.locator("#difference svg")).to_be_visible()


def own_data(page: Page) -> None:
    paste_text(page, '{"input": [[1, 2], [3, 4]], "num_heads": 2}')
    wait(page)


def error(page: Page) -> None:
    paste_text(page, '{"input": [[1')
    expect(page.locator("#problem")).to_be_visible()


def busy(page: Page) -> None:
    held: list[Route] = []
    page.route("**/attention", lambda route: held.append(route))
    page.locator("[name=is_causal]").check()
    expect(page.locator("#status")).to_have_text("Computing …")


STATES: Final = (zoomed, overview, difference, comparison, own_data, error, busy)


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("state", STATES)
def test_axe_finds_nothing_serious_in_any_state(
    browser: Browser, state: Callable[[Page], None], theme: str, address: str
) -> None:
    """The checker is run by the debugger, which the policy of the page does not bind."""
    context = browser.new_context(viewport={"width": 1440, "height": 900}, color_scheme=theme)  # type: ignore[arg-type]  # one of its names
    page = context.new_page()
    page.goto(address)
    wait(page)
    state(page)
    page.evaluate(AXE.read_text(encoding="utf-8"))
    result = page.evaluate("axe.run(document, {resultTypes: ['violations']})")
    assert [
        f"{violation['impact']}: {violation['help']}: {[node['html'][:200] for node in violation['nodes'][:3]]}"
        for violation in result["violations"]
        if violation["impact"] in ("serious", "critical")
    ] == []
    context.close()


@pytest.mark.parametrize("state", [zoomed, difference, comparison])
def test_a_zoom_of_200_percent_hides_nothing(browser: Browser, state: Callable[[Page], None], address: str) -> None:
    context = browser.new_context(viewport={"width": 700, "height": 450}, device_scale_factor=2)
    page = context.new_page()
    page.goto(address)
    wait(page)
    state(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= 700
    cut = """() => [...document.querySelectorAll('main *')].filter(part => {
        const {left, right, width} = part.getBoundingClientRect();
        return width && (left < -1 || right > 701) && !part.closest('.scroll, #pipeline');
    }).map(part => part.outerHTML.slice(0, 80))"""
    assert page.evaluate(cut) == [], "what is wider scrolls by itself"
    context.close()


def focus_by_tab(page: Page, selector: str) -> None:
    """Presses Tab until an element has the focus."""
    for _ in range(80):
        page.keyboard.press("Tab")
        if page.evaluate("selector => document.activeElement.matches(selector)", selector):
            return
    raise AssertionError(f"{selector} was not reached")


def test_the_keyboard_reaches_rows_and_tokens(open_page: Open) -> None:
    page = open_page(example="six_tokens_trained")
    for selector in ("#pipeline button", "#large", "#colours", "#heads button"):
        focus_by_tab(page, selector)
    focus_by_tab(page, "#row tr")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")
    expect(page.locator("#readout")).to_contain_text("query 0 “\u2068Your\u2069”, key 2 “\u2068starts\u2069”")
    assert page.evaluate("document.activeElement.dataset.key") == "2"
    focus_by_tab(page, "#lines [data-axis=query]")
    page.keyboard.press("ArrowDown")
    expect(page.locator("#readout")).to_contain_text("query 1 “\u2068journey\u2069”, key 2")
    assert page.evaluate("[document.activeElement.dataset.axis, document.activeElement.dataset.index]") == [
        "query",
        "1",
    ]
    expect(page.locator("#lines path")).to_have_count(6)  # its own lines
    focus_by_tab(page, "#lines [data-axis=key]")
    page.keyboard.press("ArrowUp")
    expect(page.locator("#readout")).to_contain_text("key 1")


def test_arrow_keys_move_the_choice_and_not_the_page(open_page: Open) -> None:
    page = open_page(example="six_tokens_trained")
    page.set_viewport_size({"width": 1000, "height": 400})
    page.locator("#large").focus()
    before = page.evaluate("scrollY")
    for _ in range(5):
        page.keyboard.press("ArrowDown")
    assert page.evaluate("scrollY") == before
    expect(page.locator("#readout")).to_contain_text("query 5")


PRINTED: Final = [{"example": "trained_head"}, {"example": "trained_head", "is_causal": "true", "softcap": 3},
                  *({"example": example} for example in ("six_tokens_trained", "sentence", "causal"))]  # fmt: skip


@pytest.mark.parametrize("fields", PRINTED, ids=lambda fields: " ".join(map(str, fields.values())))
def test_an_example_is_printed_on_one_page(fields: dict[str, object], open_page: Open, folder: Path) -> None:
    page = open_page(**fields)
    page.locator("#theme").check()
    pdf = page.pdf(prefer_css_page_size=True)
    assert pdf.count(b"/Type /Page\n") == 1
    assert b"/MediaBox [0 0 594.95996 841.91998]" in pdf, "A4"
    page.emulate_media(media="print")
    for hidden in ("#source", "aside", "#theme", "#colours", "#compare-title"):
        expect(page.locator(hidden)).to_be_hidden()
    for shown in ("#large svg", "#table td >> nth=1", "#row tr >> nth=0"):
        expect(page.locator(shown)).to_be_visible()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert page.evaluate("getComputedStyle(document.body).color") == "rgb(0, 0, 0)"
    picture = page.locator("#large svg").bounding_box()
    assert picture is not None
    assert picture["height"] >= 100, "large enough to be read"
    cells = page.locator("#table").evaluate("table => table.getBoundingClientRect().right")
    assert cells <= page.locator("section:has(#table)").evaluate("part => part.getBoundingClientRect().right")


def test_a_browser_that_cannot_run_the_page_is_told_so(browser: Browser, address: str) -> None:
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(address)
    expect(page.locator(".old")).to_have_css("visibility", "visible")
    expect(page.locator(".old")).to_have_text("This page needs JavaScript, and a browser of 2024 or later.")
    context.close()
    context = browser.new_context()
    page = context.new_page()
    page.add_init_script("delete HTMLElement.prototype.popover")
    page.goto(address)
    expect(page.locator(".old")).to_have_css("visibility", "visible")
    context.close()


def test_a_browser_that_runs_the_page_is_told_nothing(open_page: Open) -> None:
    expect(open_page().locator(".old")).to_have_count(0)
