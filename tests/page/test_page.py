"""The page as a whole: its types, its accessibility, its sizes on screens, long sequences."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from attention_service.attention.terms import CAUSES
from attention_service.render.colours import DIVERGING, SEQUENTIAL
from tests.page.helpers import wait

Open = Callable[..., Page]
HERE = Path(__file__).parent
AXE = HERE / "node_modules" / "axe-core" / "axe.min.js"
VIEWS = {"desktop": (1440, 900), "phone": (390, 844)}


def test_the_modules_have_sound_types() -> None:
    done = subprocess.run(
        [HERE / "node_modules" / ".bin" / "tsc", "-p", HERE], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout


def test_the_colours_are_those_of_the_pictures_of_the_service() -> None:
    text = (HERE.parents[1] / "service" / "attention_service" / "page" / "page.css").read_text(encoding="utf-8")
    for anchors in (SEQUENTIAL, DIVERGING):
        assert ", ".join(anchors) in text
    for name, cause in CAUSES.items():
        assert f"--{name}: {cause.tint};" in text


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("view", VIEWS)
def test_axe_finds_nothing_serious(browser: Browser, view: str, theme: str, address: str) -> None:
    """The checker is run by the debugger, which the policy of the page does not bind."""
    width, height = VIEWS[view]
    context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=theme)  # type: ignore[arg-type]
    page = context.new_page()
    page.goto(f"{address}/#example=sentence&num_heads=2&is_causal=true&window.left=3")
    wait(page)
    page.locator("#numbers summary").click()
    page.locator("#compare-title").click()
    page.locator("#share > summary").click()
    page.locator("[popovertarget='help-softcap']").click()
    page.locator("[name=chunk_size]").fill("0")
    expect(page.locator(".fault")).to_have_count(1)
    page.evaluate(AXE.read_text(encoding="utf-8"))
    result = page.evaluate("axe.run(document, {resultTypes: ['violations']})")
    found = [
        f"{violation['impact']}: {violation['help']}: {[node['html'][:200] for node in violation['nodes'][:3]]}"
        for violation in result["violations"]
        if violation["impact"] in ("serious", "critical")
    ]
    assert found == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width, "nothing is cut off on the right"
    context.close()


def test_the_theme_can_be_switched(open_page: Open) -> None:
    page = open_page()
    background = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(background)
    expect(page.get_by_label("dark")).to_have_id("theme")
    page.locator("#theme").check()
    assert page.evaluate(background) != light
    page.locator("#theme").uncheck()
    assert page.evaluate(background) == light


def test_older_requests_are_aborted(open_page: Open) -> None:
    """Of many changes in a row only the last is painted."""
    page = open_page(example="causal")
    for value in range(1, 20):
        page.locator("[name=softcap]").fill(str(value))
    wait(page)
    expect(page.locator("#steps")).to_contain_text("19 · tanh")


def test_all_columns_and_stages_fit_a_laptop(open_page: Open) -> None:
    """On a phone a shadow shows that there is more."""
    page = open_page(example="causal", num_heads=2)
    page.set_viewport_size({"width": 1280, "height": 900})
    hidden = "part => [part.scrollWidth - part.clientWidth, getComputedStyle(part).backgroundImage]"
    scrolled = [page.locator("#pipeline"), page.locator(".scroll:has(#row)")]
    assert [part.evaluate(hidden)[0] for part in scrolled] == [0, 0]
    page.set_viewport_size({"width": 390, "height": 844})
    for part in scrolled:
        cut, shadow = part.evaluate(hidden)
        assert cut > 0
        assert "gradient" in shadow


def test_beside_a_softcap_and_a_mask_a_row_by_hand_has_one_line_and_all_numbers_to_the_weight(open_page: Open) -> None:
    """Its products with 32 features, a line for each of eight, are reached by scrolling inside."""
    page = open_page(example="trained_head", softcap=3, is_causal="true")
    page.set_viewport_size({"width": 1400, "height": 900})
    box = page.locator(".scroll:has(#row)").bounding_box()
    weight = page.locator("#row tr td:nth-child(7)").first.bounding_box()
    assert box is not None
    assert weight is not None
    assert weight["x"] + weight["width"] <= box["x"] + box["width"]
    assert weight["height"] < 30
    assert page.evaluate("document.documentElement.scrollWidth") <= 1400
