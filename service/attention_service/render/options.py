"""The options of a heatmap, without nulls."""

from __future__ import annotations

from dataclasses import dataclass

from attention_service.attention.outputs import outputs_of
from attention_service.backends.dense.binning import Reduction
from attention_service.schemas.heatmap import Colours, HeatmapOptions, Stage, Theme


@dataclass(frozen=True, slots=True)
class Options:
    """See attention_service.schemas.heatmap.HeatmapOptions."""

    stage: Stage = "attention_weights"
    scale: Colours = "linear"
    vmax: float | None = None
    bins: Reduction = "max"
    max_cells: int = 512
    batch_entry: int = 0
    theme: Theme = "auto"
    width_mm: float | None = None
    dpi: int = 192
    values: bool = True
    title: str | None = None
    bare: bool = False

    @property
    def draws_gradient(self) -> bool:
        """True if the stage is the gradient of a score matrix."""
        return self.stage in outputs_of("gradients")


def make_options(given: HeatmapOptions | None) -> Options:
    """The options of a request; null is the default."""
    return Options() if given is None else Options(**given.given())  # type: ignore[arg-type]  # the same names and types
