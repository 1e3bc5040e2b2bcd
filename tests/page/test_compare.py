"""What a kernel returned, beside what is right."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import httpx
import numpy as np
from playwright.sync_api import Page, expect

from tests.page.helpers import BY_NAME, fill

Open = Callable[..., Page]


def output_of(service: httpx.Client, **fields: object) -> list[list[float]]:
    request = {**BY_NAME["causal"].request, **fields, "include": []}
    output: list[list[float]] = service.post("/attention", json=request).json()["output"]
    return output


def test_a_wrong_output_has_its_mistake_and_a_map(open_page: Open, service: httpx.Client) -> None:
    page = open_page(example="causal")
    page.locator("#compare-title").click()
    page.locator("#actual").fill(json.dumps(output_of(service, is_causal=False)))
    page.locator("#compare button").click()
    report = page.locator("#report")
    expect(report.locator(".verdict.wrong")).to_contain_text("The causal mask is not applied", ignore_case=True)
    expect(report).to_contain_text("causal.absent, proof")
    expect(report).to_contain_text("rows 0 to 2 only")
    expect(report).to_contain_text("known mistakes, but not")
    expect(page.locator("#difference image")).to_have_count(1)
    expect(page.locator("#difference-text")).to_contain_text("in units of its limit")


def test_a_right_output_in_a_file_is_correct(open_page: Open, service: httpx.Client, folder: Path) -> None:
    page = open_page(example="causal")
    page.locator("#compare-title").click()
    np.save(folder / "mine.npy", np.array(output_of(service)))
    page.locator("#actual-file").set_input_files(folder / "mine.npy")
    page.locator("#compare button").click()
    expect(page.locator("#report .verdict")).to_have_class("verdict correct")
    fill(page, "is_causal", False)
    page.locator("#actual-file").set_input_files([])
    page.locator("#actual").fill('{"output": [[1, 2]]}')
    page.locator("#compare button").click()
    expect(page.locator("#problem")).to_contain_text("/actual/output")
