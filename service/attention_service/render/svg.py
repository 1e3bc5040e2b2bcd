"""Drawings as SVG 1.1, which any browser, notebook or editor shows, without a script or another file."""

from __future__ import annotations

import base64
import io
import math
from typing import Final
from xml.sax.saxutils import escape, quoteattr

from PIL import Image

from attention_service.render.drawing import COLOURS, Box, Cells, Colour, Drawing, Ink, Line, Shape, Text
from attention_service.schemas.heatmap import Theme

CLASS: Final = "attention-heatmap"
# Pixels of a cell to each side, and of all cells of an image: PNG packs repeated ones to nearly nothing.
MOST_A_SIDE: Final = 8
MOST_PIXELS: Final = 2**21
FONTS: Final = "system-ui, -apple-system, 'Segoe UI', 'Noto Sans', sans-serif"


def to_svg(drawing: Drawing, theme: Theme = "auto") -> str:
    """The SVG of a drawing. theme: auto has both, of which the viewer takes its own"""
    width, height = _number(drawing.width), _number(drawing.height)
    size = f'width="{width}" height="{height}"'
    if (paper := drawing.width_mm) is not None:
        size = f'width="{_number(paper)}mm" height="{_number(paper * drawing.height / drawing.width)}mm"'
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="{CLASS}-{theme}" {size} '
        f'viewBox="0 0 {width} {height}" role="img" font-family="{FONTS}">'
    )
    parts = [head, f"<title>{escape(drawing.title)}</title>", f"<style>{_style(theme)}</style>"]
    return "\n".join([*parts, *map(_shape, drawing.shapes), "</svg>\n"])


def _style(theme: Theme) -> str:
    first = "dark" if theme == "dark" else "light"
    rules = _rules(theme, COLOURS[first])
    return (
        rules if theme != "auto" else f"{rules}@media (prefers-color-scheme:dark){{{_rules(theme, COLOURS['dark'])}}}"
    )


def _rules(theme: Theme, colours: dict[Ink, str]) -> str:
    """The style of the pictures of a theme: a page may hold several, whose styles all count for the whole page."""
    own = f".{CLASS}-{theme}"
    found = [f"{own} .{role}{{fill:{colour}}}" for role, colour in colours.items()]
    return "".join([*found, f"{own} text{{unicode-bidi:isolate}}"])


def _shape(shape: Shape) -> str:
    if isinstance(shape, Box):
        return _box(shape)
    if isinstance(shape, Line):
        ends = (("x1", shape.x1), ("y1", shape.y1), ("x2", shape.x2), ("y2", shape.y2))
        return f"<line {_attributes(ends)} stroke={quoteattr(_colour(shape.stroke))}/>"
    if isinstance(shape, Text):
        return _text(shape)
    return _cells(shape)


def _box(box: Box) -> str:
    places = _attributes((("x", box.x), ("y", box.y), ("width", box.width), ("height", box.height)))
    if not box.title:
        return f"<rect {places} {_fill(box.fill)}/>"
    return f"<rect {places} {_fill(box.fill)}><title>{escape(box.title)}</title></rect>"


def _text(text: Text) -> str:
    x, y = _number(text.x), _number(text.y)
    turned = f' transform="rotate(-90 {x} {y})"' if text.is_turned else ""
    anchor = "" if text.anchor == "start" else f' text-anchor="{text.anchor}"'
    size = _number(text.size)
    return f'<text x="{x}" y="{y}" font-size="{size}"{anchor}{turned} {_fill(text.fill)}>{escape(text.text)}</text>'


def _cells(cells: Cells) -> str:
    """The cells as an image with several pixels for each: few programs but browsers know image-rendering."""
    rows, columns = cells.pixels.shape[:2]
    side = max(1, min(MOST_A_SIDE, math.isqrt(MOST_PIXELS // (rows * columns))))
    image = Image.fromarray(cells.pixels, "RGBA").resize((columns * side, rows * side), Image.Resampling.NEAREST)
    size = (("x", cells.x), ("y", cells.y), ("width", columns * cells.cell), ("height", rows * cells.cell))
    data = base64.b64encode(png_bytes(image)).decode("ascii")
    return (
        f'<image {_attributes(size)} preserveAspectRatio="none" style="image-rendering:pixelated" '
        f'href="data:image/png;base64,{data}"/>'
    )


def png_bytes(image: Image.Image, dpi: float | None = None) -> bytes:
    """An image as PNG. dpi: pixels to the inch that its chunk pHYs says, None for no such chunk"""
    found = io.BytesIO()
    image.save(found, "PNG", compress_level=6, **({} if dpi is None else {"dpi": (dpi, dpi)}))
    return found.getvalue()


def _attributes(pairs: tuple[tuple[str, float], ...]) -> str:
    return " ".join(f'{name}="{_number(number)}"' for name, number in pairs)


def _fill(fill: Colour | Ink) -> str:
    return f'class="{fill}"' if isinstance(fill, str) else f'fill="{_colour(fill)}"'


def _colour(colour: Colour | Ink) -> str:
    if isinstance(colour, str):
        return COLOURS["light"][colour]
    return "#{:02x}{:02x}{:02x}".format(*colour)


def _number(number: float) -> str:
    return f"{number:.2f}".rstrip("0").rstrip(".")
