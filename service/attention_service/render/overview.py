"""Several heatmaps as one picture: a row of small ones for each, as for the layers and heads of a model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from attention_service.backends.base import Backend
from attention_service.render.cells import Painter
from attention_service.render.drawing import Box, Cells, Drawing, Shape, Text, counted, plain, shortened, text_width
from attention_service.render.heatmap import FORMATS, Drawable
from attention_service.render.layout import FONT, LABEL, LEGEND, MARGIN, SMALL, WIDTH, add_legend, legend_width
from attention_service.render.picture import Picture
from attention_service.schemas.heatmap import Theme

# Pixels between panels, and the most of the side of one.
GAP: Final = 6.0
SIDE: Final = 96.0
# Cells on each side of a panel: more could not be told apart.
MAX_CELLS: Final = 64


class OverviewRow(NamedTuple):
    """A row of an overview. name: of the layer; heads: the names of its panels; requested: their heatmap"""

    name: str
    heads: Sequence[str]
    requested: Drawable


@dataclass(frozen=True)
class OverviewRequested:
    """An overview that was asked for. title: what stands above it, None for what it shows, empty for nothing

    width_mm, dpi: see HeatmapOptions
    """

    rows: Sequence[OverviewRow]
    stage: str
    theme: Theme
    title: str | None
    width_mm: float | None = None
    dpi: int = 192

    def picture(self, backend: Backend) -> list[Picture]:
        """The numbers of all rows, with one scale of colours. Errors: InvalidRequest of every kind."""
        pictures = [row.requested.picture(backend) for row in self.rows]
        low, high = min(each.low for each in pictures), max(each.high for each in pictures)
        causes = {bit: cause for each in pictures for bit, cause in each.causes.items()}
        return [replace(each, low=low, high=high, causes=causes) for each in pictures]

    def written(self, picture: list[Picture], media_type: str) -> bytes:
        """The overview as a file of a media type."""
        return FORMATS[media_type](_layout(self, picture), self.theme)

    def __str__(self) -> str:
        heads = max(len(row.heads) for row in self.rows)
        return f"{self.stage}, {counted(len(self.rows), 'layer')} of {counted(heads, 'head')}"


def _layout(requested: OverviewRequested, pictures: list[Picture]) -> Drawing:
    """The drawing of an overview: layers in rows, heads in columns."""
    rows, heads = requested.rows, max(len(row.heads) for row in requested.rows)
    title = plain(requested.title if requested.title is not None else str(requested).replace("_", " "))
    names = [shortened(plain(row.name), FONT, LABEL) for row in rows]
    sizes = [picture.panels[0].values.shape for picture in pictures]
    cells = [_cell(heads, *size) for size in sizes]
    pitch = max(cell * columns for cell, (_, columns) in zip(cells, sizes, strict=True)) + GAP
    left = MARGIN + max(text_width(name, FONT) for name in names) + GAP
    top = MARGIN + (FONT + GAP if title else 0)
    note = "each panel: queries down, keys across" + "".join(f"; {each.bins}" for each in pictures[:1] if each.bins)
    legend = legend_width(pictures[0])
    width = max(left + heads * pitch, MARGIN + max(text_width(title, FONT + 2), text_width(note, SMALL), legend))
    shapes: list[Shape] = [Text(MARGIN, MARGIN + FONT, title, FONT + 2)] if title else []
    shapes.append(Text(MARGIN, top + SMALL, note, SMALL, "muted"))
    paper = requested.width_mm, requested.dpi
    drawing = Drawing(width + MARGIN, 0, title or str(requested), shapes, *paper)
    y = top + 2 * SMALL + 3 * GAP
    longest = max(rows, key=lambda row: len(row.heads))
    for column, name in enumerate(longest.heads):
        drawing.shapes.append(Text(left + (column + 0.5) * pitch - GAP / 2, y - GAP, name, SMALL, "muted", "middle"))
    for name, picture, cell in zip(names, pictures, cells, strict=True):
        height = picture.panels[0].values.shape[0] * cell
        painter = Painter(picture)
        drawing.shapes.append(Text(left - GAP, y + height / 2 + FONT * 0.35, name, FONT, "ink", "end"))
        for column, panel in enumerate(picture.panels):
            drawing.shapes.append(Cells(left + column * pitch, y, painter.pixels(panel), cell))
        y += max(height, FONT) + GAP
    add_legend(drawing, pictures[0], Painter(pictures[0]), y + GAP)
    drawing.height = y + LEGEND
    drawing.shapes.insert(0, Box(0, 0, drawing.width, drawing.height, "paper"))
    return drawing


def _cell(heads: int, rows: int, columns: int) -> float:
    """The side of a cell: in whole pixels, at least one."""
    side = min(SIDE, WIDTH / heads - GAP)
    return max(1, math.floor(side / max(rows, columns)))
