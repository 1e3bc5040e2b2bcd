"""From a request to the numbers of its picture: heads, bins, labels, and what hides a cell."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, Final, cast

import numpy as np

from attention_service.attention.operands import Operands, make_operands
from attention_service.attention.outputs import Selection
from attention_service.attention.plan import Plan
from attention_service.attention.result import Metadata, Result, make_result
from attention_service.attention.score_term import Cause
from attention_service.attention.spec import AttentionSpec, Output
from attention_service.attention.terms import CAUSES
from attention_service.attention.visibility import causes
from attention_service.backends.base import Check, no_check
from attention_service.backends.dense.binning import BinnedScores, Bins
from attention_service.backends.dense.buffers import WEIGHTS
from attention_service.backends.numpy.backend import NumpyBackend
from attention_service.errors import FieldConflict, InvalidValue, MissingField
from attention_service.render.drawing import plain
from attention_service.render.options import Options

# What stands in the place of the bits of `hidden_by`, for the gap before the column of the sinks.
GAP: Final = -1
# A sink that takes so much of a row is what the weights leave.
LEFT: Final = 1e-3
# Heads of a picture: more could be neither seen nor drawn in time.
MAX_HEADS: Final = 1024
# The stages that show what the masks hide after them.
BEFORE_MASKS: Final = ("scores", "scaled_scores", "capped_scores")
# The axes of a score matrix as backends have them.
SCORES: Final = "bhqk"
# Colours of a logarithmic scale begin at this part of the largest number.
LEAST: Final = 1e-6


@dataclass(frozen=True)
class Panel:
    """The matrix of one head, (rows, columns). values: NaN where hidden; hidden_by: 0, bits, or GAP"""

    title: str
    values: np.ndarray
    hidden_by: np.ndarray


@dataclass(frozen=True)
class Axis:
    """Queries or keys, on a side of a panel.

    what:   "query" or "key"; count: how many there are
    first, last: (cells,), the first and last query or key of each cell
    labels: of all queries or keys, None for none; sink: True if the sink follows, after a gap
    """

    what: str
    count: int
    first: np.ndarray
    last: np.ndarray
    labels: tuple[str, ...] | None
    sink: bool = False

    @property
    def cells(self) -> int:
        """Cells, with the gap and the sink."""
        return len(self.first) + (2 if self.sink else 0)

    def name(self, cell: int) -> str:
        """The query or key of a cell, as text; the first and last of several."""
        if cell >= len(self.first):
            return "sink"
        first, last = int(self.first[cell]), int(self.last[cell])
        if first < last:
            return f"{first} to {last}"
        return str(first) if self.labels is None else plain(str(self.labels[first]))


@dataclass(frozen=True)
class Picture:
    """All that a heatmap shows.

    low, high: of the colours; causes: what hides cells, by its bit in `hidden_by`
    bin_size:  most queries and keys in a cell
    """

    stage: str
    panels: tuple[Panel, ...]
    rows: Axis
    columns: Axis
    low: float
    high: float
    is_log: bool
    causes: Mapping[int, Cause]
    reduction: str
    bin_size: tuple[int, int]
    metadata: Metadata

    @property
    def has_signs(self) -> bool:
        """True if numbers below 0 are drawn, with the diverging map."""
        return self.low < 0

    @property
    def bins(self) -> str:
        """How many queries and keys share a cell, as text; empty if none do."""
        if self.bin_size == (1, 1):
            return ""
        word = "maximum" if self.reduction == "max" else "mean"
        return f"each cell is the {word} of up to {self.bin_size[0]} by {self.bin_size[1]}"

    def causes_of(self, bits: int) -> list[Cause]:
        """What hides a cell."""
        return [cause for bit, cause in self.causes.items() if bits & bit]


def bins_of(length: int, most: int) -> np.ndarray:
    """The bin of each of `length` queries or keys, of at most `most` bins of nearly equal size."""
    return np.arange(length) * min(length, most) // length


def picture_plan(plan: Plan, options: Options) -> Plan:
    """The plan that computes what a picture shows: nothing but its stage, and why cells are hidden.

    Errors: InvalidValue for a batch entry that is not there, FieldConflict for a logarithm of scores and for
    too many heads, MissingField for a gradient without a cotangent.
    """
    if options.batch_entry >= plan.sizes.batch_size:
        expected = f"a number below the batch size {plan.sizes.batch_size}"
        raise InvalidValue.of("/heatmap/batch_entry", expected, options.batch_entry)
    heads = plan.sizes.num_heads if plan.selection.heads is None else len(plan.selection.heads)
    if heads > MAX_HEADS:
        raise FieldConflict.at("/select_heads", f"at most {MAX_HEADS} heads in a picture", f"{heads} heads")
    if options.scale == "log" and (options.stage != "attention_weights" or plan.normalization == "sum"):
        raise FieldConflict.at("/heatmap/scale", "linear for numbers that may be negative", "log")
    gradients = None
    if options.draws_gradient:
        if plan.gradients is None:
            expected = f"grad_output or grad_logsumexp beside the stage {options.stage}"
            raise MissingField.at("/grad_output", expected, "neither")
        gradients = replace(plan.gradients, wanted=())
    include: set[Output] = {cast(Output, options.stage), "hidden_by"}
    if plan.normalization == "softmax" and plan.all_sinks is not None:
        include.add("logsumexp")
    averages = averages_heads(plan, options)
    selection = Selection(include=frozenset(include), average_heads=averages)
    return replace(plan, gradients=gradients, selection=selection)


def whole_plan(shown: Plan, options: Options) -> Plan:
    """The plan that computes a gradient as a whole matrix, of which bins are made. shown: the plan of the picture"""
    return replace(shown, selection=Selection(include=frozenset({cast(Output, options.stage)})))


def averages_heads(plan: Plan, options: Options) -> bool:
    """True if the picture is of the mean over heads: as in a response, of the weights only."""
    return plan.selection.average_heads and options.stage == "attention_weights"


def make_picture(
    spec: AttentionSpec,
    plan: Plan,
    options: Options,
    backend: NumpyBackend,
    check: Check = no_check,
    returned: Result | None = None,
    numbers: Sequence[int] | None = None,
) -> Picture:
    """The picture of a request. plan: of the request itself; returned: what was computed of it before, None for nothing

    numbers: of heads in titles, None for 0, 1, 2 and so on
    Errors: InvalidRequest of every kind, and what `check` raises.
    """
    shown = picture_plan(plan, options)
    sizes, chosen = plan.sizes, plan.selection
    heads = np.arange(sizes.num_heads) if chosen.heads is None else chosen.heads
    queries = np.arange(sizes.query_length) if chosen.queries is None else np.sort(chosen.queries)
    row_bins = np.full(sizes.query_length, -1)
    row_bins[queries] = bins_of(len(queries), options.max_cells)
    columns = bins_of(sizes.key_length, options.max_cells)
    stage = cast(Output, options.stage)
    bins = Bins(stage, options.batch_entry, heads, row_bins, columns, options.bins, averages_heads(plan, options))
    operands = cache(partial(make_operands, spec, shown, spec.sources))  # read once, and only if scores are computed
    found, metadata = _binned(plan, shown, options, operands, bins, backend, check, returned)
    values, hidden = _with_sinks(plan, options, found, bins)
    values = _as_returned(values, stage, plan)
    visible = _visible(plan, options, hidden, operands, bins, backend, check)
    low, high = _limits(values[visible if visible.any() else hidden == 0], options)
    rows = _axis("query", queries, row_bins[queries], _labels(spec, plan, "query", options))
    keys = _axis("key", np.arange(sizes.key_length), columns, _labels(spec, plan, "key", options))
    keys = replace(keys, sink=values.shape[-1] > len(keys.first))
    if plan.score_axes.endswith("kq"):
        rows, keys, values, hidden = keys, rows, values.swapaxes(-1, -2), hidden.swapaxes(-1, -2)
    present = int(np.bitwise_or.reduce(hidden[hidden != GAP], initial=0))  # the legend names what hides a cell
    return Picture(
        stage=options.stage,
        panels=tuple(Panel(*one) for one in zip(_titles(plan, options, heads, numbers), values, hidden, strict=True)),
        rows=rows,
        columns=keys,
        low=low,
        high=high,
        is_log=options.scale == "log",
        causes={bit: CAUSES[name] for name, bit in causes(plan.terms).items() if bit & present},
        reduction=options.bins,
        bin_size=(int(np.bincount(row_bins[queries]).max()), int(np.bincount(columns).max())),
        metadata=metadata,
    )


def _binned(
    plan: Plan,
    shown: Plan,
    options: Options,
    operands: Callable[[], Operands],
    bins: Bins,
    backend: NumpyBackend,
    check: Check,
    returned: Result | None,
) -> tuple[BinnedScores, Metadata]:
    """The numbers that are drawn: weights that were returned, or what the plan `shown` computes. plan: of the request

    Computed is also what needs more than the weights, and where these are not of all heads and queries.
    """
    if options.draws_gradient:
        whole = whole_plan(shown, options)
        with np.errstate(all="ignore"):
            found = make_result(whole, backend.execute(whole, operands(), "cpu", check))
        return _bins_of_matrix(shown, found[bins.stage], bins, backend), found.metadata
    chosen = plan.selection
    is_part = chosen.heads is not None or chosen.queries is not None or chosen.average_heads
    is_enough = bins.stage == WEIGHTS and plan.all_sinks is None and not is_part
    weights = returned.arrays.get(WEIGHTS) if returned is not None and is_enough else None
    if returned is None or weights is None:
        return backend.bin_scores(shown, operands(), bins, check)
    return _bins_of_matrix(shown, weights, bins, backend), returned.metadata


def _bins_of_matrix(shown: Plan, matrix: np.ndarray, bins: Bins, backend: NumpyBackend) -> BinnedScores:
    """The bins of weights, or of a gradient, as a response has them: of all heads and queries."""
    axes = "".join(axis for axis in SCORES if axis not in shown.score_axes) + shown.score_axes
    four = matrix.reshape((1,) * (4 - matrix.ndim) + matrix.shape)
    # What hides a key hides its gradient as it hides its weight.
    return backend.bin_weights(
        shown, four.transpose([axes.index(axis) for axis in SCORES]), replace(bins, stage=WEIGHTS)
    )


def _visible(
    plan: Plan,
    options: Options,
    hidden: np.ndarray,
    operands: Callable[[], Operands],
    bins: Bins,
    backend: NumpyBackend,
    check: Check,
) -> np.ndarray:
    """True for cells that nothing hides, in stages before the masks neither then nor later, (h, rows, columns).

    Garbage in the padding, which the masks will hide, would make all other numbers look alike.
    """
    if options.stage not in BEFORE_MASKS or not causes(plan.terms):
        return hidden == 0
    after = picture_plan(plan, replace(options, stage="masked_scores"))
    found, _ = backend.bin_scores(after, operands(), replace(bins, stage="masked_scores"), check)
    return (hidden == 0) & (found.hidden_by == 0)


def _axis(what: str, tokens: np.ndarray, bins: np.ndarray, labels: tuple[str, ...] | None) -> Axis:
    """The axis of ascending queries or keys, and the bin of each."""
    starts = np.flatnonzero(np.diff(bins, prepend=-1))
    return Axis(what, len(tokens), tokens[starts], tokens[np.append(starts[1:], len(bins)) - 1], labels)


def key_labels(spec: AttentionSpec, plan: Plan) -> tuple[Any, ...] | None:
    """The labels of all keys: those of the queries if none are given, as many keys as queries, and no context."""
    is_self = spec.context is None and plan.sizes.query_length == plan.sizes.key_length
    return spec.query_tokens if spec.key_tokens is None and is_self else spec.key_tokens


def _labels(spec: AttentionSpec, plan: Plan, what: str, options: Options) -> tuple[str, ...] | None:
    """The labels of queries or keys of the batch entry."""
    given = spec.query_tokens if what == "query" else key_labels(spec, plan)
    if not given:
        return None
    entry = given if isinstance(given[0], str) else given[options.batch_entry]
    return tuple(entry)


def _titles(plan: Plan, options: Options, heads: np.ndarray, numbers: Sequence[int] | None) -> list[str]:
    """The titles of the panels, one for each of these heads, or one for their mean."""
    if averages_heads(plan, options) and len(heads) > 1:
        return [f"mean of {len(heads)} heads"]
    entry = f"batch entry {options.batch_entry} of {plan.sizes.batch_size}"
    parts = [entry] if plan.sizes.batch_size > 1 else []
    named = heads if numbers is None else [numbers[head] for head in heads]
    return [", ".join([f"head {head}", *parts] if plan.sizes.num_heads > 1 else parts) for head in named]


def has_sinks(plan: Plan, options: Options) -> bool:
    """True if sinks have a column of their own."""
    return plan.all_sinks is not None and options.stage == "attention_weights"


def _with_sinks(plan: Plan, options: Options, found: BinnedScores, bins: Bins) -> tuple[np.ndarray, np.ndarray]:
    """Values and bits (h, rows, columns), with a gap and a column for the sinks if these take weight."""
    if plan.all_sinks is None or not has_sinks(plan, options):
        return found.values, found.hidden_by
    kept = bins.rows >= 0
    entry = bins.batch_entry if len(plan.all_sinks) > 1 else 0
    # What the weights leave is exact for large sinks, the logsumexp for small ones.
    left = 1 - found.sums
    with np.errstate(over="ignore"):
        small = np.exp(np.minimum(plan.all_sinks[entry, bins.heads, :, 0] - found.logsumexp, 0))
    weights = np.where(left > LEFT, left, small)[:, kept]
    if bins.average_heads:
        weights = weights.mean(axis=0, keepdims=True)
    starts = np.flatnonzero(np.diff(bins.rows[kept], prepend=-1))
    if options.bins == "max":
        column = np.maximum.reduceat(weights, starts, axis=-1)
    else:
        column = np.add.reduceat(weights, starts, axis=-1) / np.diff(starts, append=weights.shape[-1])
    gap = np.full_like(column, np.nan)
    values = np.concatenate([found.values, gap[..., None], column[..., None]], axis=-1)
    hidden = np.pad(found.hidden_by, [(0, 0), (0, 0), (0, 2)])
    hidden[..., -2] = GAP
    return values, hidden


def _as_returned(values: np.ndarray, stage: Output, plan: Plan) -> np.ndarray:
    """Numbers rounded to the type of a response. Those beyond its range stay: only hidden ones can be there."""
    with np.errstate(over="ignore"):
        rounded = values.astype(plan.output_dtype(stage)).astype(np.float64)
    return np.where(np.isinf(rounded), values, rounded)


def _limits(values: np.ndarray, options: Options) -> tuple[float, float]:
    """The numbers at the ends of the colour map: around 0 for numbers with signs, from 0 for weights.

    values: those of all cells that count
    """
    seen = values[np.isfinite(values)]
    low, high = (float(seen.min()), float(seen.max())) if seen.size else (0.0, 0.0)
    if options.stage != "attention_weights" or low < 0:
        most = options.vmax or most_of(-low, high)
        return -most, most
    high = options.vmax or high or 1.0
    if options.scale != "log":
        return 0.0, high
    positive = seen[seen > 0]
    is_free = options.vmax is None and positive.size
    return max(float(positive.min()) if is_free else 0.0, high * LEAST), high


def most_of(*numbers: float) -> float:
    """The largest of numbers of at least 0, of which half is not 0; 1 if all are 0."""
    return max(*numbers, float(np.finfo(np.float64).tiny)) if any(numbers) else 1.0
