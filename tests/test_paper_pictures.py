"""Pictures for papers: one scale for several, a size on paper, differences of two results, one head of several.

Expected colours are those of test_heatmap.py; chunks of PNG are read as the PNG specification (ISO/IEC 15948) says.
"""

from __future__ import annotations

import io
import itertools
import json
import struct
from pathlib import Path
from typing import Any, Final
from xml.etree import ElementTree

import numpy as np
import pytest
from PIL import Image

from attention_service import attend
from attention_service.backends.registry import Backends
from attention_service.cli import main
from attention_service.codecs.decoded import Decoded
from attention_service.errors import FieldConflict, InvalidRequest
from attention_service.library.result import AttentionResult
from attention_service.render.heatmap import PNG, SVG, Heatmap, make_heatmap_request
from attention_service.render.operation import HeatmapOperation
from tests.helpers.documents import BLOCKS
from tests.test_heatmap import SIXTHS, cells, drawn, normal, picture, svg, texts, viridis

# RdBu by C. Brewer: its ends, its middle, and what lies at 0.7 and 0.8.
BLUE, WHITE, RED, AT_7, AT_8 = "#053061", "#f7f6f6", "#67001f", (0xF4, 0xA5, 0x82), (0xD6, 0x60, 0x4D)
# Scores 2 and -2 in the first row, 0 in the second.
TWO: Final[dict[str, Any]] = {"query": [[2.0, 0.0], [0.0, 2.0]], "key": [[1.0, 0.0], [-1.0, 0.0]], "value": np.eye(2)}
HALVES: Final[dict[str, Any]] = {**SIXTHS, "key": np.zeros((3, 1))}


def rgb(fill: str) -> list[int]:
    return [int(fill[c : c + 2], 16) for c in (1, 3, 5)]


def density(png: bytes) -> tuple[int, int, int]:
    """Pixels per unit in x and y, and the unit (1 is the metre), of the chunk pHYs."""
    place = png.index(b"pHYs")
    return struct.unpack(">IIB", png[place + 4 : place + 13])


def boxes(heatmap: Heatmap) -> dict[str, tuple[str, str]]:
    return cells(ElementTree.fromstring(heatmap.svg))


def test_weights_are_drawn_from_0_to_vmax() -> None:
    root = svg(heatmap={"vmax": 1}, **SIXTHS)
    for key in range(3):
        assert np.abs(np.subtract(rgb(cells(root)[f"0 → {key}"][1]), viridis((key + 1) / 6))).max() <= 1
    assert texts(root)[-3:] == ["0", "0.5", "1"], "the legend"


def test_numbers_beyond_vmax_have_the_last_colours() -> None:
    found = cells(svg(heatmap={"stage": "scores", "vmax": 1.0}, **TWO))
    assert [found[name][1] for name in ("0 → 0", "0 → 1", "1 → 0")] == [RED, BLUE, WHITE]
    half = rgb(cells(svg(heatmap={"stage": "scores", "vmax": 4}, **TWO))["0 → 0"][1])
    assert np.abs(np.subtract(half, np.mean([AT_7, AT_8], axis=0))).max() <= 2
    weights = cells(svg(heatmap={"vmax": 0.25}, **SIXTHS))
    assert weights["0 → 1"][1] == weights["0 → 2"][1] == "#fde725"


def test_a_logarithmic_scale_ends_at_vmax_and_begins_at_a_millionth_of_it() -> None:
    request = SIXTHS | {"key": np.log([[1.0], [10.0], [100.0]])}
    found = cells(svg(heatmap={"scale": "log", "vmax": 1}, **request))
    for key, weight in enumerate((1 / 111, 10 / 111, 100 / 111)):
        expected = viridis(1 + np.log10(weight) / 6)
        assert np.abs(np.subtract(rgb(found[f"0 → {key}"][1]), expected)).max() <= 1


@pytest.mark.parametrize("vmax", [1e-30, 1e18])
@pytest.mark.parametrize("scale", ["linear", "log"])
def test_any_vmax_is_drawn(vmax: float, scale: str) -> None:
    last = "#fde725" if vmax < 1 else "#440154"
    assert {fill for _, fill in cells(svg(heatmap={"vmax": vmax, "scale": scale}, **SIXTHS)).values()} == {last}


def test_a_picture_without_numbers_has_a_scale_around_0() -> None:
    zeros = {"query": [[0.0]], "key": [[0.0]], "value": [[0.0]]}
    assert texts(svg(heatmap={"stage": "scores"}, **zeros))[-3:] == ["-1", "0", "1"]


@pytest.mark.parametrize(("width", "dpi"), [(85, 300), (180, 600), (338.67, 150)])
def test_a_png_has_its_width_on_paper(width: float, dpi: int) -> None:
    found = drawn(PNG, {"width_mm": width, "dpi": dpi}, **SIXTHS)
    across, down, unit = density(found)
    pixels = Image.open(io.BytesIO(found)).size
    assert pixels[0] == round(width / 25.4 * dpi)
    assert unit == 1
    assert across == down == pytest.approx(dpi / 0.0254, rel=2e-3)
    assert pixels[0] / across * 1000 == pytest.approx(width, rel=1e-3)


def test_a_png_without_a_width_has_two_pixels_for_each_of_the_svg() -> None:
    root, found = svg(**SIXTHS), drawn(PNG, **SIXTHS)
    size = Image.open(io.BytesIO(found)).size
    assert size == tuple(round(2 * float(root.attrib[side])) for side in ("width", "height"))
    assert density(found)[0] == pytest.approx(192 / 0.0254, rel=2e-3)


def test_an_svg_has_its_width_on_paper_and_its_own_form() -> None:
    plain, found = svg(**SIXTHS), svg(heatmap={"width_mm": 85}, **SIXTHS)
    assert found.attrib["viewBox"] == plain.attrib["viewBox"]
    height = 85 * float(plain.attrib["height"]) / float(plain.attrib["width"])
    assert found.attrib["width"] == "85mm"
    assert float(found.attrib["height"].removesuffix("mm")) == pytest.approx(height, abs=0.01)


@pytest.mark.parametrize("bare", [False, True])
def test_a_png_of_any_size_is_drawn(bare: bool) -> None:
    """No side has more than 8192 pixels, and the file says how large they are."""
    for width, dpi in itertools.product((1, 1000), (24, 1200)):
        found = drawn(PNG, {"width_mm": width, "dpi": dpi, "bare": bare}, **SIXTHS)
        size = Image.open(io.BytesIO(found)).size
        assert max(size) <= 8192
        assert bare is (size == (3, 3))
        assert size[0] / density(found)[0] * 1000 == pytest.approx(width, rel=0.3)  # of 12 pixels to the metre


def test_a_small_png_shows_the_mean_of_cells_and_leaves_none_out() -> None:
    """Columns of 1 and 0 in turns, two and more to a pixel: no pixel has the colour of 0 or of 1."""
    bias = np.where(np.arange(400) % 2, 0.0, -1e4)
    fields = {"query": np.zeros((400, 1)), "key": np.zeros((400, 1)), "value": np.zeros((400, 1)), "bias": bias}
    found = drawn(PNG, {"width_mm": 10, "dpi": 150, "title": ""}, **fields)
    image = np.asarray(Image.open(io.BytesIO(found)).convert("RGB")).astype(int)
    middle = image[image.shape[0] // 2, image.shape[1] // 3 : image.shape[1] // 2]
    assert np.ptp(middle, axis=0).max() < 60


def test_the_memory_of_a_large_png_is_estimated() -> None:
    operation = HeatmapOperation(Backends().choose("numpy", "cpu"))
    fields = Decoded({**SIXTHS, "heatmap": {"width_mm": 1000, "dpi": 1200}}, frozenset())
    wanted = make_heatmap_request(fields)
    across, down = Image.open(io.BytesIO(drawn(PNG, {"width_mm": 1000, "dpi": 1200}, **SIXTHS))).size
    assert operation.cost(wanted, PNG).compute > 2 * 3 * across * down, "three bytes for each, and a copy"
    assert operation.cost(wanted, SVG).compute < across * down


def test_the_command_draws_for_paper(tmp_path: Path) -> None:
    (tmp_path / "request.json").write_text(json.dumps({"input": [[1.0, 0.0], [0.0, 1.0]]}))
    options = ["--width-mm", "85", "--dpi", "300", "--vmax", "1"]
    assert main(["heatmap", str(tmp_path / "request.json"), "-o", str(tmp_path / "it.png"), *options]) == 0
    assert density((tmp_path / "it.png").read_bytes())[0] == pytest.approx(300 / 0.0254, rel=2e-3)


# Differences.


def results() -> tuple[AttentionResult, AttentionResult]:
    return attend(**SIXTHS), attend(**HALVES)


def test_a_difference_is_blue_below_and_red_above_0() -> None:
    """Of the weights 1/6, 2/6, 3/6 and 1/3, 1/3, 1/3."""
    one, other = results()
    found = one.heatmap(minus=other)
    values = boxes(found)
    assert [float(values[f"0 → {key}"][0]) for key in range(3)] == pytest.approx([-1 / 6, 0, 1 / 6], abs=1e-6)
    assert [values[f"0 → {key}"][1] for key in (0, 2)] == [BLUE, RED]
    assert rgb(values["0 → 1"][1]) == pytest.approx(rgb(WHITE), abs=2)
    assert texts(ElementTree.fromstring(found.svg))[0] == "difference of attention weights: 3 queries by 3 keys"
    assert repr(found) == "Heatmap: difference of attention_weights, 1 head, 3 queries by 3 keys"
    assert texts(ElementTree.fromstring(one.heatmap(minus=other, vmax=1).svg))[-3:] == ["-1", "0", "1"]
    assert len({fill for _, fill in boxes(one.heatmap(minus=one)).values()}) == 1


def test_a_hidden_weight_counts_as_0_and_a_hidden_score_hides_the_difference() -> None:
    """Weights of equal scores: 1, 0 and 1/2, 1/2 with a causal mask, 1/2 everywhere without."""
    fields: dict[str, Any] = {"query": np.zeros((2, 1)), "key": np.zeros((2, 1)), "value": np.zeros((2, 1))}
    causal, free = attend(**fields, is_causal=True), attend(**fields)
    for one, other, sign in ((causal, free, 1), (free, causal, -1)):
        found = boxes(one.heatmap(minus=other))
        numbers = [float(found[f"{q} → {k}"][0]) for q, k in np.ndindex(2, 2)]
        assert numbers == [sign * 0.5, sign * -0.5, 0, 0]
        scores = boxes(one.heatmap("masked_scores", minus=other))
        assert scores["0 → 1"][0] == "hidden by the causal mask"
    same = boxes(causal.heatmap(minus=attend(**{**fields, "key": np.ones((2, 1))}, is_causal=True)))
    assert same["0 → 1"][0] == "hidden by the causal mask"


def test_padding_has_no_say_in_the_colours_of_a_difference() -> None:
    fields: dict[str, Any] = {"value": np.ones((3, 1)), "key_lengths": 2, "query_offset": 0, "scale": 1.0}
    one = attend([[1.0]], [[2.0], [1.0], [1e30]], **fields)
    other = attend([[1.0]], [[0.0], [0.0], [-1e30]], **fields)
    found = boxes(one.heatmap("scores", minus=other))
    assert [found[f"0 → {key}"][0] for key in (0, 1)] == ["2", "1"]
    assert found["0 → 0"][1] != found["0 → 1"][1]


def test_a_difference_of_sinks_has_their_column() -> None:
    one = attend(**SIXTHS, sinks=np.log([6.0]))  # takes half of each row
    other = attend(**SIXTHS, sinks=np.log([2.0]))  # takes a quarter
    assert float(boxes(one.heatmap(minus=other))["0 → sink"][0]) == pytest.approx(0.25)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({**SIXTHS, "query": np.ones((2, 1)), "query_offset": 0}, "1 head, 2 queries, 3 keys"),
        ({**SIXTHS, "sinks": np.zeros(1)}, "1 head, 3 queries, 3 keys, sinks"),
        ({"input": normal(3, 2), "num_heads": 2}, "2 heads, 3 queries, 3 keys"),
        ({"input": normal(3, 3), "layout": "dl"}, "1 head, 3 queries, 3 keys, tokens as columns"),
    ],
)
def test_a_difference_of_other_cells_is_refused(fields: dict[str, Any], text: str) -> None:
    expected = f"/minus: expected a result with 1 head, 3 queries, 3 keys, as this one, got {text}"
    with pytest.raises(FieldConflict) as caught:
        attend(**SIXTHS).heatmap(minus=attend(**fields))
    assert str(caught.value) == expected


def test_a_difference_of_something_else_and_on_a_logarithmic_scale_is_refused() -> None:
    one, other = results()
    with pytest.raises(InvalidRequest, match=r"/minus: expected a result of attend\(\), got ndarray"):
        one.heatmap(minus=other.output)  # type: ignore[arg-type]  # a wrong type
    with pytest.raises(FieldConflict, match="/scale: expected linear"):
        one.heatmap(scale="log", minus=other)


# Heads and labels.


def test_heads_of_a_picture_are_chosen() -> None:
    fields: dict[str, Any] = {"query": normal(3, 2, 2), "key": normal(3, 2, 2, seed=1), "value": normal(3, 2, 2)}
    result = attend(**fields, layout="hld", include=["attention_weights"])
    found = result.heatmap(select_heads=[2, 0])
    assert [text for text in texts(ElementTree.fromstring(found.svg)) if "head" in text][1:] == ["head 2", "head 0"]
    alone = boxes(result.heatmap(select_heads=[1]))
    assert float(alone["0 → 1"][0]) == pytest.approx(result.attention_weights[1, 0, 1], rel=1e-5)
    with pytest.raises(InvalidRequest, match="/select_heads"):
        result.heatmap(select_heads=[3])


def test_labels_of_queries_are_those_of_as_many_keys() -> None:
    words = ["the", "cat", "sat"]
    assert picture(**SIXTHS, query_tokens=words).columns.labels == tuple(words)
    assert picture(**SIXTHS, query_tokens=words, key_tokens=["a", "b", "c"]).columns.labels == ("a", "b", "c")
    fewer = {**SIXTHS, "query": np.ones((2, 1)), "query_offset": 0}
    assert picture(**fewer, query_tokens=["a", "b"]).columns.labels is None
    crossed: dict[str, Any] = {"input": normal(3, 2), "context": normal(3, 2, seed=1)}
    assert picture(**crossed, query_tokens=words).columns.labels is None, "another sequence"


def test_the_programs_of_docs_paper_md_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = [block for block in BLOCKS if (block.page, block.language) == ("docs/paper.md", "python")]
    for block in blocks:
        for code, value, said in block.execute():
            assert value == said, code
    names = {"figure.svg", "figure.png", "sharp.svg", "even.svg", "difference.svg"}
    assert {path.name for path in tmp_path.iterdir()} == names
    assert density((tmp_path / "figure.png").read_bytes())[0] == pytest.approx(300 / 0.0254, rel=2e-3)
    assert [texts(ElementTree.parse(tmp_path / f"{name}.svg").getroot())[-1] for name in ("sharp", "even")] == [
        "20"
    ] * 2
