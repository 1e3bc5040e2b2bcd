"""Pages that Python writes, opened without a server: `result.page("it.html")`. Those of models: tests/peers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from playwright.sync_api import BrowserContext, Page, expect

from attention_service import attend
from tests.page.helpers import BY_NAME, STAGES, numbers, open_details

NAMES = ("query", "key", "scores", "masked_scores", "attention_weights", "value", "output")
CHANGES: list[dict[str, Any]] = [{}, {"num_heads": 2, "window": {"left": 1}}, {"layout": "dl", "softcap": 2.0}]


def opened(context: BrowserContext, path: Path) -> Page:
    page = context.new_page()
    page.goto(path.as_uri())
    expect(page.locator("#status")).to_contain_text("saved page")
    return page


@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_the_page_has_all_numbers_of_a_result(change: dict[str, Any], context: BrowserContext, folder: Path) -> None:
    request = {**BY_NAME["causal"].request, **change}
    if "layout" in change:
        request |= {name: np.transpose(request[name]).tolist() for name in ("query", "key", "value")}
    include = [name for name in NAMES if name != "output"]
    result = attend(**{**request, "include": include})
    result.page(folder / "it.html")
    page = opened(context, folder / "it.html")
    for name in NAMES:
        shown = np.array(numbers(page, STAGES.get(name, name)))
        expected = result[name] if result[name].ndim == 2 else result[name][0]
        if "layout" in change and name in ("query", "key", "value"):
            expected = expected.T  # in a response they have a row for each token
        np.testing.assert_array_equal(shown, expected, err_msg=name)
    for field, text in (("num_heads", "2"), ("softcap", "2"), ("layout", "dl")):
        if field in change:
            expect(page.locator(f"#options [name={field}]")).to_have_value(text)
    expect(page.locator("#row-title")).to_contain_text("By hand: query 0")


def test_a_batch_entry_can_be_chosen(context: BrowserContext, folder: Path) -> None:
    tokens = np.random.default_rng(0).normal(size=(2, 3, 4))
    labels = [["a", "b", "c"], ["d", "e", "f"]]
    result = attend(input=tokens, query_tokens=labels)
    result.page(folder / "it.html")
    page = opened(context, folder / "it.html")
    page.locator("#batch").fill("1")
    expect(page.locator("#readout")).to_contain_text("query 0 “\u2068d\u2069”")
    np.testing.assert_array_equal(numbers(page, "attention_weights"), result.attention_weights[1])


def test_the_page_is_that_of_the_service(open_page: Callable[..., Page], context: BrowserContext, folder: Path) -> None:
    """Each stage looks the same, and each number has the same arithmetic."""
    served = open_page(example="causal", num_heads=2, query=2, key=1)
    attend(**BY_NAME["causal"].request, num_heads=2).page(folder / "it.html")
    saved = opened(context, folder / "it.html")
    saved.locator("#large").press("ArrowDown")
    saved.locator("#large").press("ArrowDown")
    saved.locator("#large").press("ArrowRight")
    for part in ("#readout", "#row-title", "#steps", "#row", "#large", "#lines"):
        assert saved.locator(part).inner_text() == served.locator(part).inner_text(), part
    open_details(saved, "share")
    assert saved.locator("#share button:visible").all_inner_texts() == [
        "Copy as curl",
        "Copy as Python",
        "JSON",
        "SVG",
        "PNG",
    ]
