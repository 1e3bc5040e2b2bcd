"""A browser, and pages of it that may load from this machine only."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

import httpx
import pytest
from playwright.sync_api import (
    Browser,
    BrowserContext,
    ConsoleMessage,
    Page,
    Request,
    WebError,
    expect,
    sync_playwright,
)

from tests.conftest import app, serving
from tests.page.helpers import wait

CHROMIUM = os.environ.get("CHROMIUM", "/usr/bin/chromium")
expect.set_options(timeout=60_000)


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


@pytest.fixture(scope="session")
def shared_context(browser: Browser) -> Iterator[BrowserContext]:
    """One cache for the modules of the page, which keeps nothing else."""
    context = browser.new_context(
        viewport={"width": 1440, "height": 900}, permissions=["clipboard-read", "clipboard-write"]
    )
    yield context
    context.close()


@pytest.fixture
def context(shared_context: BrowserContext) -> Iterator[BrowserContext]:
    """A context whose requests to other machines fail the test, as do errors of scripts and policies."""
    context = shared_context
    foreign: list[str] = []
    faults: list[str] = []

    def ask(request: Request) -> None:  # `route` would take each request of each module through this process
        if urlsplit(request.url).hostname not in ("127.0.0.1", None):
            foreign.append(request.url)

    def note(message: ConsoleMessage) -> None:
        asked = ("Failed to load resource", "Clipboard API has been blocked")  # by tests of errors
        refused = any(text in message.text for text in asked)
        if message.type in ("error", "warning") and not refused:
            faults.append(message.text)

    def fail(error: WebError) -> None:
        faults.append(str(error.error))

    listeners: dict[Any, Callable[..., None]] = {"request": ask, "console": note, "weberror": fail}
    for event, listener in listeners.items():
        context.on(event, listener)
    yield context
    for page in context.pages:
        page.close()
    for event, listener in listeners.items():
        context.remove_listener(event, listener)
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
