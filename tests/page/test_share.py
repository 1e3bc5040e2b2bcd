"""What leaves the page: commands and programs that run as copied, downloads, and a saved page without a server."""

from __future__ import annotations

import base64
import json
import re
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit
from xml.etree import ElementTree

import numpy as np
import pytest
from playwright.sync_api import BrowserContext, Page, Route, expect

from tests.page.helpers import copied, download, numbers, open_details, paste_text, wait

Open = Callable[..., Page]
SOURCES: list[dict[str, Any]] = [
    {"example": "causal", "window__left": 1},
    {"example": "sentence", "text": "it's “a” <b> 'quote' \\ $HOME `id` שלום 🐈", "num_heads": 2},
]


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source["example"])
def test_copied_commands_and_programs_run(source: dict[str, Any], open_page: Open) -> None:
    page = open_page(**source)
    shown = numbers(page, "attention_weights")
    curl = copied(page, "#copy-curl")
    program = copied(page, "#copy-python")
    for command in (["sh", "-c", curl], [sys.executable, "-c", program]):
        printed = subprocess.run(command, capture_output=True, check=True, text=True).stdout
        weights = np.array(json.loads(printed)["attention_weights"])
        np.testing.assert_allclose(weights if weights.ndim == 2 else weights[0], shown, rtol=1e-12)


OWN = '{"query_tokens": ["é", "b"], "input": [[1, 0.5], [0, 1]]}'


def packed(text: bytes) -> str:
    """Text as it stands in an address, by another implementation of deflate."""
    deflate = zlib.compressobj(wbits=-15)
    return base64.urlsafe_b64encode(deflate.compress(text) + deflate.flush()).decode().rstrip("=")


def own_data(page: Page, text: str) -> None:
    paste_text(page, text)
    wait(page)


def refuse_clipboard(route: Route) -> None:
    response = route.fetch()
    route.fulfill(response=response, headers={**response.headers, "permissions-policy": "clipboard-write=()"})


def test_it_says_if_a_text_was_copied_and_where_a_link_works(open_page: Open) -> None:
    page = open_page()
    note = page.locator("#copied-note")
    open_details(page, "share")
    page.locator("#copy-link").click()
    expect(note).to_have_text("Copied. It works on this computer only; for others, save the page as HTML.")
    page.locator("#copied button").click()
    page.locator("#copy-curl").click()
    expect(note).to_have_text("Copied.")
    page.route("**/", refuse_clipboard)
    page.reload()
    wait(page)
    open_details(page, "share")
    page.locator("#copy-link").click()
    expect(note).to_contain_text("The browser does not allow copying")


def test_a_link_and_a_reload_restore_own_data(open_page: Open, context: BrowserContext) -> None:
    page = open_page()
    own_data(page, OWN)
    page.locator("[name=softcap]").fill("2")
    page.locator("#large").press("ArrowRight")
    wait(page)
    link = copied(page, "#copy-link")
    assert link == page.url
    field = parse_qs(urlsplit(link).fragment)["data"][0]
    assert zlib.decompress(base64.urlsafe_b64decode(field + "=="), -15).decode() == OWN
    shown = numbers(page, "attention_weights"), page.locator("#readout").text_content()
    other = context.new_page()
    other.goto(link)
    page.reload()
    for restored in (other, page):
        expect(restored.locator("#status")).to_contain_text("2 × 2")
        wait(restored)
        assert (numbers(restored, "attention_weights"), restored.locator("#readout").text_content()) == shown
        expect(restored.locator("#pasted")).to_have_value(OWN)
        expect(restored.locator("[name=softcap]")).to_have_value("2")


def test_a_link_restores_files_and_what_cannot_be_read(open_page: Open, folder: Path, context: BrowserContext) -> None:
    array = np.random.default_rng(0).normal(size=(5, 4)).astype(np.float32)
    np.save(folder / "input.npy", array)
    page = open_page()
    page.locator("#example").select_option("data")
    page.locator("#file").set_input_files(folder / "input.npy")
    expect(page.locator("#status")).to_contain_text("5 × 5 · 1 head · float32")
    page.reload()
    expect(page.locator("#status")).to_contain_text("5 × 5 · 1 head · float32")
    np.testing.assert_array_equal(numbers(page, "query"), array)
    page.locator("#pasted").fill('{"input": [[1')
    expect(page.locator("#pasted + #problem")).to_be_visible()
    page.reload()
    expect(page.locator("#pasted + #problem")).to_be_visible()
    expect(page.locator("#pasted")).to_have_value('{"input": [[1')


def test_data_that_are_too_large_for_a_link_are_told(open_page: Open, folder: Path) -> None:
    text = json.dumps({"input": np.random.default_rng(0).normal(size=(60, 40)).tolist()})
    assert len(text) > 30_000
    page = open_page()
    own_data(page, text)
    page.locator("[name=softcap]").fill("2")
    wait(page)
    assert "data=" not in urlsplit(page.url).fragment.replace("example=data", "")
    assert "softcap=2" in page.url
    button, note = page.locator("#copy-link"), page.locator("#link-note")
    expect(button).to_have_attribute("title", re.compile("too large.*HTML"))
    open_details(page, "share")
    button.click()
    expect(page.locator("#copied")).to_be_hidden()
    expect(note).to_contain_text("“HTML” saves a page with them")
    assert "too large" in (note.text_content() or "")
    saved = download(page, "#save-html", folder)
    own_data(page, OWN)
    expect(note).to_be_empty()
    expect(button).to_have_attribute("title", "")
    page.goto(saved.as_uri())
    expect(page.locator("#status")).to_contain_text("60 × 60")
    expect(button).to_be_hidden()


@pytest.mark.parametrize(
    "data",
    [
        "!",
        "AAAA",
        "x" * 99,
        packed(OWN.encode())[:-9],
        packed(OWN.encode()) + "AAAA",
        packed(b"\xff\xfe"),
        packed(b" " * 10**7),
    ],
    ids=["no base64", "no deflate", "noise", "cut", "longer", "no UTF-8", "ten million letters"],
)
def test_data_in_an_address_that_cannot_be_read_are_told(data: str, open_page: Open) -> None:
    page = open_page(example="data", data=data, num_heads=7)
    expect(page.locator("#status")).to_contain_text("14 × 14")
    expect(page.locator("#example")).to_have_value("trained_head")
    expect(page.locator("#notice")).to_contain_text("cannot be read")
    page.locator("#example").select_option("causal")
    expect(page.locator("#notice")).to_be_empty()
    expect(page.locator("#status")).to_contain_text("4 × 4")


def test_downloads_can_be_read(open_page: Open, folder: Path) -> None:
    page = open_page(example="six_tokens_trained")
    numbers(page, "attention_weights")
    content = json.loads(download(page, "#save-json", folder).read_text())
    assert content["request"]["input"]
    weights = content["answer"]["attention_weights"]
    assert weights["shape"] == [6, 6]
    svg = ElementTree.fromstring(download(page, "#save-svg", folder).read_text())
    texts = [element.text for element in svg.iter("{http://www.w3.org/2000/svg}text")]
    assert {"Your", "journey", "step"} <= set(texts)
    png = download(page, "#save-png", folder).read_bytes()
    assert png.startswith(b"\x89PNG")
    assert int.from_bytes(png[16:20], "big") > 400


def test_a_picture_names_its_head_and_what_hides(open_page: Open, folder: Path) -> None:
    page = open_page(example="causal", num_heads=2, head=1, is_causal="true", stage="masked_scores")
    text = download(page, "#save-svg", folder).read_text()
    assert "Masked" in text
    assert "head 1" in text
    assert "hidden by the causal mask" in text


def test_a_picture_has_its_title_and_its_size(open_page: Open, folder: Path) -> None:
    page = open_page(example="six_tokens_trained", stage="scaled_scores")
    open_details(page, "share")
    page.locator("#save-options summary").click()
    page.locator("#save-size").select_option("85")
    svg = ElementTree.fromstring(download(page, "#save-svg", folder).read_text())
    assert svg.get("width") == "85mm"
    assert "Scaled" in [element.text for element in svg.iter("{http://www.w3.org/2000/svg}text")]
    _, _, width, height = map(float, (svg.get("viewBox") or "").split())
    assert float((svg.get("height") or "").removesuffix("mm")) == pytest.approx(85 * height / width)
    for size, (most_width, most_height) in {"180": (180, 240), "338.67": (338.67, 190)}.items():
        page.locator("#save-size").select_option(size)
        svg = ElementTree.fromstring(download(page, "#save-svg", folder).read_text())
        wide, high = (float((svg.get(side) or "").removesuffix("mm")) for side in ("width", "height"))
        assert wide / high == pytest.approx(width / height)
        assert max(wide / most_width, high / most_height) == pytest.approx(1), "the larger side fits exactly"
    page.locator("#save-size").select_option("85")
    page.locator("#save-title").fill("Scores of a small model")
    png = download(page, "#save-png", folder).read_bytes()
    assert abs(int.from_bytes(png[16:20], "big") - 85 / 25.4 * 300) <= 3, "300 pixels an inch"
    for stage, label in (("query", "feature"), ("attention_weights", "key")):
        page.locator(f"#pipeline [value={stage}]").click()
        text = download(page, "#save-svg", folder).read_text()
        assert "Scores of a small model" in text
        assert f">{label}<" in text


def test_lines_are_a_picture_without_the_styles_of_the_page(open_page: Open, folder: Path) -> None:
    page = open_page(example="six_tokens_trained")
    page.locator("#theme").check()
    open_details(page, "share")
    page.locator("#save-options summary").click()
    page.locator("#save-what").select_option("lines")
    text = download(page, "#save-svg", folder).read_text()
    assert "var(" not in text
    assert "light-dark" not in text
    svg = ElementTree.fromstring(text)
    paths = list(svg.iter("{http://www.w3.org/2000/svg}path"))
    assert len(paths) == 36
    assert {(path.get("fill"), path.get("stroke")) for path in paths} == {("none", "rgb(122, 104, 200)")}
    texts = list(svg.iter("{http://www.w3.org/2000/svg}text"))
    assert [texts[0].text, texts[1].text, texts[1].get("fill")] == ["Who attends to whom", "Your ", "rgb(27, 30, 35)"]
    assert download(page, "#save-png", folder).read_bytes().startswith(b"\x89PNG")


def test_a_saved_page_works_without_a_server(open_page: Open, folder: Path, context: BrowserContext) -> None:
    text = "</script><script>alert(1)</script> a b <!-- שלום"
    page = open_page(example="sentence", text=text, num_heads=2, is_causal="true", query=2, key=1)
    shown = numbers(page, "masked_scores"), page.locator("#readout").text_content()
    file = download(page, "#save-html", folder)
    page.close()
    requests: list[str] = []
    other = context.new_page()
    other.on("request", lambda request: requests.append(request.url))
    other.goto(file.as_uri())
    expect(other.locator("#status")).to_contain_text("A saved page")
    assert (numbers(other, "masked_scores"), other.locator("#readout").text_content()) == shown
    other.locator("#heads button").nth(1).click()
    assert numbers(other, "masked_scores") != shown[0]
    other.locator("#large").press("ArrowUp")
    expect(other.locator("#readout")).to_contain_text("query 1")
    other.locator("#lines [data-axis=query][data-index='0']").hover()
    expect(other.locator("#lines path")).to_have_count(1)
    address = other.locator("a", has_text="API").get_attribute("href") or ""
    assert address.startswith("http://127.0.0.1:")
    assert address.endswith("/docs")
    other.locator("#theme").check()
    expect(other.locator("[name=softcap]")).to_be_disabled()
    assert json.loads(download(other, "#save-json", folder).read_text())["answer"]["metadata"]["num_heads"] == 2
    expect(other.locator("#save-html")).to_be_hidden()
    assert "Masked, head 1" in download(other, "#save-svg", folder).read_text()
    assert [url for url in requests if not url.startswith(("file:", "data:", "blob:"))] == []
