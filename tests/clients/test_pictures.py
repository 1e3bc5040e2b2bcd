"""Pictures of weights in programs that draw SVG, and in notebooks that become LaTeX.

Of more than 1,024 cells the SVG has an image in place of boxes, which these programs smooth.
"""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Callable
from importlib.metadata import files
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import cairosvg
import httpx
import numpy as np
import pytest
import resvg_py
from PIL import Image

from tests.clients.programs import run

TOKENS = 48
# viridis of matplotlib at 0 and at 1
NONE, ALL = (0x44, 0x01, 0x54), (0xFD, 0xE7, 0x25)
PERMUTED = np.random.default_rng(1).permutation(TOKENS)
# Each query attends to one key; others have a weight of 0, or are hidden.
CHOSEN = np.eye(TOKENS, dtype=bool)[PERMUTED]
MASK = CHOSEN | (np.random.default_rng(2).uniform(size=(TOKENS, TOKENS)) < 0.5)
REQUEST: dict[str, Any] = {
    "input": np.zeros((TOKENS, 2)).tolist(),
    "bias": np.where(CHOSEN, 0, -1e4).tolist(),
    "mask": MASK.tolist(),
    "heatmap": {"theme": "light"},
}
SCALE = 3  # pixels to each of the SVG


def by_librsvg(svg: Path, png: Path) -> None:
    run("rsvg-convert", "--zoom", str(SCALE), "--output", png, svg)


def by_cairosvg(svg: Path, png: Path) -> None:
    cairosvg.svg2png(url=str(svg), write_to=str(png), scale=SCALE)


def by_resvg(svg: Path, png: Path) -> None:
    png.write_bytes(bytes(resvg_py.svg_to_bytes(svg_path=str(svg), zoom=SCALE, dpi=96)))


PROGRAMS: dict[str, Callable[[Path, Path], None]] = {"librsvg": by_librsvg, "CairoSVG": by_cairosvg, "resvg": by_resvg}


def drawn(client: httpx.Client, media_type: str, **fields: Any) -> bytes:
    answer = client.post("/attention/heatmap", json=fields, headers={"Accept": media_type})
    assert answer.status_code == 200, answer.text
    return answer.content


@pytest.fixture(scope="module")
def svg(client: httpx.Client, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pictures") / "weights.svg"
    path.write_bytes(drawn(client, "image/svg+xml", **REQUEST))
    return path


@pytest.fixture(scope="module")
def hidden(client: httpx.Client) -> tuple[int, ...]:
    """The colour of a hidden cell in a small picture, where it is a box."""
    mask = [[True, False], [True, True]]
    small = drawn(client, "image/svg+xml", input=[[1], [1]], mask=mask, heatmap={"theme": "light"}).decode()
    (colour,) = re.findall(r'<rect [^>]*fill="#(\w{6})"><title>[^<]*→[^<]*hidden by', small)
    return tuple(bytes.fromhex(colour))


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_middle_of_each_cell_has_its_colour(
    program: str, svg: Path, hidden: tuple[int, ...], tmp_path: Path
) -> None:
    image = next(ElementTree.parse(svg).iter("{http://www.w3.org/2000/svg}image"))
    x, y, width, height = (float(image.attrib[name]) * SCALE for name in ("x", "y", "width", "height"))
    PROGRAMS[program](svg, tmp_path / "weights.png")
    pixels = np.asarray(Image.open(tmp_path / "weights.png").convert("RGB")).astype(int)
    expected = np.where(CHOSEN[..., None], ALL, np.where(MASK[..., None], NONE, hidden))
    for part in (0.3, 0.5, 0.7):
        rows = (y + (np.arange(TOKENS) + part) * height / TOKENS).astype(int)
        columns = (x + (np.arange(TOKENS) + part) * width / TOKENS).astype(int)
        found = pixels[np.ix_(rows, columns)]
        assert np.abs(found - expected).max() <= 2


# What notebooks show: a result, a report and a heatmap of the library, and the picture of a service.
CELLS = (
    "import numpy as np\nfrom attention_service import attend, compare\nattend(input=np.eye(2), scale=1e4)",
    "compare(np.eye(2)[::-1], input=np.eye(2), scale=1e4)",
    "attend(input=np.eye(2), scale=1e4).heatmap(width_mm=85, dpi=300)",
    "from IPython.display import Image\nImage('service.png')",
)


def test_a_notebook_as_latex_has_the_pictures(client: httpx.Client, tmp_path: Path) -> None:
    """nbconvert runs the notebook, and takes the PNG of each output: it knows neither HTML nor SVG there."""
    asked = {"input": [[1, 0], [0, 1]], "scale": 1e4, "heatmap": {"theme": "light", "width_mm": 85, "dpi": 300}}
    (tmp_path / "service.png").write_bytes(drawn(client, "image/png", **asked))
    cells = [
        {"id": f"c{i}", "cell_type": "code", "metadata": {}, "source": text, "outputs": [], "execution_count": None}
        for i, text in enumerate(CELLS)
    ]
    notebook = {"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}
    (tmp_path / "shown.ipynb").write_text(json.dumps(notebook))
    # Packages may be in another environment, before which this one stands, and their templates with them.
    templates = next(
        file.locate() for file in files("nbconvert") or () if file.match("nbconvert/templates/latex/conf.json")
    )
    run(
        *(sys.executable, "-m", "nbconvert", "--execute", "--to", "latex", "shown.ipynb"),
        folder=tmp_path,
        JUPYTER_PATH=str(Path(str(templates)).resolve().parents[3]),
    )
    text = (tmp_path / "shown.tex").read_text()
    names = re.findall(r"\\adjustimage\{.*\}\{(shown_files/.*\.png)\}", text)
    assert len(names) == len(CELLS)
    assert "<svg" not in text
    images = [Image.open(io.BytesIO((tmp_path / name).read_bytes())) for name in names]
    for image in (images[0], *images[2:]):  # the picture of a report has other colours
        seen = {pixel for _, pixel in image.convert("RGB").getcolors(image.width * image.height) or ()}
        assert {NONE, ALL} <= seen
    for image in images[2:]:
        assert abs(image.width - 85 / 25.4 * 300) <= 1
        assert abs(image.info["dpi"][0] - 300) <= 0.05
