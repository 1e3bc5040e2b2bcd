"""Heatmaps: from the fields of a request to SVG or PNG."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Protocol

from attention_service.attention.plan import Plan
from attention_service.attention.result import Result
from attention_service.attention.spec import AttentionSpec
from attention_service.backends.base import Backend, Check, no_check
from attention_service.backends.numpy.backend import NumpyBackend
from attention_service.backends.registry import Backends
from attention_service.codecs.decoded import Decoded
from attention_service.layers.layer import Layer
from attention_service.pipeline.prepare import planned, validated
from attention_service.render.difference import check_alike, difference
from attention_service.render.drawing import Drawing, counted
from attention_service.render.layout import layout
from attention_service.render.options import Options, make_options
from attention_service.render.picture import Picture, make_picture, picture_plan
from attention_service.render.png import to_png
from attention_service.render.svg import to_svg
from attention_service.schemas.heatmap import HeatmapRequest, Theme
from attention_service.whole_file import whole_file

SVG: Final = "image/svg+xml"
PNG: Final = "image/png"
# What writes a drawing, by media type; the first is the default.
FORMATS: Final[dict[str, Callable[[Drawing, Theme], bytes]]] = {
    SVG: lambda drawing, theme: to_svg(drawing, theme).encode(),
    PNG: to_png,
}
# Media types by the suffixes of files.
SUFFIXES: Final = {".svg": SVG, ".png": PNG}


@dataclass(frozen=True)
class HeatmapRequested:
    """A request that is validated and planned.

    plan: of the request itself; returned: what was computed of it before
    minus: another request, whose numbers are subtracted; see `check_alike`
    heads: the numbers that titles have for the heads of the request, None for 0, 1, 2 and so on
    """

    spec: AttentionSpec
    plan: Plan
    options: Options
    returned: Result | None = None
    minus: HeatmapRequested | None = None
    heads: Sequence[int] | None = None

    def picture(self, backend: Backend, check: Check = no_check) -> Picture:
        """The numbers of the heatmap. backend: NumPy's. Errors: InvalidRequest, and what `check` raises."""
        assert isinstance(backend, NumpyBackend)
        drawn = make_picture(self.spec, self.plan, self.options, backend, check, self.returned, self.heads)
        return drawn if self.minus is None else difference(drawn, self.minus.picture(backend, check), self.options.vmax)

    def written(self, picture: Picture, media_type: str) -> bytes:
        """The picture as a file of a media type."""
        return FORMATS[media_type](layout(picture, self.options), self.options.theme)

    def __str__(self) -> str:
        chosen, sizes = self.plan.selection, self.plan.sizes
        heads = sizes.num_heads if chosen.heads is None else len(chosen.heads)
        queries = sizes.query_length if chosen.queries is None else len(chosen.queries)
        parts = counted(heads, "head"), counted(queries, "query"), counted(sizes.key_length, "key")
        of = "" if self.minus is None else "difference of "
        return f"{of}{self.options.stage}, {parts[0]}, {parts[1]} by {parts[2]}"


def make_heatmap_request(decoded: Decoded, layer: Layer | None = None) -> HeatmapRequested:
    """The heatmap that decoded fields ask for. layer: the stored layer that they name

    Errors: InvalidRequest of every kind.
    """
    body, spec = validated(HeatmapRequest, decoded, layer)
    options = make_options(body.heatmap)
    spec = spec._replace(include=(), gradients=None, top_k=None, backend="numpy", device="cpu")
    spec = spec._replace(include=(options.stage,)) if options.draws_gradient else spec.forward()
    wanted = HeatmapRequested(*planned(spec, layer), options)
    picture_plan(wanted.plan, wanted.options)  # raises its errors
    return wanted


class Drawable(Protocol):
    """What a Heatmap draws: a request that was validated, whose text says what it shows."""

    def picture(self, backend: Backend) -> Any:
        """The numbers. Errors: InvalidRequest of every kind."""

    def written(self, picture: Any, media_type: str) -> bytes:
        """The picture as a file of a media type."""


def draw(wanted: Drawable, media_type: str, backend: Backend) -> bytes:
    """The bytes of a heatmap. backend: NumPy's. Errors: InvalidRequest of every kind."""
    return wanted.written(wanted.picture(backend), media_type)


class Heatmap:
    """A picture of a request, which notebooks show. It is drawn when it is asked for.

    heatmap.save("weights.svg")
    heatmap.svg, heatmap.png

    requested: what is drawn
    """

    def __init__(self, wanted: Drawable, backend: Backend) -> None:
        self.requested = wanted
        self._backend = backend

    @classmethod
    def of(cls, wanted: HeatmapRequested) -> Heatmap:
        """The picture of a request that was computed. Errors: InvalidRequest for options that do not fit it."""
        picture_plan(wanted.plan, wanted.options)  # raises its errors
        if wanted.minus is not None:
            picture_plan(wanted.minus.plan, wanted.minus.options)
            check_alike(wanted.plan, wanted.minus.plan, wanted.options)
        return cls(wanted, Backends().choose("numpy", "cpu"))

    @cached_property
    def svg(self) -> str:
        """The picture as SVG."""
        return draw(self.requested, SVG, self._backend).decode()

    @cached_property
    def png(self) -> bytes:
        """The picture as PNG."""
        return draw(self.requested, PNG, self._backend)

    def save(self, path: str | Path) -> None:
        """Write the picture, as SVG or PNG by the suffix of the file. Errors: ValueError for another suffix, OSError"""
        name = Path(path)
        media_type = SUFFIXES.get(name.suffix.lower())
        if media_type is None:
            raise ValueError(f"{name.name}: expected a name that ends in {' or '.join(SUFFIXES)}")
        picture = self.svg.encode() if media_type == SVG else self.png
        with whole_file(path) as file:
            file.write(picture)

    def __repr__(self) -> str:
        return f"Heatmap: {self.requested}"

    @property
    def html(self) -> str:
        """The picture as a part of a page."""
        return f"<div>{self.svg}</div>"

    def _repr_html_(self) -> str:
        """What Jupyter, VS Code and Colab show."""
        return self.html

    def _repr_png_(self) -> bytes:
        """What notebooks show as LaTeX and PDF, which take no HTML."""
        return self.png
