"""From a picture to a drawing: where panels, labels and the legend stand."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np

from attention_service.render.cells import Painter
from attention_service.render.drawing import (
    Box,
    Cells,
    Colour,
    Drawing,
    Line,
    Text,
    counted,
    plain,
    shortened,
    text_width,
)
from attention_service.render.options import Options
from attention_service.render.picture import GAP, Axis, Panel, Picture

MARGIN: Final = 16.0
FONT: Final = 12.0
SMALL: Final = 10.0
# Pixels that all panels of a row may be wide, and that one panel alone may be high; and the sides of a cell.
WIDTH: Final = 960.0
ALONE: Final = 560.0
LEAST_CELL: Final = 1.0
MOST_CELL: Final = 56.0
# Pixels of the title and what is under it.
HEADER: Final = MARGIN + 3 * FONT + 10
# Labels are cut off beyond so many pixels.
LABEL: Final = 120.0
# Pixels between panels, at least, and above each for its title.
GUTTER: Final = 14.0
TITLE: Final = 18.0
# Up to so many cells are boxes that tell their numbers on hover; more are one image.
MAX_BOXES: Final = 1024
# The side of a cell that has room for a number, and for the line that marks a hidden one.
ROOM: Final = 30.0
LINED: Final = 7.0
# Least distance of labels along an axis, and the lengths of the legend.
STEP: Final = 14.0
BAR: Final = 160.0
SWATCH: Final = 14.0
LEGEND: Final = 56.0
HIDDEN: Final = "hidden by"


@dataclass(frozen=True)
class Grid:
    """Where the panels stand. cell: side of a cell; across: panels in a row; pitch: from panel to panel, in cells"""

    left: float
    top: float
    cell: float
    across: int
    pitch: tuple[int, int]
    size: tuple[int, int]

    def place(self, number: int) -> tuple[float, float]:
        """The left and top of a panel."""
        row, column = divmod(number, self.across)
        return self.left + column * self.pitch[1] * self.cell, self.top + row * self.pitch[0] * self.cell

    def end(self, panels: int) -> tuple[float, float]:
        """The right and bottom of all panels."""
        rows = -(-panels // self.across)
        height, width = self.size
        columns = min(panels, self.across)
        right = self.left + ((columns - 1) * self.pitch[1] + width) * self.cell
        return right, self.top + ((rows - 1) * self.pitch[0] + height) * self.cell


def drawn_pixels(heads: int, rows: int, columns: int) -> int:
    """At least the pixels of the drawing of so many heads with so many cells."""
    across = _across(heads)
    cell = _cell(heads, across, rows, columns)
    width = across * (columns * cell + cell + GUTTER) + LABEL + BAR + 2 * LEGEND
    height = -(-heads // across) * (rows * cell + cell + GUTTER + TITLE) + LABEL + HEADER + 2 * LEGEND
    return int(width * height)


def least_width(heads: int, rows: int, columns: int) -> float:
    """At most the width of the drawing of so many heads with so many cells, if no sinks take two more columns."""
    across = _across(heads)
    return max(2 * MARGIN + BAR, across * columns * _cell(heads, across, rows, columns + 2))


def _cell(heads: int, across: int, rows: int, columns: int) -> float:
    """The side of a cell: as large as there is room, in whole pixels unless that is one."""
    height, width = (ALONE, WIDTH) if heads == 1 else (WIDTH / across - GUTTER,) * 2
    cell = min(MOST_CELL, max(LEAST_CELL, min(height / rows, width / columns)))
    return math.floor(cell) if cell >= 2 else cell


def layout(picture: Picture, options: Options) -> Drawing:
    """The drawing of a picture."""
    painter = Painter(picture)
    if options.bare:
        return _bare(picture, painter, options)
    title = plain(options.title) if options.title is not None else _title(picture)
    grid = _grid(picture, HEADER if title or picture.bins else MARGIN + FONT)
    right, bottom = grid.end(len(picture.panels))
    width = max(right + MARGIN, 2 * MARGIN + max(text_width(title, FONT + 2), legend_width(picture)))
    paper = options.width_mm, options.dpi
    drawing = Drawing(width, bottom + LEGEND + MARGIN, title or _title(picture), [], *paper)
    drawing.shapes.append(Box(0, 0, drawing.width, drawing.height, "paper"))
    if title:
        drawing.shapes.append(Text(MARGIN, MARGIN + FONT, title, FONT + 2))
    note = picture.bins
    if note:
        drawing.shapes.append(Text(MARGIN, MARGIN + 2 * FONT + 4, note, SMALL, "muted"))
    _add_cells(drawing, picture, painter, grid, options)
    for number, panel in enumerate(picture.panels):
        _add_frame(drawing, picture, panel, grid, number)
    add_legend(drawing, picture, painter, bottom + 22)
    return drawing


def _bare(picture: Picture, painter: Painter, options: Options) -> Drawing:
    """Nothing but cells, the panels beside each other."""
    image = np.concatenate([painter.pixels(panel) for panel in picture.panels], axis=1)
    height, width = image.shape[:2]
    return Drawing(width, height, _title(picture), [Cells(0, 0, image, 1)], options.width_mm, options.dpi)


def _title(picture: Picture) -> str:
    rows, columns = picture.rows, picture.columns
    sizes = f"{counted(rows.count, rows.what)} by {counted(columns.count, columns.what)}"
    heads = f", {counted(len(picture.panels), 'head')}" if len(picture.panels) > 1 else ""
    return f"{picture.stage.replace('grad_', 'gradient of ').replace('_', ' ')}: {sizes}{heads}"


def _grid(picture: Picture, header: float) -> Grid:
    """The grid of the panels: as many in a row as fit, with cells as large as fit. header: pixels of the title"""
    height, width = picture.rows.cells, picture.columns.cells
    panels = len(picture.panels)
    across = _across(panels)
    cell = _cell(panels, across, height, width)
    left = MARGIN + FONT + 12 + _label_room(picture.rows, cell)
    titles = TITLE if any(panel.title for panel in picture.panels) else 0.0
    top = header + titles + _header_room(picture.columns, cell) + SMALL + 4
    between = math.ceil(GUTTER / cell), math.ceil((GUTTER + titles) / cell)
    pitch = (height + between[1], width + between[0])
    return Grid(math.ceil(left), math.ceil(top), cell, across, pitch, (height, width))


def _across(panels: int) -> int:
    """How many panels stand in a row: somewhat more than rows, with few empty places."""
    wish = math.sqrt(1.6 * panels)
    return min(range(1, panels + 1), key=lambda across: -panels % across + abs(across - wish))


def _ticks(axis: Axis, cell: float) -> list[tuple[int, str]]:
    """The cells that are labelled, with their labels: all if there is room, else those of round numbers."""
    cells = len(axis.first)
    sink = [(cells + 1, "sink")] if axis.sink and cell >= SMALL else []
    if cell >= SMALL:
        return [(place, axis.name(place)) for place in range(cells)] + sink
    if axis.count <= axis.last[-1]:  # some queries of many: their numbers follow no step
        step = _step(cell, int(axis.last[-1]))
        return [(place, str(int(axis.first[place]))) for place in range(0, cells, step)]
    tokens = np.arange(0, axis.count, _step(cell * cells / axis.count, axis.count))
    places = np.searchsorted(axis.first, tokens, "right") - 1
    return [(int(place), str(token)) for place, token in zip(places, tokens, strict=True)]


def _step(width: float, largest: int) -> int:
    """The least round number of tokens between labels that stand side by side. width: pixels of a token"""
    room = max(2 * STEP, text_width(str(largest), FONT) + 6)
    steps = (part * int(10**power) for power in range(12) for part in (1, 2, 5))
    return next(step for step in steps if step * width >= room)


def _label_room(axis: Axis, cell: float) -> float:
    """The width of the longest label beside the rows."""
    return min(LABEL, max(text_width(text, FONT) for _, text in _ticks(axis, cell)))


def _is_turned(axis: Axis, cell: float) -> bool:
    """True if the labels above columns are too wide to stand side by side."""
    ticks = _ticks(axis, cell)
    step = cell * (ticks[1][0] - ticks[0][0]) if len(ticks) > 1 else math.inf
    return max(text_width(text, FONT) for _, text in ticks) + 6 > step


def _header_room(axis: Axis, cell: float) -> float:
    """The height of the labels above the columns."""
    return _label_room(axis, cell) + 4 if _is_turned(axis, cell) else FONT + 4


def _add_cells(drawing: Drawing, picture: Picture, painter: Painter, grid: Grid, options: Options) -> None:
    height, width = grid.size
    if len(picture.panels) * height * width > MAX_BOXES:
        drawing.shapes.append(_image(picture, painter, grid))
        return
    for number, panel in enumerate(picture.panels):
        x, y = grid.place(number)
        pixels = painter.pixels(panel)
        for row, column in np.ndindex(panel.values.shape):
            if panel.hidden_by[row, column] != GAP:
                place = x + column * grid.cell, y + row * grid.cell
                _add_cell(drawing, picture, painter, panel, pixels, (row, column), place, grid.cell, options)


def _add_cell(  # the parts of one cell
    drawing: Drawing,
    picture: Picture,
    painter: Painter,
    panel: Panel,
    pixels: np.ndarray,
    index: tuple[int, int],
    place: tuple[float, float],
    cell: float,
    options: Options,
) -> None:
    row, column = index
    x, y = place
    red, green, blue = (int(part) for part in pixels[row, column, :3])
    fill: Colour = (red, green, blue)
    bits, value = int(panel.hidden_by[row, column]), float(panel.values[row, column])
    what = f"{HIDDEN} {' and '.join(cause.name for cause in picture.causes_of(bits))}" if bits else f"{value:.6g}"
    names = f"{picture.rows.name(row)} → {picture.columns.name(column)}"
    if picture.rows.what == "key":
        names = f"{picture.columns.name(column)} → {picture.rows.name(row)}"
    drawing.shapes.append(Box(x, y, cell, cell, fill, f"{names}: {what}"))
    if bits and cell >= LINED:
        drawing.shapes.append(Line(x + 2, y + cell - 2, x + cell - 2, y + 2, painter.mark(bits)))
    elif not bits and options.values and cell >= ROOM:
        text = _number(value)
        size = min(FONT, cell / (0.62 * len(text)))
        drawing.shapes.append(Text(x + cell / 2, y + cell / 2 + size * 0.35, text, size, painter.ink(fill), "middle"))


def _number(value: float) -> str:
    """A number that fits into a cell: two decimals, unless it is small or large. Only 0 is written as 0.00."""
    if abs(value) >= 100:
        return f"{value:.3g}"
    return f"{value:.2f}" if abs(value) >= 0.005 or value == 0 else f"{value:.0e}".replace("e-0", "e-")


def _image(picture: Picture, painter: Painter, grid: Grid) -> Cells:
    """All panels as one image, with a pixel for each cell."""
    height, width = grid.size
    panels = len(picture.panels)
    rows, columns = -(-panels // grid.across), min(panels, grid.across)
    shape = ((rows - 1) * grid.pitch[0] + height, (columns - 1) * grid.pitch[1] + width, 4)
    image = np.zeros(shape, np.uint8)
    for number, panel in enumerate(picture.panels):
        row, column = divmod(number, grid.across)
        y, x = row * grid.pitch[0], column * grid.pitch[1]
        image[y : y + height, x : x + width] = painter.pixels(panel)
    return Cells(grid.left, grid.top, image, grid.cell)


def _add_frame(drawing: Drawing, picture: Picture, panel: Panel, grid: Grid, number: int) -> None:
    """Title and labels of a panel: of rows in the first column of panels, of columns in the first row of them."""
    x, y = grid.place(number)
    row, column = divmod(number, grid.across)
    header = _header_room(picture.columns, grid.cell) + SMALL + 4 if row == 0 else 4
    if panel.title:
        drawing.shapes.append(Text(x, y - header - 4, panel.title, FONT, "ink"))
    if column == 0:
        _add_row_labels(drawing, picture.rows, grid, x, y)
    if row == 0:
        _add_column_labels(drawing, picture.columns, grid, x, y)


def _add_row_labels(drawing: Drawing, axis: Axis, grid: Grid, x: float, y: float) -> None:
    for cell, text in _ticks(axis, grid.cell):
        middle = y + (cell + 0.5) * grid.cell
        size = min(FONT, max(SMALL - 1, grid.cell))
        label = shortened(text, size, LABEL)
        drawing.shapes.append(Text(x - 6, middle + size * 0.35, label, size, "muted", "end"))
    middle = y + grid.size[0] * grid.cell / 2
    drawing.shapes.append(Text(MARGIN + SMALL, middle, axis.what, SMALL, "muted", "middle", is_turned=True))


def _add_column_labels(drawing: Drawing, axis: Axis, grid: Grid, x: float, y: float) -> None:
    turned = _is_turned(axis, grid.cell)
    size = min(FONT, max(SMALL - 1, grid.cell))
    for cell, text in _ticks(axis, grid.cell):
        middle = x + (cell + 0.5) * grid.cell
        label = shortened(text, size, LABEL)
        if turned:
            drawing.shapes.append(Text(middle + size * 0.35, y - 6, label, size, "muted", "start", is_turned=True))
        else:
            drawing.shapes.append(Text(middle, y - 6, label, size, "muted", "middle"))
    middle = x + len(axis.first) * grid.cell / 2
    drawing.shapes.append(Text(middle, y - _header_room(axis, grid.cell) - 6, axis.what, SMALL, "muted", "middle"))


def legend_width(picture: Picture) -> float:
    """The pixels that the legend takes from the left margin on."""
    names = [text_width(cause.name, SMALL) + SWATCH + 18 for cause in picture.causes.values()]
    return BAR + 24 + sum(names) + (text_width(HIDDEN, SMALL) + 8 if names else 0)


def add_legend(drawing: Drawing, picture: Picture, painter: Painter, y: float) -> None:
    """The colour map with its numbers, and what hides cells."""
    steps = 64
    bar = painter.colours(np.linspace(0, 1, steps))[None]
    bar = np.concatenate([bar, np.full((1, steps, 1), 255, np.uint8)], axis=2)
    drawing.shapes.append(Cells(MARGIN, y, np.repeat(bar, 4, axis=0), BAR / steps))
    middle = math.sqrt(picture.low * picture.high) if picture.is_log else (picture.low + picture.high) / 2
    marks: list[tuple[float, float]] = [(0, picture.low), (BAR / 2, middle), (BAR, picture.high)]
    for (place, number), anchor in zip(marks, ("start", "middle", "end"), strict=True):
        x = MARGIN + place
        text = f"{number:.3g}"
        drawing.shapes.append(Text(x, y + 24, text, SMALL, "muted", anchor))  # type: ignore[arg-type]  # three anchors
    x = MARGIN + BAR + 24
    if picture.causes:
        drawing.shapes.append(Text(x, y + SMALL - 1, HIDDEN, SMALL, "muted"))
        x += text_width(HIDDEN, SMALL) + 8
    for bit, cause in picture.causes.items():
        drawing.shapes.append(Box(x, y - 2, SWATCH, SWATCH, painter.hidden(bit), f"{HIDDEN} {cause.name}"))
        drawing.shapes.append(Line(x + 2, y + SWATCH - 4, x + SWATCH - 2, y, painter.mark(bit)))
        drawing.shapes.append(Text(x + SWATCH + 6, y + SMALL - 1, cause.name, SMALL, "muted"))
        x += SWATCH + 18 + text_width(cause.name, SMALL)
