"""Where panels, labels and the legend of a heatmap stand, in pixels computed by hand."""

from __future__ import annotations

from typing import Any

from attention_service.codecs.decoded import Decoded
from attention_service.render.drawing import Box, Cells, Drawing, Line, Text
from attention_service.render.heatmap import make_heatmap_request
from attention_service.render.layout import layout
from tests.test_heatmap import SIXTHS, WORDS, normal, picture


def drawing(heatmap: dict[str, Any] | None = None, **fields: Any) -> Drawing:
    wanted = make_heatmap_request(Decoded({**fields, "heatmap": heatmap or {}}, frozenset()))
    return layout(picture(heatmap, **fields), wanted.options)


def places(found: Drawing, text: str) -> list[tuple[float, float, str]]:
    """Where a text stands, and what of it does: its start, middle or end."""
    here = [shape for shape in found.shapes if isinstance(shape, Text) and shape.text == text]
    return [(round(shape.x, 9), round(shape.y, 9), shape.anchor) for shape in here]


def test_where_everything_stands() -> None:
    """Three heads of 2 by 2 cells, 56 pixels wide, with a title.

    From the left: the margin (16), the name of the rows (24), a label of 1 character (7.2) with what rounds it up. From
    the top: margin, title and bins (62), titles of heads (18), labels of columns (16), their name (14). Between panels
    a cell, as that is more than 14 pixels. Base lines are 0.35 of a letter's size below the middle.
    """
    query, key = normal(3, 2, 2), normal(3, 2, 2, seed=1)
    found = drawing({"title": "T"}, query=query, key=key, value=key, layout="hld", is_causal=True)
    lefts, top = (48, 48 + 3 * 56, 48 + 6 * 56), 62 + 18 + 16 + 14
    boxes = [(shape.x, shape.y) for shape in found.shapes if isinstance(shape, Box) and "→" in shape.title]
    assert boxes == [(left + x, top + y) for left in lefts for y in (0, 56) for x in (0, 56)]
    assert places(found, "T") == [(16, 28, "start")]
    assert places(found, "0")[0] == (42, top + 28 + 4.2, "end")
    assert places(found, "0")[1:4] == [(left + 28, top - 6, "middle") for left in lefts]
    assert places(found, "1")[0] == (42, top + 84 + 4.2, "end")
    assert places(found, "1")[1:4] == [(left + 84, top - 6, "middle") for left in lefts]
    assert places(found, "query") == [(16 + 10, top + 56, "middle")]
    assert places(found, "key") == [(left + 56, top - 16 - 6, "middle") for left in lefts]
    assert [places(found, f"head {n}") for n in range(3)] == [[(left, top - 16 - 14 - 4, "start")] for left in lefts]
    assert places(found, "1.00") == [(left + 28, top + 28 + 4.2, "middle") for left in lefts]
    lines = [(shape.x1, shape.y1, shape.x2, shape.y2) for shape in found.shapes if isinstance(shape, Line)]
    assert lines[:3] == [(left + 58, top + 54, left + 110, top + 2) for left in lefts]
    under = top + 112 + 22  # the legend
    bar = next(shape for shape in found.shapes if isinstance(shape, Cells))
    assert (bar.x, bar.y, bar.cell * bar.pixels.shape[1]) == (16, under, 160)
    numbers = [places(found, "0")[-1], places(found, "0.5")[0], places(found, "1")[-1]]
    assert numbers == [(16, under + 24, "start"), (96, under + 24, "middle"), (176, under + 24, "end")]
    # A gap of 24, nine letters of 6 pixels and 8 more, a swatch of 14, a gap of 6.
    assert places(found, "hidden by") == [(200, under + 9, "start")]
    assert lines[3:] == [(264, under + 10, 274, under)]
    assert places(found, "the causal mask") == [(282, under + 9, "start")]
    assert (found.width, found.height) == (lefts[2] + 112 + 16, top + 112 + 56 + 16)


def test_where_long_labels_stand() -> None:
    """Turned, each from 6 pixels above its column, the name above the longest, of 120 pixels at most: 16 letters."""
    found = drawing(**SIXTHS, key_tokens=["the", "cat", "a very long token"])
    assert [places(found, text) for text in ("the", "cat", "a very long tok…")] == [
        [(48 + 56 * place + 28 + 4.2, 200 - 6, "start")] for place in range(3)
    ]
    assert all(shape.is_turned for shape in found.shapes if isinstance(shape, Text) and shape.text in WORDS)
    assert places(found, "key") == [(48 + 84, 200 - 6 - (120 + 4), "middle")]
