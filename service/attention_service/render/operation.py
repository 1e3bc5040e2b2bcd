"""Heatmaps as an operation of the pipeline."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Final

from attention_service.attention.cost import copied_bytes
from attention_service.backends.base import Backend, Check, no_check
from attention_service.codecs.chunks import Encoded, whole
from attention_service.codecs.decoded import Decoded
from attention_service.layers.layer import Layer
from attention_service.pipeline.operation import Cost, Operation
from attention_service.render.drawing import MM, PIXELS
from attention_service.render.heatmap import FORMATS, PNG, HeatmapRequested, make_heatmap_request
from attention_service.render.layout import drawn_pixels, least_width
from attention_service.render.options import Options
from attention_service.render.picture import Picture, picture_plan, whole_plan
from attention_service.render.png import MAX_SIDE
from attention_service.render.svg import MOST_A_SIDE, MOST_PIXELS
from attention_service.schemas.heatmap import HeatmapOptions, HeatmapRequest

# Bytes for each cell of all panels: numbers, bits, counts, and pixels; and for each pixel of a PNG.
CELL_BYTES: Final = 96
LINE_BYTES: Final = 64
SMALL: Final = 2**22
PIXEL_BYTES: Final = 2 * 4
# How many times the memory of the same computation without scores is taken: numbers, bits, and what is reduced of them.
TILES: Final = 2


class HeatmapOperation(Operation[HeatmapRequested, str, Picture]):
    """POST /attention/heatmap. backend: NumPy's, which computes pictures"""

    schemas = (HeatmapRequest, HeatmapOptions)

    def __init__(self, backend: Backend) -> None:
        self.encoders = {media_type: media_type for media_type in FORMATS}
        self._backend = backend

    def prepare(self, decoded: Decoded, layer: Layer | None = None, check: Check = no_check) -> HeatmapRequested:
        return make_heatmap_request(decoded, layer)

    def cost(self, request: HeatmapRequested, encoder: str) -> Cost:
        """Tiles, bins and pixels. Always in a worker thread: drawing takes longer than computing."""
        plan, most = request.plan, request.options.max_cells
        sizes, chosen = plan.sizes, plan.selection.heads
        heads = sizes.num_heads if chosen is None else len(chosen)
        rows, columns = min(sizes.query_length, most), min(sizes.key_length, most) + 2
        cells = heads * rows * columns
        pixels = min(MOST_PIXELS, MOST_A_SIDE**2 * cells)
        if encoder == PNG:
            pixels = _pixels(request.options, heads, rows, columns)
        lines = LINE_BYTES * (heads * sizes.query_length + sizes.key_length)
        drawing = lines + CELL_BYTES * cells + PIXEL_BYTES * pixels
        memory = SMALL + self._computing_bytes(request) + drawing
        return Cost(math.inf, memory, memory, encodes_inline=False)

    def _computing_bytes(self, request: HeatmapRequested) -> int:
        """Bytes of the tiles and their bins, and of the whole matrix of a gradient."""
        plan, options, copied = request.plan, request.options, copied_bytes(request.plan, request.spec)
        matrix = 0
        if options.draws_gradient:
            matrix = self._backend.peak_bytes(whole_plan(picture_plan(plan, options), options), "cpu", copied)
        without = replace(plan, gradients=None, selection=replace(plan.selection, include=frozenset()))
        return matrix + TILES * self._backend.peak_bytes(without, "cpu", copied)

    def compute(self, request: HeatmapRequested, check: Check) -> Picture:
        return request.picture(self._backend, check)

    def encode(self, request: HeatmapRequested, result: Picture, encoder: str, request_id: str) -> Encoded:
        return whole(encoder, request.written(result, encoder))


def _pixels(options: Options, heads: int, rows: int, columns: int) -> int:
    """At least the pixels of a PNG of so many heads with so many cells, of which two columns may be of sinks."""
    drawn = max(drawn_pixels(heads, rows, columns), drawn_pixels(heads, columns, rows))  # rows may be keys
    width = min(least_width(heads, rows, columns - 2), least_width(heads, columns - 2, rows))
    inches = width / PIXELS if options.width_mm is None else options.width_mm / MM
    return int(min(drawn * (options.dpi * inches / width) ** 2, max(drawn, MAX_SIDE**2)))
