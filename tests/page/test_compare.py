"""What a kernel returned, beside what is right."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import httpx
import numpy as np
from playwright.sync_api import Page, Route, expect

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
    error = np.abs(np.subtract(output_of(service, is_causal=False), output_of(service))).max()
    expect(report).to_contain_text(f"output: off by {error:.4f} at most")
    expect(report).to_contain_text("known mistakes, but not")
    expect(page.locator("#difference image")).to_have_count(1)
    expect(report).to_contain_text("times what rounding alone explains")
    expect(report).to_contain_text("Mistakes that explain it")
    expect(report).not_to_contain_text("resembles")
    fill(page, "scale", 2)
    expect(report).to_be_empty()


def test_a_verdict_of_an_older_request_is_never_shown(open_page: Open, service: httpx.Client) -> None:
    page = open_page(example="causal")
    page.locator("#compare-title").click()
    page.locator("#actual").fill(json.dumps(output_of(service)))

    def answer_late(route: Route) -> None:
        page.wait_for_timeout(500)
        route.continue_()

    page.route("**/attention/compare", answer_late)
    page.locator("#compare button").click()
    fill(page, "scale", 2)
    page.wait_for_timeout(1000)
    expect(page.locator("#report")).to_be_empty()
    page.unroute_all()
    page.locator("#compare button").click()
    expect(page.locator("#report .verdict")).to_be_visible()
    page.locator("#example").select_option("six_tokens_trained")
    expect(page.locator("#report")).to_be_empty()


def test_a_mistake_that_is_only_like_it_is_no_proof(open_page: Open) -> None:
    """The service may say either; the page shows what it says."""
    page = open_page(example="causal")
    page.locator("#compare-title").click()
    page.locator("#actual").fill(json.dumps({"output": np.zeros((4, 4)).tolist()}))

    def answer(route: Route) -> None:
        report = {
            "verdict": {"status": "wrong", "message": "Wrong."}, "errors": {}, "where": [], "baseline": {},
            "hypotheses": [{"name": "a.b", "message": "Like it.", "certainty": "resembles", "change": None}],
            "power": {"killed": 1, "mutants": 1, "survivors": []},
        }  # fmt: skip
        route.fulfill(json=report)

    page.route("**/attention/compare", answer)
    page.locator("#compare button").click()
    expect(page.locator("#report h3")).to_have_text(["Similar known mistakes"])
    expect(page.locator("#report li")).to_have_text(["Like it. (a.b, resembles)"])


def test_a_right_output_in_a_file_is_correct(open_page: Open, service: httpx.Client, folder: Path) -> None:
    page = open_page(example="causal")
    page.locator("#compare-title").click()
    np.save(folder / "mine.npy", np.array(output_of(service)))
    page.locator("#actual-file").set_input_files(folder / "mine.npy")
    page.locator("#compare button").click()
    expect(page.locator("#report .verdict")).to_have_class("verdict correct")
    expect(page.locator("#report")).to_contain_text("The largest difference from the output above is 0.")
    expect(page.locator("#report")).to_contain_text("Blue is below, red above")
    expect(page.locator("#report .range")).to_have_text(["−10.000", "10.000"])
    fill(page, "is_causal", False)
    page.locator("#actual").fill('{"output": [[1, 2]]}')
    page.locator("#compare button").click()
    expect(page.locator("#compare + #problem")).to_contain_text("/actual/output")
    expect(page.locator("#report")).to_be_empty()
    expect(page.locator("#short")).not_to_have_attribute("inert", "")
