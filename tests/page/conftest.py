"""A browser, and pages of it that may load from this machine only."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlencode, urlsplit

import httpx
import pytest
from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Page, Request, Route, expect, sync_playwright

from tests.conftest import app, serving
from tests.page.helpers import wait

CHROMIUM = os.environ.get("CHROMIUM", "/usr/bin/chromium")
expect.set_options(timeout=15_000)


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM)
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def service() -> Iterator[httpx.Client]:
    with serving(app(time_limit=300.0)) as client:  # long sequences take a busy machine more than a minute
        yield client


@pytest.fixture
def address(service: httpx.Client) -> str:
    return str(service.base_url)


@pytest.fixture
def context(browser: Browser) -> Iterator[BrowserContext]:
    """A context whose requests to other machines fail the test, as do errors of scripts and policies."""
    context = browser.new_context(
        viewport={"width": 1440, "height": 900}, permissions=["clipboard-read", "clipboard-write"]
    )
    foreign: list[str] = []
    faults: list[str] = []

    def only_here(route: Route, request: Request) -> None:
        if urlsplit(request.url).hostname not in ("127.0.0.1", None):
            foreign.append(request.url)
        route.continue_()

    def note(message: ConsoleMessage) -> None:
        refused = "Failed to load resource" in message.text  # what tests of errors ask for
        if message.type in ("error", "warning") and not refused:
            faults.append(message.text)

    context.route("**/*", only_here)
    context.on("console", note)
    context.on("weberror", lambda error: faults.append(str(error.error)))
    yield context
    context.close()
    assert foreign == []
    assert faults == []


@pytest.fixture
def page(context: BrowserContext) -> Page:
    return context.new_page()


@pytest.fixture
def open_page(page: Page, address: str) -> Callable[..., Page]:
    """Opens the page with these fields in its address, and waits for the first pictures."""

    def open_with(**fields: object) -> Page:
        page.goto("about:blank")
        page.goto(f"{address}/#{urlencode({key.replace('__', '.'): value for key, value in fields.items()})}")
        wait(page)
        return page

    return open_with


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path
