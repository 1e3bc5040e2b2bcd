"""The screenshots of docs/page.md: `.venv-torch/bin/python -m tests.page.screenshots`, in a clone."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Final

from PIL import Image
from playwright.sync_api import sync_playwright

from tests.cases import CASES
from tests.conftest import app, serving
from tests.page.conftest import CHROMIUM
from tests.page.helpers import wait

IMAGES: Final = Path(__file__).parents[2] / "docs" / "images"
# A palette makes a screenshot a third as large.
COLOURS: Final = 256
SHOTS: Final = (
    ("page-light", "example=trained_head", "light", (1440, 900)),
    ("page-dark", "example=causal&num_heads=2&window.left=1&query=2&key=1", "dark", (1440, 900)),
)


def save(content: bytes, name: str) -> None:
    """Write a screenshot into the folder of the docs."""
    image = Image.open(io.BytesIO(content)).convert("RGB").quantize(COLOURS, Image.Quantize.MAXCOVERAGE)
    image.save(IMAGES / f"{name}.png", optimize=True)


def main() -> None:
    """Take all screenshots anew."""
    with serving(app()) as service, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM)
        for name, fragment, theme, (width, height) in SHOTS:
            page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=theme)  # type: ignore[arg-type]  # one of its names
            page.goto(f"{service.base_url}/#{fragment}")
            wait(page)
            save(page.screenshot(), name)
        page = browser.new_page(viewport={"width": 1440, "height": 900})
        page.goto(f"{service.base_url}/#example=causal")
        wait(page)
        request = next(case for case in CASES if case.name == "causal").request
        wrong = service.post("/attention", json={**request, "is_causal": False}).json()["output"]
        page.locator("#compare-title").click()
        page.locator("#actual").fill(json.dumps(wrong))
        page.locator("#compare button").click()
        page.locator("#difference svg").wait_for()
        save(page.locator("details:has(#compare)").screenshot(), "page-compare")
        browser.close()


if __name__ == "__main__":
    main()
