"""What tests do with the page: wait for it, read its numbers, download from it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from playwright.sync_api import Page

from tests.cases import CASES

BY_NAME = {case.name: case for case in CASES}
STAGES = {"key": "present_key", "value": "present_value"}


def wait(page: Page, changes: int = 1) -> None:
    """Waits until the page has painted the last change that was made."""
    page.wait_for_function(
        """least => {
          const last = name => performance.getEntriesByName(name).at(-1);
          const [mark, measure] = [last("change"), last("repaint")];
          return performance.getEntriesByName("repaint").length >= least
            && measure.startTime + 0.01 >= mark.startTime;
        }""",
        arg=changes,
        timeout=120_000,
    )


def numbers(page: Page, stage: str) -> list[list[float]]:
    """The table of a stage, as the layout has it."""
    page.locator(f"#pipeline button[value={stage}]").click(position={"x": 12, "y": 8})
    if not page.locator("#numbers").evaluate("details => details.open"):
        page.locator("#numbers summary").click()
    page.wait_for_selector("#table td[data-value]")
    cells = "[...row.querySelectorAll('[data-value]')].map(cell => cell.dataset.value)"
    rows = page.locator("#table").evaluate(f"table => [...table.rows].slice(1).map(row => {cells})")
    return [[-math.inf if cell == "-Infinity" else float(cell) for cell in row] for row in rows]


def open_details(page: Page, name: str) -> None:
    """Opens a part of the page that is closed at first: "more" for options, "share" for what one takes along."""
    page.locator(f"#{name}").evaluate("details => { details.open = true }")


def paste_text(page: Page, text: str) -> None:
    """Pastes a request of one's own. It is sent after this returns: `wait`, or expect what it changes."""
    page.locator("#example").select_option("data")
    page.evaluate("performance.clearMeasures()")
    page.locator("#pasted").fill(text)


def download(page: Page, button: str, folder: Path) -> Path:
    """The file that a button saves."""
    open_details(page, "share")
    with page.expect_download() as download:
        page.locator(button).click()
    path = folder / download.value.suggested_filename
    download.value.save_as(path)
    return path


def copied(page: Page, button: str) -> str:
    """The text that a button copies and shows."""
    open_details(page, "share")
    page.locator(button).click()
    shown = page.locator("#copied-text").input_value()
    page.wait_for_timeout(100)
    assert page.evaluate("navigator.clipboard.readText()") == shown
    page.locator("#copied button").click()
    return shown


def fill(page: Page, name: str, value: Any) -> None:
    """Sets a control, and waits for what follows."""
    control = page.locator(f"#options [name='{name}']")
    open_details(page, "more")
    page.evaluate("performance.clearMeasures()")
    if isinstance(value, bool):
        control.set_checked(value)
    elif control.evaluate("control => control.tagName") == "SELECT":
        control.select_option(value)
    else:
        control.fill(str(value))
    wait(page)
