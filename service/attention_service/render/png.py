"""Drawings as PNG."""

from __future__ import annotations

from typing import Final

from PIL import Image, ImageDraw, ImageFont

from attention_service.render.colours import rgb
from attention_service.render.drawing import COLOURS, Box, Cells, Colour, Drawing, Ink, Line, Text
from attention_service.render.svg import png_bytes
from attention_service.schemas.heatmap import Theme

# Pixels of the longest side, unless those of the drawing are more.
MAX_SIDE: Final = 8192
ANCHORS: Final = {"start": "ls", "middle": "ms", "end": "rs"}


def to_png(drawing: Drawing, theme: Theme = "auto") -> bytes:
    """The PNG of a drawing. theme: auto is light

    A letter that Pillow's font lacks is a box.
    """
    shapes = drawing.shapes
    if len(shapes) == 1 and isinstance(shapes[0], Cells):
        return png_bytes(Image.fromarray(shapes[0].pixels, "RGBA"), drawing.width / drawing.inches)
    canvas = _Canvas(drawing, COLOURS["dark" if theme == "dark" else "light"], pixels_of(drawing))
    for shape in shapes:
        canvas.draw(shape)
    return png_bytes(canvas.image, canvas.image.width / drawing.inches)


def pixels_of(drawing: Drawing) -> float:
    """Pixels of the PNG for each of the drawing: so many that texts are sharp on paper, within MAX_SIDE."""
    most = max(1, MAX_SIDE // max(drawing.width, drawing.height))  # whole, as cells of one pixel would be uneven
    return min(drawing.dpi * drawing.inches / drawing.width, most)


class _Canvas:
    """An image that shapes are drawn on. factor: its pixels for each of the drawing"""

    def __init__(self, drawing: Drawing, colours: dict[Ink, str], factor: float) -> None:
        self._colours = colours
        self._factor = factor
        self._fonts: dict[float, ImageFont.FreeTypeFont] = {}
        size = (max(1, round(drawing.width * factor)), max(1, round(drawing.height * factor)))
        self.image = Image.new("RGB", size, rgb(colours["paper"]))
        self._draw = ImageDraw.Draw(self.image)

    def draw(self, shape: Box | Line | Text | Cells) -> None:
        """Draw a shape over those before it."""
        factor = self._factor
        if isinstance(shape, Box):
            x, y = round(shape.x * factor), round(shape.y * factor)
            right, bottom = round((shape.x + shape.width) * factor), round((shape.y + shape.height) * factor)
            self._draw.rectangle((x, y, max(x, right - 1), max(y, bottom - 1)), fill=self._colour(shape.fill))
        elif isinstance(shape, Line):
            ends = [part * factor for part in (shape.x1, shape.y1, shape.x2, shape.y2)]
            self._draw.line(ends, fill=self._colour(shape.stroke), width=max(1, round(factor)))
        elif isinstance(shape, Text):
            self._text(shape)
        else:
            self._cells(shape)

    def _cells(self, cells: Cells) -> None:
        rows, columns = cells.pixels.shape[:2]
        x, y = round(cells.x * self._factor), round(cells.y * self._factor)
        right = round((cells.x + columns * cells.cell) * self._factor)
        bottom = round((cells.y + rows * cells.cell) * self._factor)
        size = max(1, right - x), max(1, bottom - y)
        has_all = size[0] >= columns and size[1] >= rows
        sampling = Image.Resampling.NEAREST if has_all else Image.Resampling.BOX  # the mean of cells, none is left out
        part = Image.fromarray(cells.pixels, "RGBA").resize(size, sampling)
        self.image.paste(part, (x, y), part)

    def _text(self, text: Text) -> None:
        font = self._font(max(1.0, text.size * self._factor))
        fill = self._colour(text.fill)
        x, y = text.x * self._factor, text.y * self._factor
        if not text.is_turned:
            self._draw.text((x, y), text.text, fill=fill, font=font, anchor=ANCHORS[text.anchor])
            return
        left, top, right, bottom = font.getbbox(text.text, anchor="ls")
        width, height = max(1, round(right - left)), max(1, round(bottom - top))
        mask = Image.new("L", (width, height))
        ImageDraw.Draw(mask).text((-left, -top), text.text, fill=255, font=font, anchor="ls")
        turned = mask.rotate(90, expand=True)
        start = {"start": height and width, "middle": width / 2, "end": 0}[text.anchor]
        self.image.paste(fill, (round(x + top), round(y - start)), turned)

    def _colour(self, colour: Colour | Ink) -> Colour:
        return rgb(self._colours[colour]) if isinstance(colour, str) else colour

    def _font(self, size: float) -> ImageFont.FreeTypeFont:
        if size not in self._fonts:
            found = ImageFont.load_default(size)
            assert isinstance(found, ImageFont.FreeTypeFont)
            self._fonts[size] = found
        return self._fonts[size]
