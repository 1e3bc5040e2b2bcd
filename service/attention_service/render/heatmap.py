"""Heatmaps: from the fields of a request to SVG or PNG."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final

from attention_service.attention.plan import Plan, make_plan
from attention_service.attention.result import Metadata
from attention_service.attention.spec import AttentionSpec
from attention_service.backends.base import Backend, Check, no_check
from attention_service.backends.numpy.backend import NumpyBackend
from attention_service.backends.registry import Backends
from attention_service.codecs import Codec
from attention_service.codecs.chunks import Encoded
from attention_service.codecs.decoded import Body, Decoded
from attention_service.pipeline.engine import Engine
from attention_service.pipeline.execution import Execution
from attention_service.pipeline.threaded import Operation, run_in_thread
from attention_service.render.drawing import Drawing, counted
from attention_service.render.layout import drawn_pixels, layout
from attention_service.render.options import Options, make_options
from attention_service.render.picture import make_picture, picture_plan
from attention_service.render.png import SHARP, to_png
from attention_service.render.svg import to_svg
from attention_service.schemas.heatmap import HeatmapRequest, Theme
from attention_service.schemas.validate import validate

SVG: Final = "image/svg+xml"
PNG: Final = "image/png"
# What writes a drawing, by media type; the first is the default.
FORMATS: Final[dict[str, Callable[[Drawing, Theme], bytes]]] = {
    SVG: lambda drawing, theme: to_svg(drawing, theme).encode(),
    PNG: to_png,
}
# Media types by the suffixes of files.
SUFFIXES: Final = {".svg": SVG, ".png": PNG}
# Bytes for each cell of all panels: numbers, bits, counts, and pixels; and for each pixel of a PNG.
CELL_BYTES: Final = 96
LINE_BYTES: Final = 64
SMALL: Final = 2**22
PIXEL_BYTES: Final = 2 * 4 * SHARP**2
# How many times the memory of the same computation without scores is taken: numbers, bits, and what is reduced of them.
TILES: Final = 2


@dataclass(frozen=True)
class HeatmapRequested:
    """A request that is validated and planned. plan: of the request itself"""

    spec: AttentionSpec
    plan: Plan
    options: Options


def make_heatmap_request(decoded: Decoded, *, allow_non_finite: bool = False) -> HeatmapRequested:
    """The heatmap that decoded fields ask for. Errors: InvalidRequest of every kind."""
    body = validate(HeatmapRequest, decoded.fields)
    spec = body.attention_spec(decoded.untyped, allow_non_finite=allow_non_finite)
    spec = spec._replace(include=(), top_k=None, backend="numpy", device="cpu")
    wanted = HeatmapRequested(spec, make_plan(spec), make_options(body.heatmap))
    picture_plan(wanted.plan, wanted.options)  # raises its errors
    return wanted


def draw(
    wanted: HeatmapRequested, media_type: str, backend: Backend, check: Check = no_check
) -> tuple[bytes, Metadata]:
    """The bytes of a heatmap, and the metadata of what was computed for it.

    backend: NumPy's. Errors: InvalidRequest of every kind, and what `check` raises.
    """
    assert isinstance(backend, NumpyBackend)
    picture = make_picture(wanted.spec, wanted.plan, wanted.options, backend, check)
    return FORMATS[media_type](layout(picture, wanted.options), wanted.options.theme), picture.metadata


class Heatmap:
    """A picture of a request, which notebooks show. It is drawn when it is asked for.

    heatmap.save("weights.svg")
    heatmap.svg, heatmap.png
    """

    def __init__(self, wanted: HeatmapRequested, backend: Backend) -> None:
        self._wanted = wanted
        self._backend = backend

    @classmethod
    def of(cls, spec: AttentionSpec, plan: Plan, options: Options) -> Heatmap:
        """The picture of a request that was computed. Errors: InvalidRequest for options that do not fit it."""
        picture_plan(plan, options)  # raises its errors
        return cls(HeatmapRequested(spec, plan, options), Backends().choose("numpy", "cpu"))

    @cached_property
    def svg(self) -> str:
        """The picture as SVG."""
        return draw(self._wanted, SVG, self._backend)[0].decode()

    @cached_property
    def png(self) -> bytes:
        """The picture as PNG."""
        return draw(self._wanted, PNG, self._backend)[0]

    def save(self, path: str | Path) -> None:
        """Write the picture, as SVG or PNG by the suffix of the file. Errors: ValueError for another suffix, OSError"""
        file = Path(path)
        media_type = SUFFIXES.get(file.suffix.lower())
        if media_type is None:
            raise ValueError(f"{file.name}: expected a name that ends in {' or '.join(SUFFIXES)}")
        file.write_bytes(self.svg.encode() if media_type == SVG else self.png)

    def __repr__(self) -> str:
        plan, stage = self._wanted.plan, self._wanted.options.stage
        chosen, sizes = plan.selection, plan.sizes
        heads = sizes.num_heads if chosen.heads is None else len(chosen.heads)
        queries = sizes.query_length if chosen.queries is None else len(chosen.queries)
        parts = counted(heads, "head"), counted(queries, "query"), counted(sizes.key_length, "key")
        return f"Heatmap: {stage}, {parts[0]}, {parts[1]} by {parts[2]}"

    @property
    def html(self) -> str:
        """The picture as a part of a page."""
        return f"<div>{self.svg}</div>"

    def _repr_html_(self) -> str:
        """What Jupyter, VS Code and Colab show."""
        return self.html


class HeatmapOperation(Operation[HeatmapRequested]):
    """POST /attention/heatmap. media_type: of the picture"""

    what = "a heatmap"

    def __init__(self, media_type: str) -> None:
        self._media_type = media_type

    def prepare(self, decoded: Decoded) -> HeatmapRequested:
        """The request of a heatmap."""
        return make_heatmap_request(decoded)

    def memory(self, prepared: HeatmapRequested, engine: Engine) -> int:
        """Tiles, bins and pixels."""
        sizes, most = prepared.plan.sizes, prepared.options.max_cells
        chosen = prepared.plan.selection.heads
        heads = sizes.num_heads if chosen is None else len(chosen)
        rows, columns = min(sizes.query_length, most), min(sizes.key_length, most) + 2
        pixels = drawn_pixels(heads, rows, columns) if self._media_type == PNG else 0
        tiles = TILES * engine.reference.peak_bytes(prepared.plan, "cpu")
        lines = LINE_BYTES * (heads * sizes.query_length + sizes.key_length)
        return SMALL + tiles + lines + CELL_BYTES * heads * rows * columns + PIXEL_BYTES * pixels

    def answer(
        self, prepared: HeatmapRequested, engine: Engine, request_id: str, check: Check
    ) -> tuple[bytes, Metadata]:
        """The picture."""
        return draw(prepared, self._media_type, engine.reference, check)


async def run_heatmap(
    engine: Engine, body: Body, decoder: Codec, media_type: str, execution: Execution, request_id: str
) -> Encoded:
    """The encoded picture of the request in a body, see `run_in_thread`."""
    return await run_in_thread(HeatmapOperation(media_type), engine, body, decoder, media_type, execution, request_id)
