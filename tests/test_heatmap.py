"""Heatmaps. Expected colours are interpolated here between the anchors of viridis, as matplotlib prints them."""

from __future__ import annotations

import base64
import io
import itertools
import json
import re
import shutil
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any, Final
from xml.etree import ElementTree

import httpx
import numpy as np
import pytest
from PIL import Image

from attention_service import attend
from attention_service.attention.terms import CAUSES
from attention_service.backends.registry import Backends
from attention_service.cli import main
from attention_service.codecs.decoded import Decoded
from attention_service.errors import FieldConflict, InvalidRequest, InvalidValue
from attention_service.pipeline.engine import Engine
from attention_service.render.colours import DIVERGING, SEQUENTIAL
from attention_service.render.heatmap import PNG, SVG, draw, make_heatmap_request
from attention_service.render.layout import layout
from attention_service.render.operation import HeatmapOperation
from attention_service.render.picture import Picture, make_picture
from attention_service.routes.page import FOLDER
from attention_service.schemas.heatmap import HeatmapOptions
from attention_service.settings import Settings
from tests.helpers.documents import BLOCKS, ROOT
from tests.helpers.wire import MEDIA_TYPES, write

# matplotlib.colormaps["viridis"] at 0, 0.1, … 1.
VIRIDIS: Final = (
    *("440154", "482475", "414487", "355f8d", "2a788e", "21918c"),
    *("22a884", "44bf70", "7ad151", "bddf26", "fde725"),
)
NAMESPACE: Final = "{http://www.w3.org/2000/svg}"
WORDS: Final = ["the", "cat", "sat"]
# Scores log 1, log 2, log 3 for each query: the weights are 1/6, 2/6, 3/6.
ROW: Final = np.log([[1.0], [2.0], [3.0]])
SIXTHS: Final[dict[str, Any]] = {"query": np.ones((3, 1)), "key": ROW, "value": np.ones((3, 1)), "scale": 1.0}


def viridis(place: float) -> tuple[int, ...]:
    at = round(place * 255) / 255 * 10
    low = min(int(at), 9)
    ends = [[int(VIRIDIS[i][c : c + 2], 16) for c in (0, 2, 4)] for i in (low, low + 1)]
    return tuple(round(a + (b - a) * (at - low)) for a, b in zip(*ends, strict=True))


def drawn(media_type: str = SVG, heatmap: dict[str, Any] | None = None, **fields: Any) -> bytes:
    wanted = make_heatmap_request(Decoded({**fields, "heatmap": heatmap or {}}, frozenset()))
    return draw(wanted, media_type, Backends().choose("numpy", "cpu"))


def picture(heatmap: dict[str, Any] | None = None, **fields: Any) -> Picture:
    wanted = make_heatmap_request(Decoded({**fields, "heatmap": heatmap or {}}, frozenset()))
    backend: Any = Backends().choose("numpy", "cpu")
    return make_picture(wanted.spec, wanted.plan, wanted.options, backend)


def svg(**fields: Any) -> ElementTree.Element:
    return ElementTree.fromstring(drawn(**fields))


def cells(root: ElementTree.Element) -> dict[str, tuple[str, str]]:
    """What each cell says: from "query → key" to its number or what hides it, and its colour."""
    found = {}
    for box in root.iter(f"{NAMESPACE}rect"):
        title = box.findtext(f"{NAMESPACE}title", "")
        if "→" in title:
            name, _, what = title.partition(": ")
            found[name] = what, box.attrib["fill"]
    return found


def texts(root: ElementTree.Element) -> list[str]:
    return [text.text or "" for text in root.iter(f"{NAMESPACE}text")]


def weights_of(query: np.ndarray, key: np.ndarray, hidden: np.ndarray) -> np.ndarray:
    scores = np.where(hidden, -np.inf, query @ key.swapaxes(-1, -2) / np.sqrt(query.shape[-1]))
    exponentials = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return np.asarray(exponentials / exponentials.sum(axis=-1, keepdims=True))


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape)


def test_the_colours_of_cells_are_those_of_the_map() -> None:
    found = cells(svg(**SIXTHS, key_tokens=WORDS))
    assert len(found) == 9
    for query, (place, word) in itertools.product(range(3), enumerate(WORDS)):
        what, fill = found[f"{query} → {word}"]
        assert float(what) == pytest.approx((place + 1) / 6, rel=1e-5)
        ours = tuple(int(fill[c : c + 2], 16) for c in (1, 3, 5))
        assert np.abs(np.subtract(ours, viridis((place + 1) / 3))).max() <= 1


def test_a_png_has_the_same_colours() -> None:
    image = Image.open(io.BytesIO(drawn(PNG, {"values": False}, **SIXTHS)))
    pixels = np.asarray(image.convert("RGB")).reshape(-1, 3)
    seen = {tuple(int(part) for part in pixel) for pixel in np.unique(pixels, axis=0)}
    for place in (1 / 3, 2 / 3, 1):
        assert any(np.abs(np.subtract(pixel, viridis(place))).max() <= 1 for pixel in seen)


def test_a_bare_png_has_a_pixel_for_each_cell() -> None:
    image = np.asarray(Image.open(io.BytesIO(drawn(PNG, {"bare": True}, **SIXTHS))).convert("RGB"))
    assert image.shape == (3, 3, 3)
    expected = [[viridis(place) for place in (1 / 3, 2 / 3, 1)]] * 3
    assert np.abs(image.astype(int) - expected).max() <= 1


def test_numbers_stand_in_cells_with_room() -> None:
    found = texts(svg(**SIXTHS))
    assert found.count("0.17") == found.count("0.33") == found.count("0.50") == 3
    assert "0.50" not in texts(svg(heatmap={"values": False}, **SIXTHS))


def test_hidden_cells_say_what_hides_them() -> None:
    root = svg(input=normal(4, 2), is_causal=True, window={"left": 1}, key_lengths=3, query_tokens=list("abcd"))
    found = cells(root)
    assert {"the causal mask", "the window", "key padding"} <= set(texts(root))  # the legend
    assert found["a → b"][0] == "hidden by the causal mask"
    assert found["d → a"][0] == "hidden by the window"
    assert found["a → d"][0] == "hidden by key padding and the causal mask"
    assert not found["b → a"][0].startswith("hidden")
    colours = {what: fill for what, fill in found.values() if what.startswith("hidden")}
    assert len(set(colours.values())) == 3


def test_scores_have_signs_and_masked_cells_only_after_the_masks() -> None:
    request = {"query": np.eye(2) * 2, "key": np.array([[1.0, 0], [-1, 0]]), "value": np.eye(2), "is_causal": True}
    scores = cells(svg(heatmap={"stage": "scores"}, **request))
    assert (scores["0 → 0"][0], scores["0 → 1"][0]) == ("2", "-2")
    assert (scores["0 → 0"][1], scores["0 → 1"][1]) == ("#67001f", "#053061")  # the ends of RdBu
    assert scores["1 → 0"][1] == "#f7f6f6"  # its middle, between two levels
    masked = cells(svg(heatmap={"stage": "masked_scores"}, **request))
    assert masked["0 → 1"][0] == "hidden by the causal mask"


@pytest.mark.parametrize("stage", ["scores", "scaled_scores", "capped_scores"])
@pytest.mark.parametrize("garbage", [1e30, np.inf, np.nan])
def test_hidden_numbers_of_any_size_leave_the_colours_of_the_others(stage: str, garbage: float) -> None:
    """Padding may hold anything. Its numbers are in the picture, but not at the end of the colours."""
    query, key = np.array([[1.0], [-1.0]]), np.array([[2.0], [1.0], [garbage]])
    result = attend(query, key, np.ones((3, 1)), key_lengths=2, query_offset=0, scale=1.0)
    found = cells(ElementTree.fromstring(result.heatmap(stage).svg))  # type: ignore[arg-type]  # a parameter
    assert (found["0 → 0"][1], found["1 → 0"][1]) == ("#67001f", "#053061")  # the ends of RdBu
    assert found["0 → 1"][1] not in ("#67001f", "#f7f6f6")
    assert found["0 → 2"][0] == ("1e+30" if garbage == 1e30 else "hidden by key padding")
    nothing = attend(query, key[:2], np.ones((2, 1)), key_lengths=0, query_offset=0, scale=1.0)
    fills = [fill for _, fill in cells(ElementTree.fromstring(nothing.heatmap("scores").svg)).values()]
    assert len(set(fills)) == 4, "if nothing is visible, the colours are those of all"


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("stage", ["attention_weights", "scaled_scores"])
def test_a_picture_shows_the_numbers_that_a_response_returns(dtype: str, stage: Any) -> None:
    """Rounded to the type of the response: no weight of float16 has six digits."""
    query, key = normal(2, 3, 4)
    result = attend(query, key, key, dtype=dtype, include=[stage])
    found = cells(ElementTree.fromstring(result.heatmap(stage).svg))
    assert len(found) == 9
    for row, column in np.ndindex(3, 3):
        assert found[f"{row} → {column}"][0] == f"{float(result[stage][row, column]):.6g}"


def test_what_hides_a_key_has_the_colour_that_the_page_gives_it() -> None:
    style = (FOLDER / "page.css").read_text(encoding="utf-8")
    tints = {name: cause.tint for name, cause in CAUSES.items()}
    assert {name: found[1] for name in CAUSES if (found := re.search(rf"--{name}: (#\w+);", style))} == tints
    assert len(set(tints.values())) == len(tints)
    for name, anchors in (("sequential", SEQUENTIAL), ("diverging", DIVERGING)):
        assert f"--{name}: {', '.join(anchors)};" in style


def test_heads_stand_beside_each_other() -> None:
    found = picture(query=normal(3, 4, 2), key=normal(3, 5, 2, seed=1), value=normal(3, 5, 2), layout="hld")
    assert [panel.title for panel in found.panels] == ["head 0", "head 1", "head 2"]
    expected = weights_of(normal(3, 4, 2), normal(3, 5, 2, seed=1), np.zeros((4, 5), bool))
    np.testing.assert_allclose([panel.values for panel in found.panels], expected, rtol=1e-12)


def test_heads_and_queries_are_selected() -> None:
    request: dict[str, Any] = {
        "query": normal(3, 6, 2),
        "key": normal(3, 5, 2, seed=1),
        "value": normal(3, 5, 2),
        "layout": "hld",
    }
    found = picture(**request, select_heads=np.array([2, 0]), select_queries=np.array([5, 1]))
    expected = weights_of(normal(3, 6, 2), normal(3, 5, 2, seed=1), np.zeros((6, 5), bool))
    np.testing.assert_allclose([panel.values for panel in found.panels], expected[[2, 0]][:, [1, 5]], rtol=1e-12)
    assert [panel.title for panel in found.panels] == ["head 2", "head 0"]
    assert [found.rows.name(cell) for cell in range(2)] == ["1", "5"]


def test_heads_are_averaged() -> None:
    request: dict[str, Any] = {
        "query": normal(3, 4, 2),
        "key": normal(3, 4, 2, seed=1),
        "value": normal(3, 4, 2),
        "layout": "hld",
    }
    found = picture(**request, is_causal=True, average_heads=True)
    expected = weights_of(normal(3, 4, 2), normal(3, 4, 2, seed=1), ~np.tri(4, dtype=bool)).mean(axis=0)
    assert [panel.title for panel in found.panels] == ["mean of 3 heads"]
    np.testing.assert_allclose(np.nan_to_num(found.panels[0].values), expected, rtol=1e-12)


def test_heads_are_averaged_before_bins() -> None:
    """Weights of 1 and 0, and of 0 and 1: their mean is a half everywhere, also as a maximum."""
    request: dict[str, Any] = {"query": [[[9.0]], [[-9.0]]], "key": [[[9.0], [-9.0]]] * 2, "value": [[[1.0]] * 2] * 2}
    request |= {"layout": "hld", "query_offset": 0, "average_heads": True}
    assert picture({"max_cells": 1}, **request).panels[0].values[0, 0] == pytest.approx(0.5)
    masked = request | {"mask": [[[True, True]], [[False, True]]]}
    assert picture({"max_cells": 1, "bins": "mean"}, **masked).panels[0].values[0, 0] == pytest.approx(0.5)
    assert len(picture({"stage": "scores"}, **request).panels) == 2  # as in a response


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_sinks_of_any_size_are_right(dtype: Any) -> None:
    empty = picture(input=np.ones((1, 1), dtype), key_mask=np.array([False]), sinks=np.array([-1000.0]))
    assert empty.panels[0].values[0, -1] == 1
    one = np.ones((1, 1), dtype)
    large = picture(query=one, key=one * dtype(1e7), value=one, sinks=np.array([1e7]))
    np.testing.assert_allclose(large.panels[0].values[0, [0, 2]], 0.5)
    small = picture(query=one, key=one, value=one, sinks=np.array([-25.0]))
    assert small.panels[0].values[0, -1] == pytest.approx(np.exp(-26) / (1 + np.exp(-26)), rel=1e-5)


def test_extreme_numbers_have_their_colours() -> None:
    """The largest float64 with both signs, and weights that are all equal on a logarithmic scale."""
    request = {"query": [[1.0], [-1.0]], "key": [[1.7e308]], "value": [[1.0]], "query_offset": 0, "scale": 1e-308}
    found = cells(svg(heatmap={"stage": "scores"}, **request))
    assert (found["0 → 0"][1], found["1 → 0"][1]) == ("#67001f", "#053061")
    equal = cells(svg(heatmap={"scale": "log"}, input=[[0.0], [0.0]]))
    assert {fill for _, fill in equal.values()} == {"#fde725"}


def test_bins_count_the_queries_that_are_selected() -> None:
    found = picture({"max_cells": 1}, input=normal(10, 2), select_queries=np.array([0, 9]))
    assert found.bins == "each cell is the maximum of up to 2 by 10"


def test_pictures_of_several_themes_on_one_page_keep_their_colours() -> None:
    styles = [svg(heatmap={"theme": theme}, **SIXTHS).findtext(f"{NAMESPACE}style", "") for theme in ("dark", "light")]
    selectors = [{rule.partition(" ")[0] for rule in style.split("}") if rule} for style in styles]
    assert selectors[0].isdisjoint(selectors[1])


def test_columns_of_tokens_are_drawn_as_columns() -> None:
    found = picture(query=normal(2, 3), key=normal(2, 4, seed=1), value=normal(2, 4), layout="dl")
    expected = weights_of(normal(2, 3).T, normal(2, 4, seed=1).T, np.zeros((3, 4), bool)).T
    np.testing.assert_allclose(found.panels[0].values, expected, rtol=1e-12)
    assert (found.rows.what, found.columns.what) == ("key", "query")


def test_a_batch_entry_is_drawn() -> None:
    request: dict[str, Any] = {"query": normal(2, 3, 2), "key": normal(2, 3, 2, seed=1), "value": normal(2, 3, 2)}
    labels = [["a", "b", "c"], ["d", "e", "f"]]
    found = picture({"batch_entry": 1}, **request, query_tokens=labels)
    expected = weights_of(normal(2, 3, 2)[1], normal(2, 3, 2, seed=1)[1], np.zeros((3, 3), bool))
    np.testing.assert_allclose(found.panels[0].values, expected, rtol=1e-12)
    assert found.rows.labels == ("d", "e", "f")
    with pytest.raises(InvalidValue, match="/heatmap/batch_entry"):
        picture({"batch_entry": 2}, **request)


@pytest.mark.parametrize("bins", ["max", "mean"])
@pytest.mark.parametrize(("queries", "keys"), [(97, 101), (64, 300), (1, 50)])
def test_many_tokens_are_put_into_bins(bins: str, queries: int, keys: int) -> None:
    query, key = normal(queries, 4), normal(keys, 4, seed=1)
    hidden = np.arange(keys) > np.arange(queries)[:, None] + keys // 3
    found = picture({"bins": bins, "max_cells": 16}, query=query, key=key, value=key, mask=~hidden)
    weights = weights_of(query, key, hidden)
    rows, columns = (np.arange(length) * min(length, 16) // length for length in (queries, keys))
    panel = found.panels[0]
    assert panel.values.shape == (min(queries, 16), 16)
    for row, column in np.ndindex(panel.values.shape):
        here = np.ix_(rows == row, columns == column)
        seen = weights[here][~hidden[here]]
        assert panel.hidden_by[row, column] == (0 if seen.size else 1)
        if seen.size:
            assert panel.values[row, column] == pytest.approx(seen.max() if bins == "max" else seen.mean(), rel=1e-9)
    assert ("each cell is the" in layout_texts(found)) == (max(queries, keys) > 16)


@pytest.mark.parametrize("tokens", [100, 777, 2000, 32768])
def test_many_tokens_are_labelled_by_round_numbers(tokens: int) -> None:
    """At equal distances, each where its token is."""
    key = np.zeros((tokens, 1))
    root = svg(query=[[0.0]], key=key, value=key, query_offset=0)
    labels = [
        one for one in root.iter(f"{NAMESPACE}text") if (one.text or "").isdigit() and one.get("class") == "muted"
    ]
    found = {int(one.text or ""): float(one.attrib["x"]) for one in labels if one.get("text-anchor") == "middle"}
    numbers = sorted(found)
    step = numbers[1]
    assert numbers == list(range(0, tokens, step))
    assert str(step).rstrip("0") in ("1", "2", "5")
    distances = np.diff([found[number] for number in numbers])
    assert 28 <= distances.mean() <= 120
    assert np.ptp(distances) <= 4, "not more than two cells"


def test_a_wide_picture_has_room_for_its_labels() -> None:
    """One query, sixty keys, as in a look at one row."""
    names = [f"key{index}" for index in range(60)]
    found = texts(
        svg(query=np.ones((1, 1)), key=np.ones((60, 1)), value=np.ones((60, 1)), query_offset=0, key_tokens=names)
    )
    assert set(names) <= set(found)


def layout_texts(found: Picture) -> str:
    wanted = make_heatmap_request(Decoded({**SIXTHS, "heatmap": {}}, frozenset()))
    return " ".join(getattr(shape, "text", "") for shape in layout(found, wanted.options).shapes)


def test_sinks_have_a_column_of_their_own() -> None:
    """With a sink of log 4 beside scores of log 1, 2, 3 the weights are tenths."""
    found = cells(svg(**SIXTHS, sinks=np.log([4.0])))
    assert float(found["0 → sink"][0]) == pytest.approx(0.4, rel=1e-5)
    assert float(found["0 → 2"][0]) == pytest.approx(0.3, rel=1e-5)


def test_a_logarithmic_scale_shows_small_weights() -> None:
    """Weights of 1/111, 10/111, 100/111 lie at 0, a half and 1."""
    request = SIXTHS | {"key": np.log([[1.0], [10.0], [100.0]])}
    found = cells(svg(heatmap={"scale": "log"}, **request))
    for place, key in ((0, "0"), (0.5, "1"), (1, "2")):
        fill = found[f"0 → {key}"][1]
        ours = tuple(int(fill[c : c + 2], 16) for c in (1, 3, 5))
        assert np.abs(np.subtract(ours, viridis(place))).max() <= 1
    with pytest.raises(FieldConflict, match="/heatmap/scale"):
        drawn(heatmap={"scale": "log", "stage": "scores"}, **SIXTHS)


@pytest.mark.parametrize(
    "label",
    ["<script>alert(1)</script>", "שלום", "😀", "a\x00b", "&amp;", "]]>", '"', "x" * 500, "two\nlines\t", ""],
)
def test_labels_of_any_kind_are_readable(label: str) -> None:
    root = svg(**SIXTHS, query_tokens=[label, "b", "c"])
    safe = label.replace("\x00", "\ufffd").replace("\ud800", "\ufffd").replace("\n", " ").replace("\t", " ")
    found = [text.removesuffix("…") for text in texts(root) if text not in ("b", "c")]
    assert not label or any(safe.startswith(text) for text in found if text)
    assert not root.findall(f".//{NAMESPACE}script")
    assert drawn(PNG, query_tokens=[label, "b", "c"], **SIXTHS)[:4] == b"\x89PNG"


def test_long_labels_and_titles_are_cut_quickly() -> None:
    root = svg(heatmap={"title": "t" * 200}, **SIXTHS, query_tokens=["a" * 10**6, "b", "c"])
    assert any(text.startswith("aaa") and text.endswith("…") for text in texts(root))


def test_too_many_heads_are_refused() -> None:
    query = np.ones((1025, 1, 1))
    with pytest.raises(FieldConflict, match="/select_heads"):
        drawn(query=query, key=query, value=query, layout="hld")


@pytest.mark.slow
@pytest.mark.parametrize(("heads", "tokens", "dim"), [(1, 2048, 64), (12, 256, 16), (64, 40, 8), (300, 300, 4)])
@pytest.mark.parametrize("media_type", [SVG, PNG])
def test_memory_is_estimated(heads: int, tokens: int, dim: int, media_type: str) -> None:
    """Enough, and not many times too much."""
    query = normal(heads, tokens, dim).astype(np.float32)
    fields = {"query": query, "key": query, "value": query, "layout": "hld", "is_causal": True, "heatmap": {}}
    wanted = make_heatmap_request(Decoded(fields, frozenset()))
    engine = Engine(Settings.model_construct())
    tracemalloc.start()
    draw(wanted, media_type, engine.reference)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak <= HeatmapOperation(engine.reference).cost(wanted, media_type).compute


def blown_up(pixels: np.ndarray, side: int) -> np.ndarray:
    return pixels.repeat(side, axis=0).repeat(side, axis=1)


def test_a_large_picture_is_one_image() -> None:
    key = normal(12, 64, 8, seed=1)
    content = drawn(query=normal(12, 64, 8), key=key, value=key, layout="hld", is_causal=True)
    assert len(content) <= 300_000
    found = list(ElementTree.fromstring(content).iter(f"{NAMESPACE}image"))
    assert len(found) == 2  # the cells, and the legend
    image = np.asarray(Image.open(io.BytesIO(base64.b64decode(found[0].attrib["href"].partition(",")[2]))))
    # Each cell is several pixels: programs that smooth an image leave the middle of it as it is.
    side = next(n for n in range(9, 0, -1) if np.array_equal(image, blown_up(image[::n, ::n], n)))
    assert side > 1
    pixels = image[::side, ::side]
    weights = weights_of(normal(12, 64, 8), key, ~np.tri(64, dtype=bool))
    for head, row, column in ((0, 0, 0), (0, 63, 5), (1, 40, 40)):
        place = head * (64 + (pixels.shape[1] - 4 * 64) // 3)
        ours = pixels[row, place + column, :3].astype(int)
        assert np.abs(ours - viridis(weights[head, row, column] / weights.max())).max() <= 1


def test_themes() -> None:
    auto, dark = (drawn(heatmap={"theme": theme}, **SIXTHS).decode() for theme in ("auto", "dark"))
    assert "prefers-color-scheme" in auto
    assert "prefers-color-scheme" not in dark
    assert "#0d1117" in dark
    corner = Image.open(io.BytesIO(drawn(PNG, {"theme": "dark"}, **SIXTHS))).convert("RGB").getpixel((0, 0))
    assert corner == (0x0D, 0x11, 0x17)


def test_rows_that_see_nothing_and_one_cell_are_drawn() -> None:
    assert "hidden by the mask" in json.dumps(cells(svg(**SIXTHS, mask=np.zeros((3, 3), bool))))
    assert cells(svg(query=[[1.0]], key=[[1.0]], value=[[1.0]]))["0 → 0"][0] == "1"
    assert texts(svg(heatmap={"title": "Mine & yours"}, **SIXTHS))[0] == "Mine & yours"


# Over HTTP and on the command line.

REQUEST: Final = {"query": [[1.0]], "key": [[1.0], [1.0]], "value": [[1.0], [2.0]], "query_tokens": ["q"]}


def test_the_media_type_is_negotiated(client: httpx.Client) -> None:
    answer = client.post("/attention/heatmap", json=REQUEST)
    assert (answer.status_code, answer.headers["content-type"]) == (200, SVG)
    assert float(cells(ElementTree.fromstring(answer.content))["q → 1"][0]) == 0.5
    answer = client.post("/attention/heatmap", json=REQUEST, headers={"accept": "image/png"})
    assert answer.headers["content-type"] == PNG
    assert Image.open(io.BytesIO(answer.content)).format == "PNG"
    assert client.post("/attention/heatmap", json=REQUEST, headers={"accept": "image/jpeg"}).status_code == 406


@pytest.mark.parametrize("media_type", MEDIA_TYPES)
def test_every_wire_format_is_drawn(client: httpx.Client, media_type: str) -> None:
    fields = {**SIXTHS, "heatmap": {"stage": "scaled_scores"}}
    answer = client.post("/attention/heatmap", content=write(fields, media_type), headers={"content-type": media_type})
    assert answer.status_code == 200, answer.text
    assert float(cells(ElementTree.fromstring(answer.content))["0 → 2"][0]) == pytest.approx(np.log(3), rel=1e-5)


@pytest.mark.parametrize(
    ("change", "pointer"),
    [
        ({"heatmap": {"stage": "weights"}}, "/heatmap/stage"),
        ({"heatmap": {"colour": "red"}}, "/heatmap/colour"),
        ({"heatmap": {"max_cells": 0}}, "/heatmap/max_cells"),
        ({"heatmap": {"batch_entry": 10**30}}, "/heatmap/batch_entry"),
        ({"heatmap": {"vmax": 0}}, "/heatmap/vmax"),
        ({"heatmap": {"vmax": 10**400}}, "/heatmap/vmax"),
        ({"heatmap": {"width_mm": -85}}, "/heatmap/width_mm"),
        ({"heatmap": {"dpi": 300.5}}, "/heatmap/dpi"),
        ({"heatmap": {"scale": "log", "stage": "scores"}}, "/heatmap/scale"),
        ({"heatmap": []}, "/heatmap"),
        ({"key": [[1.0, 2.0], [1.0, 2.0]]}, "/key"),
    ],
)
def test_errors_name_the_field(client: httpx.Client, change: dict[str, Any], pointer: str) -> None:
    answer = client.post("/attention/heatmap", json=REQUEST | change)
    assert answer.status_code == 422
    assert answer.json()["errors"][0]["pointer"].startswith(pointer)


def test_nulls_are_defaults(client: httpx.Client) -> None:
    nothing = dict.fromkeys(HeatmapOptions.model_fields)
    plain = client.post("/attention/heatmap", json=REQUEST)
    assert client.post("/attention/heatmap", json=REQUEST | {"heatmap": nothing}).content == plain.content
    assert client.post("/attention/heatmap", json=REQUEST | {"heatmap": None}).content == plain.content


def test_the_command_line_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Here; tests/test_cli.py has a process that draws what it reads."""
    request = tmp_path / "request.json"
    request.write_text(json.dumps(REQUEST | {"heatmap": {"title": "from the file"}}))

    assert main(["heatmap", str(request), "-o", str(tmp_path / "a.svg"), "--stage", "scores"]) == 0
    root = ElementTree.parse(tmp_path / "a.svg").getroot()
    assert "from the file" in texts(root)
    assert cells(root)["q → 0"][0] == "1"
    assert main(["heatmap", str(request), "-o", str(tmp_path / "a.gif")]) == 2
    assert ".png" in capsys.readouterr().err
    piped = subprocess.run(
        [sys.executable, "-m", "attention_service", "heatmap", "-", "-o", "-", "--stage", "scores"],
        input=request.read_bytes(),
        capture_output=True,
        check=False,
    )
    assert (piped.returncode, piped.stderr, piped.stdout) == (0, b"", (tmp_path / "a.svg").read_bytes())
    assert main(["heatmap", str(request), "-o", str(tmp_path / "a.svg"), "--max-cells", "0"]) == 1
    assert "/heatmap/max_cells" in capsys.readouterr().err


def test_the_examples_of_the_page_draw(client: httpx.Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks of docs/heatmaps.md. The first picture of the page is that of its request."""
    monkeypatch.chdir(tmp_path)
    blocks = [block for block in BLOCKS if block.page == "docs/heatmaps.md"]
    for block in blocks:
        if block.language == "python":
            block.execute()
        elif "curl" not in block.text or shutil.which("curl"):
            block.run(client.base_url.netloc.decode(), tmp_path)
    drawn = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.suffix in (".svg", ".png")}
    assert drawn.keys() == {"sentence.svg", "gradient.svg", "weights.svg", "scores.png", "scores.svg"}
    assert drawn["sentence.svg"] == (ROOT / "docs" / "images" / "sentence.svg").read_bytes()
    assert "hidden by the causal mask" in drawn["scores.svg"].decode()


# In Python.


def test_a_result_draws_itself() -> None:
    key = np.log([[1.0], [2.0], [3.0]])
    result = attend(np.ones((3, 1)), key, key, scale=1.0, key_tokens=WORDS, top_k=1, include=["attention_weights"])
    assert float(cells(ElementTree.fromstring(result.heatmap().svg))["0 → sat"][0]) == pytest.approx(0.5)
    scores = cells(ElementTree.fromstring(result.heatmap(stage="scaled_scores", values=False).svg))
    assert float(scores["0 → cat"][0]) == pytest.approx(np.log(2), rel=1e-5)
    shown = result._repr_html_()
    assert shown is not None
    assert result.heatmap().svg in shown
    assert result._repr_png_() == result.heatmap()._repr_png_() == result.heatmap().png
    assert "AttentionResult" in shown
    with pytest.raises(InvalidRequest, match="/stage"):
        result.heatmap(stage="weights")  # type: ignore[arg-type]  # a wrong name
    with pytest.raises(ValueError, match=r"\.svg or \.png"):
        result.heatmap().save("weights.gif")


def test_a_stage_that_is_almost_right_is_corrected() -> None:
    result = attend(input=np.ones((2, 1)))
    for wrong, right in (("weights", "attention_weights"), ("masked_score", "masked_scores"), ("Scores", "scores")):
        with pytest.raises(InvalidRequest, match=rf"got string '{wrong}' \(did you mean {right}\?\)"):
            result.heatmap(wrong)  # type: ignore[arg-type]  # a wrong name


def test_its_text_counts_what_it_shows() -> None:
    one = attend([[1.0]], [[1.0]], [[1.0]])
    assert repr(one.heatmap()) == "Heatmap: attention_weights, 1 head, 1 query by 1 key"
    more = attend(input=np.ones((2, 3, 1)), layout="hld", select_heads=[1], select_queries=[0, 2])
    assert repr(more.heatmap("scores")) == "Heatmap: scores, 1 head, 2 queries by 3 keys"


def test_invalid_requests_are_refused() -> None:
    with pytest.raises(InvalidRequest):
        drawn(query=[[1.0]], key=[[1.0]])
    with pytest.raises(InvalidRequest, match="finite"):
        drawn(query=[[1e300]], key=[[1e300]], value=[[1.0]])
