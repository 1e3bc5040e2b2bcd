"""Pages of models show what eager attention computes: in a browser, in a notebook, from the command line."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from playwright.sync_api import BrowserContext, FrameLocator, Page, expect
from transformers import AutoModel, AutoTokenizer

from attention_service.cli import main
from attention_service.errors import InvalidRequest
from attention_service.transformers import Captured, capture
from tests.helpers.pages import addresses, array_of, parts_of
from tests.page.conftest import browser, context, shared_context  # noqa: F401  # fixtures
from tests.page.helpers import download, numbers, open_details
from tests.peers.architectures import tiny_model
from tests.peers.test_capture import PACKAGE, SENTENCE, shown_by_eager
from tests.peers.test_transformers import TOKENS, padding

pytestmark = pytest.mark.filterwarnings("ignore")
EVERY_STAGE = ["attention_weights", "query", "key", "value", "scores", "scaled_scores", "capped_scores"]
FOLDER = Path(str(files(PACKAGE))) / "model"
# Half of the last of four digits.
ROUNDED = 0.51e-3


@pytest.fixture
def page(context: BrowserContext) -> Page:  # noqa: F811
    return context.new_page()


@pytest.fixture(scope="module")
def trained() -> tuple[Any, Any, list[str]]:
    """A trained model, its inputs, and its tokens."""
    model, tokenizer = AutoModel.from_pretrained(FOLDER), AutoTokenizer.from_pretrained(FOLDER)
    inputs = tokenizer(SENTENCE, return_tensors="pt")
    return model, inputs, tokenizer.convert_ids_to_tokens(inputs["input_ids"][0])


def captured_of(trained: tuple[Any, Any, list[str]], **options: Any) -> tuple[Captured, Any]:
    """What is captured of the trained model, and its attentions by eager attention."""
    model, inputs, tokens = trained
    attentions = shown_by_eager(model, **inputs).attentions
    model.set_attn_implementation("sdpa")
    with torch.no_grad(), capture(tokens=tokens, **options) as captured:
        model(**inputs)
    return captured, attentions


def saved_in(path: Path) -> list[Any]:
    """The layers of a page."""
    return list(json.loads(parts_of(path.read_text(encoding="utf-8"))["saved"])["layers"])


def weights_of(layer: Any) -> np.ndarray:
    return array_of(layer["tensors"]["attention_weights"])


def choose(shown: Page | FrameLocator, layer: int, head: int) -> None:
    shown.locator(f"#overview button[value='{layer} {head}']").click()


def test_a_page_of_a_model_shows_the_weights_of_eager_attention(trained: Any, page: Page, tmp_path: Path) -> None:
    """In a file of at most 200 kB, which makes no request, in the table of numbers, and by hand."""
    captured, attentions = captured_of(trained)
    captured.page(tmp_path / "it.html", title="A <model>")
    assert (tmp_path / "it.html").stat().st_size <= 210_000
    assert addresses((tmp_path / "it.html").read_text(encoding="utf-8")) == []
    requests: list[str] = []
    page.context.on("request", lambda request: requests.append(request.url))
    page.goto((tmp_path / "it.html").as_uri())
    expect(page.locator("h1")).to_have_text("A <model>")
    assert page.locator("#overview button canvas").count() == 6 * 12
    for layer, head in ((0, 0), (3, 1), (5, 11)):
        choose(page, layer, head)
        shown = np.array(numbers(page, "attention_weights"))
        np.testing.assert_allclose(shown, attentions[layer][0, head], rtol=ROUNDED, atol=1e-6)
    choose(page, 3, 1)
    page.locator("#lines [data-axis=query][data-index='10']").click()
    page.locator("#lines [data-axis=key][data-index='3']").click()
    assert f"{attentions[3][0, 1, 10, 3]:.4f}" in page.locator("#readout").inner_text()
    exponentials = np.array(
        [float(cell) for cell in page.locator("#row tr:not(.sum) td:nth-child(6)").all_inner_texts()]
    )
    np.testing.assert_allclose(exponentials / exponentials.sum(), attentions[3][0, 1, 10], rtol=0, atol=2e-4)
    assert page.locator("#steps dt").all_inner_texts() == ["Masked", "Largest score", "Exponential", "Sum", "Weight"]
    assert requests == [(tmp_path / "it.html").as_uri()]


def test_layers_are_tabs_and_heads_a_grid_for_the_keyboard(trained: Any, page: Page, tmp_path: Path) -> None:
    captured_of(trained)[0].page(tmp_path / "it.html")
    page.goto((tmp_path / "it.html").as_uri() + "#layer=0&head=0")
    tabs = page.get_by_role("tab")
    expect(tabs).to_have_text([f"Layer {layer}" for layer in range(6)])
    assert [tab.get_attribute("tabindex") for tab in tabs.all()] == ["0", "-1", "-1", "-1", "-1", "-1"]
    tabs.nth(0).focus()
    for key, layer in (
        ("ArrowRight", 1),
        ("ArrowRight", 2),
        ("ArrowLeft", 1),
        ("End", 5),
        ("ArrowRight", 5),
        ("Home", 0),
    ):
        page.keyboard.press(key)
        expect(page.get_by_role("tab", selected=True)).to_have_text(f"Layer {layer}")
        expect(tabs.nth(layer)).to_be_focused()
    page.locator("#overview button[tabindex='0']").focus()
    for key, place in (("ArrowDown", "1 0"), ("ArrowRight", "1 1"), ("ArrowUp", "0 1"), ("ArrowUp", "0 1")):
        page.keyboard.press(key)
        expect(page.locator("#overview [aria-pressed=true]")).to_have_attribute("value", place)
        expect(page.locator(f"#overview button[value='{place}']")).to_be_focused()
    expect(page.locator("#heads [aria-pressed=true]")).to_have_text("Head 1")
    page.keyboard.press("Tab")
    expect(tabs.nth(0)).to_be_focused()


def test_the_first_view_is_of_two_words_that_are_no_neighbours(trained: Any, page: Page, tmp_path: Path) -> None:
    """Of the middle layer the largest weight, without the first token, the last one, and neighbours."""
    captured, attentions = captured_of(trained)
    captured.page(tmp_path / "it.html")
    page.goto((tmp_path / "it.html").as_uri())
    weights = attentions[3][0]
    far = [(h, q, k) for h in range(12) for q in range(1, 15) for k in range(1, 14) if abs(q - k) > 1]
    head, query, key = max(far, key=lambda cell: float(weights[cell]))
    assert (trained[2][query], trained[2][key]) == ("it", "animal")
    expect(page.locator("#large-title")).to_have_text(f"Weights, Layer 3, head {head}")
    expect(page.locator("#readout")).to_contain_text(f"query {query} “\u2068it\u2069”, key {key} “\u2068animal\u2069”")
    captured_of(trained, layers=[0], rows=[0])[0].page(tmp_path / "row.html")  # no such pair
    page.goto((tmp_path / "row.html").as_uri())
    expect(page.locator("#readout")).to_contain_text("query 0 “\u2068[CLS]\u2069”, key 0")


def test_the_address_has_the_layer_and_the_head(trained: Any, page: Page, tmp_path: Path) -> None:
    """A link opens there, whatever it names; and nothing stands in it at first."""
    captured_of(trained)[0].page(tmp_path / "it.html")
    address = (tmp_path / "it.html").as_uri()
    page.goto(address)
    expect(page.locator("#large-title")).to_contain_text("Layer 3")
    assert page.url.rstrip("#") == address
    choose(page, 1, 8)
    page.locator("#pipeline [value=masked_scores]").click()
    assert page.url == f"{address}#layer=1&head=8&stage=masked_scores"
    page.reload()
    expect(page.locator("#large-title")).to_have_text("Masked, Layer 1, head 8")
    page.evaluate("location.hash = '#layer=99&head=x&query=3&stage=nothing'")
    expect(page.locator("#large-title")).to_have_text("Weights, Layer 5, head 0")
    expect(page.locator("#readout")).to_contain_text("query 3 ")


@pytest.mark.parametrize("what", ["large", "lines"])
def test_pictures_of_a_layer_are_saved(what: str, trained: Any, page: Page, tmp_path: Path) -> None:
    captured_of(trained)[0].page(tmp_path / "it.html")
    page.goto((tmp_path / "it.html").as_uri() + "#layer=2&head=5")
    open_details(page, "share")
    assert page.locator("#share button:visible").all_inner_texts() == ["JSON", "SVG", "PNG"]
    open_details(page, "save-options")
    page.locator("#save-what").select_option(what)
    svg = download(page, "#save-svg", tmp_path).read_text(encoding="utf-8")
    title = {"large": "Weights, Layer 2, head 5", "lines": "Who attends to whom"}[what]
    assert f">{title}</text>" in svg
    assert 'width="180mm"' in svg
    assert Image.open(download(page, "#save-png", tmp_path)).width == pytest.approx(180 / 25.4 * 300, abs=2)
    saved = json.loads(download(page, "#save-json", tmp_path).read_text(encoding="utf-8"))
    assert saved["answer"]["name"] == "Layer 2"


def test_a_notebook_shows_and_keeps_the_page(trained: Any, page: Page) -> None:
    """Within a page of the notebook, and after its output was saved and read again."""
    captured, attentions = captured_of(trained, layers=[3, 5])
    output = json.loads(json.dumps(captured._repr_html_()))
    page.set_content(f"<h1>A notebook</h1><div>{output}</div>")
    frame = page.frame_locator("iframe")
    choose(frame, 0, 1)
    frame.locator("#lines [data-axis=query][data-index='10']").click()
    frame.locator("#lines [data-axis=key][data-index='3']").click()
    expect(frame.locator("#readout")).to_contain_text(f"{attentions[3][0, 1, 10, 3]:.4f}")
    with page.expect_download() as download:
        frame.locator("#share summary").first.click()
        frame.locator("#save-svg").click()
    assert download.value.suggested_filename == "attention.svg"
    assert page.locator("#overview").count() == 0
    assert page.evaluate("document.querySelector('iframe').contentDocument === null"), "neither reads the other"


def test_every_stage_that_was_captured_is_shown(trained: Any, page: Page, tmp_path: Path) -> None:
    captured, _ = captured_of(trained, include=EVERY_STAGE, layers=[3])
    captured.page(tmp_path / "it.html")
    page.goto((tmp_path / "it.html").as_uri() + "#head=0&query=0&key=0")
    names = {"query": "query", "key": "present_key", "value": "present_value", "output": "head_outputs"}
    for name, stage in names.items():
        np.testing.assert_allclose(numbers(page, stage), captured[3][name][0, 0], rtol=ROUNDED, atol=1e-6)
    np.testing.assert_allclose(numbers(page, "scores"), captured[3].scores[0, 0], rtol=0, atol=0.51e-4)
    query, key = captured[3].query[0, 0, 0], captured[3].key[0, 0, 0]
    page.locator("#pipeline [value=attention_weights]").click()
    text = page.locator("#steps dd").first.inner_text().replace("−", "-")
    assert text.startswith(f"{query[0]:.4g}·")
    assert abs(float(text.split("≈ ")[1]) - float(query @ key)) < 1e-3
    page.locator("#pipeline [value=query]").click()
    expect(page.locator("#steps")).to_contain_text("In the model")


@pytest.mark.parametrize("side", ["left", "right"])
def test_masks_of_decoders_are_hidden_cells(side: str, page: Page, tmp_path: Path) -> None:
    """Causal, with padding: eager attention gives hidden keys the weight 0."""
    model, mask = tiny_model("llama"), padding(side)
    eager = shown_by_eager(model, input_ids=TOKENS, attention_mask=mask)
    with torch.no_grad(), capture() as captured:
        model(input_ids=TOKENS, attention_mask=mask)
    captured.page(tmp_path / "it.html")
    layers = saved_in(tmp_path / "it.html")
    for layer, weights in zip(layers, eager.attentions, strict=True):
        hidden, found = array_of(layer["tensors"]["hidden_by"]) != 0, weights_of(layer)
        assert (hidden == (array_of(layer["tensors"]["masked_scores"]) == -np.inf)).all()
        seen = ~hidden.all(axis=-1, keepdims=True)  # eager attention averages where a query sees nothing
        np.testing.assert_allclose(found, np.where(seen, weights, 0), rtol=ROUNDED, atol=1e-6)
        assert (found[hidden] == 0).all()
        assert hidden[0, 0, 0, 9]
    page.goto((tmp_path / "it.html").as_uri() + "#head=0&query=0")
    page.locator("#batch").fill("1")
    page.locator("#row tr").nth(9).click()
    expect(page.locator("#readout")).to_contain_text("hidden by the mask")
    expect(page.locator("#steps")).to_contain_text("−∞: hidden by the mask")


def test_rows_and_heads_keep_their_numbers(trained: Any, page: Page, tmp_path: Path) -> None:
    captured, attentions = captured_of(trained, layers=[3], heads=[1, 5], rows=[10, 4])
    captured.page(tmp_path / "it.html")
    page.goto((tmp_path / "it.html").as_uri() + "#query=0&key=0")
    expect(page.locator("#overview th[scope=col]")).to_have_text(["1", "5"])
    expect(page.locator("#heads b")).to_have_text(["Head 1", "Head 5"])
    choose(page, 0, 1)
    expect(page.locator("#row-title")).to_contain_text("query 10 “\u2068it\u2069” → key 0")
    np.testing.assert_allclose(
        numbers(page, "attention_weights"), attentions[3][0, 5, [10, 4]], rtol=ROUNDED, atol=1e-6
    )
    captured[3].page(tmp_path / "layer.html")
    (layer,) = saved_in(tmp_path / "layer.html")
    np.testing.assert_allclose(weights_of(layer), attentions[3][:, [1, 5]][:, :, [10, 4]], rtol=ROUNDED, atol=1e-6)


@pytest.mark.parametrize("architecture", ["bart", "gpt_oss", "gemma2"])
def test_roles_sinks_and_softcaps(architecture: str, page: Page, tmp_path: Path) -> None:
    """Layers of encoders, decoders and cross-attention have their roles as names."""
    model = tiny_model(architecture)
    eager = shown_by_eager(model, input_ids=TOKENS)
    with torch.no_grad(), capture() as captured:
        model(input_ids=TOKENS)
    captured.page(tmp_path / "it.html")
    layers = {layer["answer"]["name"]: layer for layer in saved_in(tmp_path / "it.html")}
    expected = {f"Layer {index}": weights for index, weights in enumerate(getattr(eager, "attentions", None) or [])}
    if architecture == "bart":
        parts = {"Encoder": "encoder_attentions", "Decoder": "decoder_attentions", "Cross": "cross_attentions"}
        expected = {f"{role} {n}": w for role, name in parts.items() for n, w in enumerate(getattr(eager, name))}
    assert layers.keys() == expected.keys()
    for name, weights in expected.items():
        np.testing.assert_allclose(weights_of(layers[name]), weights, rtol=ROUNDED, atol=1e-6, err_msg=name)
    page.goto((tmp_path / "it.html").as_uri() + "#head=0")
    page.get_by_role("tab").last.click()
    page.locator("#lines [data-axis=query][data-index='9']").click()
    parts = [float(text) for text in page.locator("#row tr:not(.sum) td:nth-child(6)").all_inner_texts()]
    total = float(re.split("[≈=] ", page.locator("#steps dd").nth(-2).inner_text())[1])
    weights = [part / total for part in parts[: weights.shape[-1]]]  # without the sink
    np.testing.assert_allclose(weights, expected[name][0, 0, 9], rtol=0, atol=2e-4)


def test_an_overview_has_a_panel_for_each_head(trained: Any, tmp_path: Path) -> None:
    captured, _ = captured_of(trained, layers=[0, 3])
    picture = captured.heatmap()
    assert repr(picture) == "Heatmap: attention_weights, 2 layers of 12 heads"
    assert picture.svg.count("<image ") == 2 * 12 + 1, "and the legend"
    for text in ("Layer 0", "Layer 3", "11", "attention weights, 2 layers of 12 heads"):
        assert f">{text}</text>" in picture.svg
    assert ">Weights</text>" in captured.heatmap("masked_scores", title="Weights", theme="dark", max_cells=4).svg
    picture.save(tmp_path / "it.png")
    small = captured.heatmap(select_heads=[5], width_mm=85).svg
    assert (small.count("<image "), small.count('width="85mm"')) == (2 + 1, 1)
    with pytest.raises(ValueError, match="a captured layer draws attention_weights or masked_scores, not scores"):
        captured.heatmap("scores")


def test_one_head_of_a_captured_layer_is_drawn(trained: Any) -> None:
    """By its number in the model, which is in its title, too."""
    captured, attentions = captured_of(trained, layers=[2, 3], heads=[1, 5, 7])
    found = captured[3].heatmap(select_heads=[5, 7], title="").svg
    assert ">head 5</text>" in found
    assert ">head 1</text>" not in found
    assert f"{attentions[3][0, 5, 0, 1]:.6g}"[:6] in captured[3].heatmap(select_heads=[5], title="").svg
    assert "-0." in captured[3].heatmap(select_heads=[5], minus=captured[2]).svg
    with pytest.raises(InvalidRequest, match="/select_heads: expected heads that were captured, 1, 5, 7, got number 0"):
        captured[3].heatmap(select_heads=[0])
    for layers in (captured[3], captured):
        with pytest.raises(TypeError, match=r"heatmap: expected stage, scale, .*; got head. select_heads=\[1\] draws"):
            layers.heatmap(head=1)


def test_what_cannot_be_shown_is_an_error(trained: Any, tmp_path: Path) -> None:
    path = tmp_path / "it.html"
    for call in (lambda: Captured().page(path), lambda: Captured().heatmap()):
        with pytest.raises(ValueError, match="nothing is captured: a model must run within"):
            call()
    assert Captured()._repr_html_() is None
    model = tiny_model("llama")
    with torch.no_grad(), capture(layers=[0]) as captured:
        model(input_ids=torch.zeros((1, 513), dtype=torch.long))
    with pytest.raises(ValueError, match="up to 512 queries and keys"):
        captured.page(path)
    assert captured._repr_html_() is None, "a notebook would keep megabytes"
    captured.heatmap()
    with pytest.raises(FileNotFoundError):
        captured_of(trained, layers=[0])[0].page(tmp_path / "no" / "it.html")
    assert list(tmp_path.iterdir()) == []


def test_the_command_writes_what_capture_does(trained: Any, tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "it.html"
    assert main(["page", "--model", str(FOLDER), SENTENCE, "-o", str(path), "--layers", "3,-1"]) == 0
    printed = capsys.readouterr()
    assert (printed.err, printed.out) == ("", f"{path}: 2 layers, 12 heads, 15 tokens, {path.stat().st_size:,} bytes\n")
    _, attentions = captured_of(trained)
    layers = saved_in(path)
    assert [layer["answer"]["name"] for layer in layers] == ["Layer 3", "Layer 5"]
    for layer, index in zip(layers, (3, 5), strict=True):
        np.testing.assert_allclose(weights_of(layer), attentions[index], rtol=ROUNDED, atol=1e-6)
        assert layer["request"]["key_tokens"][0] == trained[2]
    assert f"<h1>model: {SENTENCE.replace(chr(39), '&#x27;')}</h1>" in path.read_text(encoding="utf-8")
    every = tmp_path / "every.html"
    assert main(["page", "--model", str(FOLDER), "cats", "-o", str(every), "--every-stage", "--title", "T"]) == 0
    assert "scores" in saved_in(every)[0]["tensors"]


@pytest.mark.parametrize(
    ("arguments", "status", "text"),
    [
        (["--model", str(FOLDER), "-o", "no/it.html"], 2, "no/it.html: expected a file in a directory that exists"),
        (["--model", str(FOLDER), "-o", "it.svg"], 2, "it.svg: expected a name that ends in .html"),
        (
            ["--model", "no-such-model", "-o", "it.html"],
            2,
            "--model no-such-model: no such directory, and no such model",
        ),
        (["--model", "no/such/model", "-o", "it.html"], 2, "or its name on the hub; got nothing there"),
        (
            ["--model", "./model", "-o", "it.html"],
            2,
            "--model ./model: expected a directory of a model, or its name on",
        ),
        (["--model", "/proc/version", "-o", "it.html"], 2, "or its name on the hub; got a file"),
        (
            ["--model", ".", "-o", "it.html"],
            2,
            "--model .: expected a directory of a model and its tokenizer, as save_",
        ),
        (["--model", ".", "-o", "it.html"], 2, "writes both: it has no config.json"),
        (
            ["--model", str(FOLDER), "-o", "it.html", "--layers", "3", "-1", "more"],
            2,
            "Several layers are --layers 3,5",
        ),
        (["--model", str(FOLDER), "-o", "it.html", "--layers", "9"], 1, "layers: "),
        (["--model", str(FOLDER), "-o", "/proc/it.html"], 2, "/proc/it.html: No such file or directory"),
    ],
)
def test_errors_of_the_command_are_one_line(arguments: list[str], status: int, text: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "attention_service", "page", *arguments, "a text"]
    offline = os.environ | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=offline, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (status, "")
    assert len(done.stderr.splitlines()) == 1
    assert text in done.stderr
    assert list(tmp_path.iterdir()) == []
