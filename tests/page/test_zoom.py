"""Long sequences: a picture by the service, and windows of it with all numbers."""

from __future__ import annotations

import base64
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from playwright.sync_api import BrowserContext, Page, Request, expect

from tests.page.helpers import fill, numbers, paste_text, wait

Open = Callable[..., Page]


def open_long(page: Page, request: dict[str, Any]) -> list[Request]:
    """Pastes a long request, waits for its picture, and returns the requests for pictures as they come."""
    pictures: list[Request] = []
    page.on("request", lambda request: pictures.append(request) if "attention/heatmap" in request.url else None)
    paste_text(page, json.dumps(request))
    wait(page)
    expect(page.locator("#long-overview")).to_be_visible()
    page.wait_for_function("() => document.getElementById('long-image').naturalWidth > 0")
    return pictures


def cells(page: Page, picture: Request) -> list[float]:
    """Where the cells of the picture are on the screen: left, top, width, height."""
    headers = {"Content-Type": "application/json", "Accept": "image/svg+xml"}
    text = httpx.post(picture.url, content=picture.post_data_buffer or b"", headers=headers, timeout=120).text
    found = re.search(r'<image x="(.*?)" y="(.*?)" width="(.*?)" height="(?!10")(.*?)"', text)
    box = page.locator("#long-image").bounding_box()
    assert found
    assert box
    zoom = page.locator("#long-image").evaluate("image => image.clientWidth / image.naturalWidth")
    x, y, width, height = (zoom * float(part) for part in found.groups())
    return [box["x"] + x, box["y"] + y, width, height]


def drag(page: Page, picture: Request, start: tuple[float, float], end: tuple[float, float]) -> None:
    """Drags a rectangle between two shares of the picture, each across and down."""
    left, top, width, height = cells(page, picture)
    page.evaluate("performance.clearMeasures()")
    page.mouse.move(left + start[0] * width, top + start[1] * height)
    page.mouse.down()
    page.mouse.move(left + end[0] * width, top + end[1] * height, steps=4)
    expect(page.locator("#brush")).to_be_visible()
    page.mouse.up()
    wait(page)


def type_window(page: Page, query: int, key: int) -> None:
    """Zooms by the keyboard."""
    page.locator("#long-query").fill(str(query))
    page.locator("#long-key").fill(str(key))
    page.evaluate("performance.clearMeasures()")
    page.locator("#long-key").press("Enter")
    wait(page)


def chosen(page: Page) -> list[int]:
    """The indices of the chosen query and key."""
    return [int(number) for number in re.findall(r"(?:query|key) (\d+)", page.locator("#readout").inner_text())]


@pytest.fixture(scope="module")
def request_of_900() -> dict[str, Any]:
    array = np.random.default_rng(2).normal(size=(900, 6)).round(3)
    return {"input": array.tolist(), "num_heads": 2, "is_causal": True, "softcap": 3}


def test_a_dragged_rectangle_shows_its_cells(
    open_page: Open, service: httpx.Client, request_of_900: dict[str, Any]
) -> None:
    page = open_page()
    pictures = open_long(page, request_of_900)
    page.locator("#long-head").fill("1")
    wait(page)
    drag(page, pictures[-1], (0.2, 0.5), (0.3, 0.6))
    expect(page.locator("#long-overview")).to_be_hidden()
    query, key = chosen(page)
    assert abs(query - 450) <= 3
    assert abs(key - 180) <= 3
    weights = np.array(service.post("/attention", json=request_of_900).json()["attention_weights"])[1]
    shown = np.array(numbers(page, "attention_weights"))
    assert shown.shape == (64, 64), "the table shows the first 64 rows and columns"
    np.testing.assert_allclose(shown, weights[query : query + 64, key : key + 64], rtol=1e-12)
    assert abs(int(page.locator("#status").inner_text().split(" × ")[0]) - 90) <= 4
    first = page.locator("#steps dd").last.inner_text().split(" ")[0]
    assert int(first) == weights[query].argmax(), "the largest weight of the whole row"
    expect(page.locator("#steps")).to_contain_text("3 · tanh(")
    page.locator("#zoom-out").click()
    expect(page.locator("#long-image")).to_be_visible()
    expect(page.locator("#short")).to_be_hidden()


def test_a_window_can_be_typed_and_keeps_its_options(open_page: Open, request_of_900: dict[str, Any]) -> None:
    page = open_page()
    open_long(page, request_of_900)
    type_window(page, 899, 5)
    assert chosen(page) == [868, 5], "the last 32 queries"
    page.locator("#large").press("ArrowDown")
    page.locator("#large").press("ArrowRight")
    assert chosen(page) == [869, 6]
    before = page.locator("#readout").inner_text()
    fill(page, "scale", 0.01)
    assert chosen(page) == [869, 6]
    assert page.locator("#readout").inner_text() != before
    page.locator("#change").check()
    expect(page.locator("#large-title")).to_have_text("Change of the weights, head 0")


def test_going_back_draws_the_picture_again_only_after_a_change(
    open_page: Open, request_of_900: dict[str, Any]
) -> None:
    page = open_page()
    pictures = open_long(page, request_of_900)
    type_window(page, 100, 5)
    page.locator("#zoom-out").click()
    expect(page.locator("#long-overview")).to_be_visible()
    assert len(pictures) == 1
    type_window(page, 100, 5)
    fill(page, "softcap", 1)
    page.locator("#zoom-out").click()
    expect(page.locator("#long-overview")).to_be_visible()
    assert len(pictures) == 2


@pytest.mark.parametrize("layout", ["bld", "bdl"])
def test_a_click_shows_what_is_there(layout: str, open_page: Open, service: httpx.Client) -> None:
    """A few keys, two batch entries, tokens as rows or columns, and options that are asked for with all queries."""
    random = np.random.default_rng(0)
    query, keys = random.normal(size=(2, 600, 2)), random.normal(size=(2, 5, 2))
    mask = random.random(size=(600, 5)) < 0.7
    arrays = {"query": query, "key": keys, "value": keys}
    if layout == "bdl":
        arrays, mask = {name: array.swapaxes(1, 2) for name, array in arrays.items()}, mask.T
    request = {**{name: array.tolist() for name, array in arrays.items()}, "layout": layout, "mask": mask.tolist()}
    page = open_page()
    pictures = open_long(page, request)
    page.locator("#batch").fill("1")
    wait(page)
    place = (0.5, 0.3) if layout == "bdl" else (0.3, 0.5)
    drag(page, pictures[-1], place, place)
    number = chosen(page)[0]
    assert abs(number - 300) <= 3
    weights = np.array(service.post("/attention", json=request).json()["attention_weights"])[1]
    shown = weights[:, number : number + 32] if layout == "bdl" else weights[number : number + 32]
    np.testing.assert_allclose(numbers(page, "attention_weights"), shown, rtol=1e-12)
    inputs = query[1, number : number + 32]
    np.testing.assert_allclose(numbers(page, "query"), inputs.T if layout == "bdl" else inputs)


def test_numbers_of_a_window_are_those_of_the_whole_sequence_by_hand(open_page: Open) -> None:
    """All scores are 0 but those of key 7, which is ln 3: weights are 3 / 702 there, else 1 / 702."""
    keys = [[0.0]] * 700
    keys[7] = [math.log(3)]
    request = {"query": [[1.0]] * 700, "key": keys, "value": [[1.0]] * 700, "scale": 1}
    page = open_page()
    open_long(page, request)
    type_window(page, 300, 400)
    steps = page.locator("#steps")
    expect(steps).to_contain_text("Largest score1.098612")
    expect(steps).to_contain_text("exp(0 − 1.098612) ≈ 0.333333")
    expect(steps).to_contain_text(f"0.333333 / 234 ≈ {1 / 702:.6g}")
    expect(steps).to_contain_text(f"Largest weights7 ({3 / 702:.3f}), 0 (0.001)")
    page.locator("#pipeline [value=present_key]").click()
    expect(page.locator("#readout")).to_contain_text("key 400, feature 0: 0")


@pytest.mark.parametrize("tokens", [1024, 32768])
def test_long_sequences_are_drawn_by_the_service(
    tokens: int, context: BrowserContext, address: str, folder: Path
) -> None:
    array = np.random.default_rng(0).normal(size=(tokens, 16)).astype(np.float32)
    request = {"input": {"dtype": "float32", "shape": array.shape, "data": base64.b64encode(array.tobytes()).decode()}}
    (folder / "long.json").write_text(json.dumps(request | {"is_causal": True}))
    page = context.new_page()
    page.goto(address)
    wait(page)
    page.locator("#example").select_option("data")
    page.locator("#file").set_input_files(folder / "long.json")
    image = page.locator("#long-image")
    image.wait_for(timeout=300_000)
    page.wait_for_function("() => document.getElementById('long-image').naturalWidth > 0", timeout=300_000)
    assert image.evaluate("image => image.naturalWidth") > 512, "with axes"
    expect(page.locator("#status")).to_contain_text(f"{tokens} queries", timeout=120_000)
    assert "example=data" in page.url
    page.locator("#long-query").fill("500")
    page.locator("#long-key").fill("490")
    page.locator("#long-window button").first.click()
    expect(page.locator("#readout")).to_contain_text("query 500, key 490: 0.00", timeout=120_000)
    assert page.evaluate("performance.memory.usedJSHeapSize") < 512 * 2**20
    if tokens == 1024:
        page.locator("#example").select_option("six_tokens_softmax")
        expect(page.locator("#long")).to_be_hidden()
        fill(page, "softcap", 2)
