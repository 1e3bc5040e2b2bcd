"""The difference of two pictures, blue below 0 and red above it, as the page shows what an option changed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from attention_service.attention.plan import Plan
from attention_service.errors import FieldConflict
from attention_service.render.drawing import counted
from attention_service.render.options import Options
from attention_service.render.picture import GAP, Panel, Picture, averages_heads, has_sinks, most_of


def check_alike(plan: Plan, other: Plan, options: Options) -> None:
    """Check that pictures of two plans have the same cells. Errors: FieldConflict."""
    if options.scale == "log":
        raise FieldConflict.at("/scale", "linear for numbers that may be negative", "log")
    wanted, found = _shape(plan, options), _shape(other, options)
    if wanted != found:
        raise FieldConflict.at("/minus", f"a result with {wanted}, as this one", found)


def _shape(plan: Plan, options: Options) -> str:
    chosen, sizes = plan.selection, plan.sizes
    heads = sizes.num_heads if chosen.heads is None else len(chosen.heads)
    queries = sizes.query_length if chosen.queries is None else len(chosen.queries)
    sinks = ", sinks" if has_sinks(plan, options) else ""
    columns = ", tokens as columns" if plan.score_axes.endswith("kq") else ""
    mean = " as their mean" if averages_heads(plan, options) else ""
    parts = counted(heads, "head") + mean, counted(queries, "query"), counted(sizes.key_length, "key")
    return ", ".join(parts) + sinks + columns


def difference(one: Picture, other: Picture, vmax: float | None) -> Picture:
    """The numbers of a picture minus those of another one with the same cells.

    A hidden weight or gradient counts as 0; scores that either one hides are hidden. vmax: see HeatmapOptions
    """
    hidden_is_zero = "scores" not in one.stage or one.stage.startswith("grad_")
    panels = [_panel(*pair, hidden_is_zero) for pair in zip(one.panels, other.panels, strict=True)]
    largest = max(float(np.abs(panel.values[panel.hidden_by == 0]).max(initial=0)) for panel in panels)
    most = vmax or most_of(min(largest, one.high + other.high))  # what masks will hide has no say in `high`
    causes = {**other.causes, **one.causes}
    present = np.bitwise_or.reduce(
        [bits for panel in panels for bits in panel.hidden_by[panel.hidden_by != GAP]] or [0]
    )
    return replace(
        one,
        stage=f"difference of {one.stage}",
        panels=tuple(panels),
        low=-most,
        high=most,
        causes={bit: causes[bit] for bit in sorted(causes) if bit & present},
    )


def _panel(one: Panel, other: Panel, hidden_is_zero: bool) -> Panel:
    """The difference of two panels. hidden_is_zero: True to hide only what both hide"""
    with np.errstate(over="ignore"):
        values = np.nan_to_num(np.nan_to_num(one.values) - np.nan_to_num(other.values))
    hides, other_hides = one.hidden_by != 0, other.hidden_by != 0
    is_hidden = hides & other_hides if hidden_is_zero else hides | other_hides
    hidden = np.where(is_hidden, np.where(hides, one.hidden_by, other.hidden_by), 0)
    return replace(one, values=np.where(is_hidden, np.nan, values), hidden_by=hidden)
