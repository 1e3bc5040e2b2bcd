"""The colours of cells: numbers by the colour map, hidden cells by what hides them."""

from __future__ import annotations

from typing import Final

import numpy as np

from attention_service.render.colours import DIVERGING, LEVELS, SEQUENTIAL, is_dark, mixed, rgb, table
from attention_service.render.drawing import Colour
from attention_service.render.picture import GAP, Panel, Picture

WHITE: Final = (255, 255, 255)
BLACK: Final = (0, 0, 0)
# Hidden cells are grey with a tint, so that no number has their colour.
NEUTRAL: Final = rgb("#c8ccd1")
TINT: Final = 0.35


class Painter:
    """Paints the panels of a picture."""

    def __init__(self, picture: Picture) -> None:
        self._picture = picture
        self._table = table(DIVERGING if picture.has_signs else SEQUENTIAL)

    def pixels(self, panel: Panel) -> np.ndarray:
        """The colours of the cells (rows, columns, 4): red, green, blue and opacity, which is 0 in the gap."""
        found = np.full((*panel.values.shape, 4), 255, np.uint8)
        found[..., :3] = self.colours(self.places(panel.values))
        for bits in np.unique(panel.hidden_by):
            if bits == GAP:
                found[panel.hidden_by == GAP] = 0
            elif bits:
                found[panel.hidden_by == bits, :3] = self.hidden(int(bits))
        return found

    def places(self, values: np.ndarray) -> np.ndarray:
        """Where numbers lie on the colour map, from 0 to 1."""
        low, high = self._picture.low, self._picture.high
        numbers = np.nan_to_num(values, nan=low)
        if self._picture.is_log:
            with np.errstate(divide="ignore"):
                numbers, low, high = np.log(np.maximum(numbers, low)), np.log(low), np.log(high)
        if not low < high:
            return np.ones_like(numbers)
        # Halves, as the difference of the largest numbers would overflow.
        return np.clip((numbers / 2 - low / 2) / (high / 2 - low / 2), 0, 1)

    def colours(self, places: np.ndarray) -> np.ndarray:
        """The colours at places of the map, with a last axis of length 3."""
        return self._table[np.rint(places * (LEVELS - 1)).astype(np.intp)]

    def hidden(self, bits: int) -> Colour:
        """The colour of a cell that is hidden: that of the first cause."""
        return mixed(NEUTRAL, self._tint(bits), TINT)

    def mark(self, bits: int) -> Colour:
        """The colour of the line through a hidden cell."""
        return mixed(self._tint(bits), NEUTRAL, TINT)

    def ink(self, fill: Colour) -> Colour:
        """The colour of a number on a cell."""
        return WHITE if is_dark(fill) else BLACK

    def _tint(self, bits: int) -> Colour:
        return rgb(self._picture.causes_of(bits)[0].tint)
