"""Pictures: their colours, stripes and read-outs, what stands there while the service computes, and what is kept."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from playwright.sync_api import Page, Route, expect

from tests.page.helpers import fill, numbers, paste_text, wait

Open = Callable[..., Page]
# Both tokens are alike in head 0. In head 1, each sees itself: 1 / (1 + exp(-9 / √2)) = 0.998.
TWO_HEADS = {"input": [[0, 0, 3, 0], [0, 0, 0, 3]], "num_heads": 2}
# The first key has exp(3) / (exp(3) + 2) = 0.909 of each row, the others 0.045 each.
FIRST_KEY = {"query": [[3], [3]], "key": [[1], [0], [0]], "value": [[1], [2], [3]], "scale": 1}


@pytest.fixture
def paste(open_page: Open) -> Callable[[dict[str, Any]], Page]:
    def paste_request(request: dict[str, Any]) -> Page:
        page = open_page()
        paste_text(page, json.dumps(request))
        length = len(request.get("query", request.get("input")))
        expect(page.locator("#status")).to_contain_text(f"{length} × ")
        return page

    return paste_request


def ends(page: Page) -> list[str]:
    """The numbers at both ends of the colours."""
    return page.locator("#large .range").all_text_contents()


def shown_numbers(page: Page) -> list[list[float]]:
    """The table of what is shown, without a click on a stage."""
    cells = "[...row.querySelectorAll('[data-value]')].map(cell => Number(cell.dataset.value))"
    rows: list[list[float]] = page.locator("#table").evaluate(f"table => [...table.rows].slice(1).map(row => {cells})")
    return rows


def first_colour(page: Page, head: int) -> list[int]:
    """Red, green and blue of the first cell of a head."""
    canvas = page.locator("#heads canvas").nth(head)
    pixel: list[int] = canvas.evaluate("canvas => [...canvas.getContext('2d').getImageData(0, 0, 1, 1).data]")
    return pixel[:3]


def test_all_heads_share_their_colours_unless_each_has_its_own(paste: Callable[[dict[str, Any]], Page]) -> None:
    page = paste(TWO_HEADS)
    yellow = [253, 231, 37]
    assert ends(page) == ["0.000", "0.998"]
    assert first_colour(page, 0) != yellow
    assert first_colour(page, 1) == yellow
    page.locator("#colours").select_option("head")
    assert ends(page) == ["0.000", "0.500"]
    assert first_colour(page, 0) == first_colour(page, 1) == yellow
    page.locator("#colours").select_option("unit")
    assert ends(page) == ["0.000", "1.000"]
    page.locator("#colours").select_option("log")
    assert ends(page) == ["9.98e−7", "0.998"]
    page.reload()
    expect(page.locator("#colours")).to_have_value("log")


def test_the_first_key_can_be_left_out_of_colours_and_lines(paste: Callable[[dict[str, Any]], Page]) -> None:
    page = paste(FIRST_KEY)
    assert ends(page) == ["0.000", "0.909"]
    expect(page.locator("#lines path")).to_have_count(6)
    page.locator("#first").check()
    assert ends(page) == ["0.000", "0.045"]
    expect(page.locator("#large g text[fill]", has_text="0.909").first).to_have_attribute("fill", "var(--ink)")
    expect(page.locator("#lines path")).to_have_count(4)


def test_labels_of_columns_are_turned_where_they_do_not_fit(paste: Callable[[dict[str, Any]], Page]) -> None:
    page = paste({"input": [[1, 0], [0, 1], [1, 1]], "query_tokens": ["I", "see", "you"]})
    labels = page.locator("#large [data-key]")
    expect(labels).to_have_text(["I", "see", "you"])
    assert not [one for one in labels.all() if "rotate" in (one.get_attribute("transform") or "")]
    boxes = [box for one in labels.all() if (box := one.bounding_box())]
    assert all(one["x"] + one["width"] < other["x"] for one, other in itertools.pairwise(boxes))
    paste_text(page, json.dumps({"input": [[1]] * 3, "query_tokens": ["representation"] * 3}))
    expect(labels.first).to_have_text("representation")
    assert all("rotate" in (one.get_attribute("transform") or "") for one in labels.all())


def test_stripes_of_two_causes_have_different_angles(open_page: Open) -> None:
    page = open_page(example="causal", is_causal="true", window__left=1)
    turns = {page.locator(f"#stripes-{cause}").get_attribute("patternTransform") for cause in ("window", "is_causal")}
    assert turns == {"rotate(45)", "rotate(135)"}
    marks = page.locator("#large rect[fill^='url(#stripes']").evaluate_all(
        "all => all.map(one => one.getAttribute('fill'))"
    )
    assert marks == ["url(#stripes-window)", "url(#stripes-is_causal)"], "as in the legend"


def test_a_cell_tells_its_number_when_pointed_at(open_page: Open) -> None:
    page = open_page(example="six_tokens_trained")
    box = page.locator("#large image").bounding_box()
    assert box is not None
    page.locator("#large image").hover(position={"x": box["width"] * 5.5 / 6, "y": box["height"] * 1.5 / 6})
    expect(page.locator("#hint")).to_contain_text("query 1 “\u2068journey\u2069”, key 5 “\u2068step\u2069”: 0.182")
    page.mouse.move(0, 0)
    expect(page.locator("#hint")).to_contain_text("Click a cell")


def test_the_former_picture_is_pale_while_a_slow_service_computes(open_page: Open) -> None:
    page = open_page(example="animals_self_attention")
    held: list[Route] = []
    page.route("**/attention", lambda route: held.append(route))
    page.locator("[name=is_causal]").check()
    pictures, image, status = (page.locator(name) for name in ("#pictures", "#large image", "#status"))
    expect(pictures).to_have_attribute("aria-busy", "true")
    expect(image).to_have_css("opacity", "0.25")
    expect(status).to_have_text("Computing …")
    held[0].continue_()
    expect(pictures).to_have_attribute("aria-busy", "false")
    expect(image).to_have_css("opacity", "1")
    expect(status).to_contain_text(" × ")


def test_a_service_that_does_not_answer_can_be_asked_again(open_page: Open) -> None:
    page = open_page(example="animals_self_attention")
    page.route("**/attention", lambda route: route.abort())
    page.locator("[name=is_causal]").check()
    problem = page.locator("#pictures > #problem")  # nothing is wrong with the option
    expect(problem).to_contain_text("The service does not answer.")
    page.unroute("**/attention")
    page.locator("#retry").click()
    expect(problem).to_be_hidden()
    expect(page.locator("#large .legend")).to_have_text(["hidden by the causal mask"])


def test_pictures_of_many_tokens_are_kept_while_the_choice_moves(open_page: Open) -> None:
    page = open_page(example="sentence", text=" ".join(f"t{n}" for n in range(300)), dim=8, query=200, key=100)
    pictures = page.evaluate_handle("[...document.querySelectorAll('canvas, #large svg, #lines svg')]")
    for key in ("ArrowUp", "ArrowLeft"):
        page.locator("#large").press(key)
    expect(page.locator("#readout")).to_contain_text("query 199 “\u2068t199\u2069”, key 99 “\u2068t99\u2069”")
    assert pictures.evaluate("all => all.length") == 13
    assert pictures.evaluate("all => all.every(one => one.isConnected)")
    expect(page.locator("#row [tabindex] th")).to_have_text("t99")
    expect(page.locator("#row tr")).to_have_count(130)  # 128 keys, how many more there are, the sum
    expect(page.locator("#lines [data-axis=query][aria-pressed=true]")).to_have_attribute("data-index", "199")
    fill(page, "scale", 0.5)
    assert not pictures.evaluate("all => all.some(one => one.isConnected)")


def test_what_an_option_changed_is_the_difference_of_the_weights(open_page: Open) -> None:
    page = open_page(example="causal")
    toggle = page.locator("#change")
    expect(toggle).to_be_hidden()
    first = np.array(numbers(page, "attention_weights"))
    page.locator("[name=is_causal]").set_checked(not page.locator("[name=is_causal]").is_checked())
    expect(toggle).to_be_visible()
    second = np.array(numbers(page, "attention_weights"))
    toggle.check()
    np.testing.assert_allclose(shown_numbers(page), second - first, rtol=0, atol=1e-15)
    expect(page.locator("#large-title")).to_have_text("Change of the weights")
    most = f"{np.abs(second - first).max():.3f}"
    assert ends(page) == [f"−{most}", most]
    fill(page, "scale", 1)
    fill(page, "scale", 12)
    third = np.array(numbers(page, "attention_weights"))
    toggle.check()
    np.testing.assert_allclose(shown_numbers(page), third - second, rtol=0, atol=1e-15)  # typing is one change
    toggle.uncheck()
    np.testing.assert_allclose(shown_numbers(page), third, rtol=1e-15)
    toggle.check()
    assert "stage" not in page.url, "a link has no weights before the option"
    page.locator("#example").select_option("six_tokens_trained")
    expect(toggle).to_be_hidden()
    expect(page.locator("#large-title")).to_have_text("Weights")


def test_without_a_difference_all_colours_are_neutral(open_page: Open) -> None:
    page = open_page(example="causal")
    fill(page, "softcap", 1)
    page.locator("[name=softcap]").fill("")
    wait(page)
    page.locator("#change").check()
    assert ends(page) == ["−1.000", "1.000"]
    fills = page.locator("#large g text[fill^='#']").evaluate_all(
        "all => [...new Set(all.map(one => one.textContent))]"
    )
    assert fills == ["0"]
    expect(page.locator("#large g text[fill='#fff']")).to_have_count(0)


def test_only_the_drawing_of_the_lines_that_are_shown_is_kept(open_page: Open) -> None:
    page = open_page(example="sentence", text=" ".join(f"t{n}" for n in range(300)), dim=8)
    drawn = page.evaluate_handle("new WeakRef(document.querySelector('#lines svg'))")
    page.locator("#large").press("ArrowDown")
    assert page.evaluate("drawn => drawn.deref() === document.querySelector('#lines svg')", drawn)
    for _ in range(130):
        page.locator("#large").press("ArrowDown")
    client = page.context.new_cdp_session(page)
    client.send("HeapProfiler.collectGarbage")
    assert page.evaluate("drawn => drawn.deref() === undefined", drawn)
