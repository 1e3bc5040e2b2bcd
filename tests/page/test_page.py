"""The page as a whole: its types, its accessibility, its sizes on screens, long sequences."""

from __future__ import annotations

import base64
import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from playwright.sync_api import Browser, BrowserContext, Locator, Page, Request, expect

from attention_service.attention.terms import CAUSES
from attention_service.render.colours import DIVERGING, SEQUENTIAL
from tests.page.helpers import fill, paste_text, wait

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


def pictures_of(page: Page) -> list[Request]:
    """The requests of a page for pictures, as they come."""
    pictures: list[Request] = []
    page.on("request", lambda request: pictures.append(request) if "attention/heatmap" in request.url else None)
    return pictures


def click_cell(image: Locator, picture: Request, across: float, down: float) -> None:
    """Clicks on a picture that the service drew, at this share of its cells."""
    headers = {"Content-Type": "application/json", "Accept": "image/svg+xml"}
    text = httpx.post(picture.url, content=picture.post_data_buffer or b"", headers=headers, timeout=120).text
    found = re.search(r'<image x="(.*?)" y="(.*?)" width="(.*?)" height="(.*?)"', text)
    assert found
    x, y, width, height = map(float, found.groups())
    zoom = image.evaluate("image => image.clientWidth / image.naturalWidth")
    image.click(position={"x": zoom * (x + across * width), "y": zoom * (y + down * height)})


@pytest.mark.parametrize("layout", ["bld", "bdl"])
def test_rows_of_a_long_view_are_those_that_were_clicked(layout: str, open_page: Open, service: httpx.Client) -> None:
    """A few keys, two batch entries, tokens as rows or columns."""
    random = np.random.default_rng(0)
    query, keys = random.normal(size=(2, 600, 2)), random.normal(size=(2, 5, 2))
    arrays = {"query": query, "key": keys, "value": keys}
    if layout == "bdl":
        arrays = {name: array.swapaxes(1, 2) for name, array in arrays.items()}
    request = {**{name: array.tolist() for name, array in arrays.items()}, "layout": layout}
    page = open_page()
    pictures = pictures_of(page)
    paste_text(page, json.dumps(request))
    expect(page.locator("#batch-label")).to_be_visible()
    page.locator("#batch").fill("1")
    expect(page.locator("#status")).to_contain_text("600 queries")
    page.locator("#long-image").wait_for()
    page.wait_for_timeout(500)
    across, down = (0.5, 0.3) if layout == "bdl" else (0.3, 0.5)
    click_cell(page.locator("#long-image"), pictures[-1], across, down)
    rows = page.locator("#long-rows li")
    expect(rows).to_have_count(64)
    text = page.locator("#long-rows [aria-current]").inner_text()
    number = int(text.split(":")[0].removeprefix("head 0, query "))
    assert abs(number - 300) <= 5
    weights = np.array(service.post("/attention", json=request).json()["attention_weights"])[1]
    row = weights[:, number] if layout == "bdl" else weights[number]
    order = np.argsort(-row)
    assert text.split(": ")[1] == ", ".join(f"{key} ({row[key]:.3f})" for key in order)


def test_rows_of_a_long_view_are_those_of_its_head_and_options(open_page: Open) -> None:
    random = np.random.default_rng(1)
    arrays = {"query": random.normal(size=(600, 4)), "key": random.normal(size=(5, 4)), "value": np.eye(5)[:, :4]}
    page = open_page()
    paste_text(
        page,
        json.dumps({**{name: array.tolist() for name, array in arrays.items()}, "num_heads": 2, "query_offset": 0}),
    )
    expect(page.locator("#status")).to_contain_text("600 queries")
    page.locator("#long-row").fill("5000")
    page.locator("#long-query button").click()
    rows = page.locator("#long-rows li")
    expect(page.locator("#long-rows [aria-current]")).to_contain_text("head 0, query 599: ")
    expect(page.locator("#long-row")).to_have_value("599")
    expect(page.locator("#long-row")).to_have_attribute("max", "599")
    first = rows.all_inner_texts()
    page.locator("#long-head").fill("7")
    expect(rows).to_have_count(0)
    expect(page.locator("#long-head")).to_have_value("1")
    page.locator("#long-query button").click()
    expect(page.locator("#long-rows [aria-current]")).to_contain_text("head 1, query 599: ")
    assert rows.all_inner_texts() != first
    fill(page, "softcap", 1)
    expect(rows).to_have_count(0)


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


@pytest.mark.parametrize("tokens", [1024, 32768])
def test_long_sequences_are_drawn_by_the_service(
    tokens: int, context: BrowserContext, service: httpx.Client, folder: Path
) -> None:
    if "/attention/heatmap" not in service.get("/openapi.json").json()["paths"]:
        pytest.skip("this service draws no heatmaps")
    array = np.random.default_rng(0).normal(size=(tokens, 16)).astype(np.float32)
    request = {"input": {"dtype": "float32", "shape": array.shape, "data": base64.b64encode(array.tobytes()).decode()}}
    (folder / "long.json").write_text(json.dumps(request | {"is_causal": True}))
    page = context.new_page()
    pictures = pictures_of(page)
    page.goto(str(service.base_url))
    wait(page)
    page.locator("#example").select_option("data")
    page.locator("#file").set_input_files(folder / "long.json")
    image = page.locator("#long-image")
    image.wait_for(timeout=300_000)
    page.wait_for_function("() => document.getElementById('long-image').naturalWidth > 0", timeout=300_000)
    assert image.evaluate("image => image.naturalWidth") > 512, "with axes"
    expect(page.locator("#status")).to_contain_text(f"{tokens} queries", timeout=120_000)
    assert "example=data" in page.url
    page.locator("#long-row").fill("500")
    page.locator("#long-query button").click()
    expect(page.locator("#long-rows li")).to_have_count(64, timeout=120_000)
    expect(page.locator("#long-rows [aria-current]")).to_contain_text("query 500: 500 (")
    click_cell(image, pictures[-1], 0.3, 0.5)
    middle = re.compile(rf"query {str(tokens // 2)[:2]}\d+:")
    expect(page.locator("#long-rows [aria-current]")).to_contain_text(middle, timeout=120_000)
    assert page.evaluate("performance.memory.usedJSHeapSize") < 512 * 2**20
    if tokens == 1024:
        page.locator("#example").select_option("six_tokens_softmax")
        expect(page.locator("#short")).to_be_visible()
        fill(page, "softcap", 2)
