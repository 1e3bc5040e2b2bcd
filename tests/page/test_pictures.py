"""Pictures: their colours, stripes and read-outs, what stands there while the service computes, and what is kept."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from playwright.sync_api import Page, Route, expect

from tests.page.helpers import fill, paste_text

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
    first, last = page.locator("#range").inner_text().split()
    return [first, last]


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
    expect(page.locator("#lines path")).to_have_count(4)


def test_stripes_of_two_causes_have_different_angles(open_page: Open) -> None:
    page = open_page(example="causal", is_causal="true", window__left=1)
    turns = {page.locator(f"#stripes-{cause}").get_attribute("patternTransform") for cause in ("window", "is_causal")}
    assert turns == {"rotate(45)", "rotate(135)"}
    samples = page.locator("#legend i").evaluate_all("all => all.map(one => getComputedStyle(one).backgroundImage)")
    assert [text[len("repeating-linear-gradient(") :].split(",")[0] for text in samples] == ["135deg", "225deg"]


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
    pictures, short, status = (page.locator(name) for name in ("#pictures", "#short", "#status"))
    expect(pictures).to_have_attribute("aria-busy", "true")
    expect(short).to_have_css("opacity", "0.4")
    expect(status).to_have_text("Computing …")
    held[0].continue_()
    expect(pictures).to_have_attribute("aria-busy", "false")
    expect(short).to_have_css("opacity", "1")
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
    expect(page.locator("#legend li")).to_have_text(["hidden by is_causal"])


def test_pictures_of_many_tokens_are_kept_while_the_choice_moves(open_page: Open) -> None:
    page = open_page(example="sentence", text=" ".join(f"t{n}" for n in range(300)), dim=8, query=200, key=100)
    pictures = page.evaluate_handle("[...document.querySelectorAll('canvas, #large svg, #lines svg')]")
    for key in ("ArrowUp", "ArrowLeft"):
        page.locator("#large").press(key)
    expect(page.locator("#readout")).to_contain_text("query 199 “\u2068t199\u2069”, key 99 “\u2068t99\u2069”")
    assert pictures.evaluate("all => all.length") == 13
    assert pictures.evaluate("all => all.every(one => one.isConnected)")
    expect(page.locator("#row .chosen th")).to_have_text("t99")
    expect(page.locator("#row tr")).to_have_count(130)  # 128 keys, how many more there are, the sum
    expect(page.locator("#lines [data-axis=query][aria-pressed=true]")).to_have_attribute("data-index", "199")
    fill(page, "scale", 0.5)
    assert not pictures.evaluate("all => all.some(one => one.isConnected)")
