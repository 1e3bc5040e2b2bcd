"""The request of a heatmap."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from attention_service.schemas.closed import Closed
from attention_service.schemas.request import AttentionRequest

Stage = Literal[
    "attention_weights",
    "scores",
    "scaled_scores",
    "capped_scores",
    "masked_scores",
    "grad_masked_scores",
    "grad_scaled_scores",
    "grad_scores",
]
Colours = Literal["linear", "log"]
Bins = Literal["max", "mean"]
Theme = Literal["auto", "light", "dark"]


class HeatmapOptions(Closed):
    """What a heatmap shows, and how."""

    stage: Stage | None = "attention_weights"
    """The matrix that is drawn, by its name in `include`. A gradient needs `grad_output` or `grad_logsumexp`."""
    scale: Colours | None = "linear"
    """How numbers become colours: linear, or log for weights that differ by orders of magnitude."""
    # A generator of C# writes a larger bound as an integer that its compiler refuses.
    vmax: Annotated[float, Field(ge=1e-30, le=1e18)] | None = None
    """The number that has the last colour, so that several pictures have one scale. 1 draws weights from 0 to 1.
    Numbers with signs go from minus it. Larger ones have the last colour, too. Default: the largest that is drawn."""
    bins: Bins | None = "max"
    """What a cell shows where it stands for several queries or keys: their largest or mean number, hidden ones left
    out."""
    max_cells: Annotated[int, Field(ge=1, le=4096)] | None = 512
    """Most cells on each side of a head. More queries or keys are put into bins."""
    batch_entry: Annotated[int, Field(ge=0)] | None = 0
    """The batch entry that is drawn."""
    theme: Theme | None = "auto"
    """light, dark, or auto: an SVG follows its viewer, a PNG is light."""
    width_mm: Annotated[float, Field(ge=1, le=1000)] | None = None
    """The width on paper, in mm. Default: that of its pixels at 96 to the inch."""
    dpi: Annotated[int, Field(ge=24, le=1200)] | None = 192
    """Pixels of a PNG to the inch; fewer if a side would have more than 8192."""
    values: bool | None = True
    """Write numbers into cells that have room for them."""
    title: Annotated[str, Field(max_length=200)] | None = None
    """Text above the picture. Default: what is drawn."""
    bare: bool | None = False
    """Only the cells, without texts; in a PNG one pixel for each cell."""


class HeatmapRequest(AttentionRequest):
    """A request of `/attention`, and how to draw it. `include`, `gradients`, `top_k` and `encoding` have no effect."""

    heatmap: HeatmapOptions | None = None
    """What to draw, and how. Default: the attention weights."""
