"""What leaves the page: commands and programs that run as copied, downloads, and a saved page without a server."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from playwright.sync_api import BrowserContext, Page, expect

from tests.page.helpers import copied, download, numbers

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
    page.locator("#pipeline button[value=output]").click()
    expect(page.locator("#save-png")).to_be_disabled()


def test_a_picture_names_its_head_and_what_hides(open_page: Open, folder: Path) -> None:
    page = open_page(example="causal", num_heads=2, head=1, is_causal="true", stage="masked_scores")
    text = download(page, "#save-svg", folder).read_text()
    assert "masked scores" in text
    assert "head 1" in text
    assert "is_causal" in text


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
    expect(other.locator("#save-png")).to_be_hidden()
    assert [url for url in requests if not url.startswith(("file:", "data:", "blob:"))] == []
