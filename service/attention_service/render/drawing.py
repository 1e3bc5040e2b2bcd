"""A drawing: boxes, lines, texts and one image of cells, in pixels from the top left corner."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Literal

import numpy as np

Colour = tuple[int, int, int]
# What has other colours in the light and in the dark theme.
Ink = Literal["paper", "ink", "muted", "rule"]
Anchor = Literal["start", "middle", "end"]

COLOURS: dict[str, dict[Ink, str]] = {
    "light": {"paper": "#ffffff", "ink": "#1f2328", "muted": "#59636e", "rule": "#d1d9e0"},
    "dark": {"paper": "#0d1117", "ink": "#f0f6fc", "muted": "#9198a1", "rule": "#3d444d"},
}


@dataclass(frozen=True, slots=True)
class Box:
    """A filled rectangle. title: shown on hover"""

    x: float
    y: float
    width: float
    height: float
    fill: Colour | Ink
    title: str = ""


@dataclass(frozen=True, slots=True)
class Line:
    """A straight line, one pixel wide."""

    x1: float
    y1: float
    x2: float
    y2: float
    stroke: Colour | Ink


@dataclass(frozen=True, slots=True)
class Text:
    """A line of text. x, y: of its anchor on the base line; is_turned: read from bottom to top"""

    x: float
    y: float
    text: str
    size: float
    fill: Colour | Ink = "ink"
    anchor: Anchor = "start"
    is_turned: bool = False


@dataclass(frozen=True, slots=True)
class Cells:
    """Cells as one image. pixels: (rows, columns, 4), uint8, red, green, blue, opacity; cell: side of a pixel"""

    x: float
    y: float
    pixels: np.ndarray
    cell: float


# Pixels of a drawing to the inch, as CSS has them, and millimetres.
PIXELS: Final = 96
MM: Final = 25.4
# Characters of a label or title that are drawn.
MAX_TEXT: Final = 200

Shape = Box | Line | Text | Cells


@dataclass(slots=True)
class Drawing:
    """Shapes in the order in which they are drawn.

    title: what is seen, for readers of the screen
    width_mm: on paper, None for pixels at 96 to the inch; dpi: pixels of a PNG to the inch
    """

    width: float
    height: float
    title: str
    shapes: list[Shape] = field(default_factory=list)
    width_mm: float | None = None
    dpi: int = 192

    @property
    def inches(self) -> float:
        """The width on paper."""
        return self.width / PIXELS if self.width_mm is None else self.width_mm / MM


def text_width(text: str, size: float) -> float:
    """About how wide a text is: no renderer is asked. Wide letters (East Asian, emoji) count as one and two thirds."""
    return size * sum(1.0 if ord(letter) > 0x2E7F else 0.6 for letter in text)


def counted(number: int, what: str) -> str:
    """So many heads, queries or keys as text. what: their name in the singular"""
    plural = {"query": "queries"}.get(what, f"{what}s")
    return f"{number} {what if number == 1 else plural}"


def plain(text: str) -> str:
    """A line of text that can be drawn: without line breaks and control characters, and not longer than anybody reads.

    What XML cannot hold (section 2.2 of XML 1.0) becomes the replacement character.
    """
    cut = text if len(text) <= MAX_TEXT else text[: MAX_TEXT - 1] + "…"
    return "".join(" " if letter.isspace() else letter if _is_legal(ord(letter)) else "\ufffd" for letter in cut)


def _is_legal(code: int) -> bool:
    return 0x20 <= code < 0x7F or 0xA0 <= code <= 0xD7FF or 0xE000 <= code <= 0xFFFD or code >= 0x10000


def shortened(text: str, size: float, width: float) -> str:
    """The text, or its beginning and an ellipsis, if it is wider than so many pixels."""
    if text_width(text, size) <= width:
        return text
    kept = text
    while kept and text_width(kept + "…", size) > width:
        kept = kept[:-1]
    return kept + "…"
