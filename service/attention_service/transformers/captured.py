"""What `capture` found: the attention of layers, by their index."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np

from attention_service.attention.plan import Plan
from attention_service.attention.result import Result
from attention_service.attention.spec import AttentionSpec
from attention_service.backends.registry import Backends
from attention_service.errors import InvalidValue
from attention_service.library import AttentionResult
from attention_service.library.page import check_size
from attention_service.pipeline.prepare import plan_of_fields, planned
from attention_service.render.heatmap import Heatmap
from attention_service.render.overview import MAX_CELLS, OverviewRequested, OverviewRow
from attention_service.schemas.heatmap import Theme
from attention_service.transformers.pages import (
    MOST_IN_NOTEBOOK,
    PageLayer,
    check_sizes,
    in_frame,
    page_of_layers,
)
from attention_service.whole_file import whole_file

# Stages that a picture can be drawn of from what is kept.
DRAWN = ("attention_weights", "masked_scores")
TITLE = "Attention, layer by layer"


class CapturedAttention(AttentionResult):
    """The attention of some queries in one call of a layer. Arrays have the axes b, h, q (only the rows), k or d.

    layer: the index of the layer
    module: the name of its module within the model if `capture` knows the model, else the name of its class
    rows, heads: the queries and the heads that were captured
    role: encoder, decoder, or cross for attention of a decoder to an encoder
    """

    __slots__ = ("heads", "layer", "module", "role", "rows")

    def __init__(self, found: Result, picture: tuple[AttentionSpec, Plan], layer: int, module: str) -> None:
        super().__init__(found, *picture)
        self.layer = layer
        self.module = module
        self.rows: list[int] = []
        self.heads: list[int] = []
        self.role = ""

    def __repr__(self) -> str:
        rows, heads = _listed(self.rows), _listed(self.heads)
        return f"layer {self.layer} ({self.module}), rows {rows}, heads {heads}\n{super().__repr__()}"

    def heatmap(self, stage: Any = "attention_weights", **options: Any) -> Heatmap:
        """A picture of the captured rows: of their weights, or of their masked scores. options: of AttentionResult

        select_heads: heads by their numbers in the model

        Errors: ValueError for another stage, TypeError for an unknown argument, InvalidRequest for a wrong one.
        """
        if stage not in DRAWN:
            raise ValueError(f"a captured layer draws {' or '.join(DRAWN)}, not {stage}")
        known = [*signature(AttentionResult.heatmap).parameters][1:]
        for name in options:
            if name not in known:
                raise TypeError(
                    f"heatmap: expected {', '.join(known)}; got {name}. select_heads=[1] draws head 1 alone"
                )
        return super().heatmap(stage, **options)

    @property
    def _numbers(self) -> list[int]:
        return self.heads

    def _places(self, heads: Sequence[int]) -> Sequence[int]:
        for head in heads:
            if head not in self.heads:
                raise InvalidValue.of("/select_heads", f"heads that were captured, {_listed(self.heads)}", head)
        return [self.heads.index(head) for head in heads]

    @property
    def size(self) -> int:
        """The number of weights."""
        return self._plan.score_count

    def page_layer(self, name: str) -> PageLayer:
        """The layer as a page shows it. name: of the layer there

        Errors: ValueError for more than a page shows."""
        check_size(self._plan)
        spec, plan = planned(self._spec._replace(include=("attention_weights", "masked_scores", "hidden_by")))
        drawn = Backends().choose("numpy", "cpu").program(plan, spec)(spec.sources, None)
        sinks = None if spec.sinks is None else spec.sinks.tolist()
        fields = {"sinks": sinks, "query_tokens": self.query_tokens, "key_tokens": self.key_tokens}
        request = {field: value for field, value in fields.items() if value is not None}
        return PageLayer(name, self.rows, self.heads, self, drawn, request)

    def _page(self) -> str:
        check_sizes([self.size])
        return page_of_layers([self.page_layer(f"Layer {self.layer}")], f"Attention of layer {self.layer}")


class Captured(Mapping[int, CapturedAttention]):
    """The captured layers by their index; of a layer that was called several times, the last call.

    Negative indices count from the last layer of the model, whether it was captured or not.

    calls: all calls in their order
    """

    def __init__(self) -> None:
        self.calls: list[CapturedAttention] = []
        self._identities: list[str] = []
        self._modules: dict[int, set[str]] = {}
        # The largest index of a layer of each role that ran.
        self._last: dict[str, int] = {}
        # How many queries the last call of a layer of each role had if it had none of the chosen rows.
        self._short: dict[tuple[str, int], int] = {}

    @property
    def encoder(self) -> Captured:
        """The layers of encoders."""
        return self._part("encoder")

    @property
    def decoder(self) -> Captured:
        """The layers of decoders, without their attention to an encoder."""
        return self._part("decoder")

    @property
    def cross(self) -> Captured:
        """The layers by which decoders attend to an encoder."""
        return self._part("cross")

    def __getitem__(self, index: int) -> CapturedAttention:
        """The last call of a layer. Errors: KeyError if there is none, or if two modules have this index."""
        layer = index + 1 + max(self._last.values(), default=-1) if index < 0 else index
        modules = self._modules.get(layer, set())
        if len(modules) > 1:
            names = ", ".join(sorted(modules))
            raise KeyError(
                f"{len(modules)} modules are layer {layer}: {names}. Use encoder, decoder or cross, calls, or "
                "capture(model=…) for a part"
            )
        for call in reversed(self.calls):
            if call.layer == layer:
                return call
        for (_, short), queries in self._short.items():
            if short == layer:
                raise KeyError(
                    f"layer {layer} ran, but no call of it has one of the rows that capture(rows=…) chose; its last "
                    f"call has {queries} queries: the rows 0 to {queries - 1}, or -{queries} to -1"
                )
        there = f"there are {', '.join(map(str, self))}" if self.calls else "none is"
        needed = "its model must run within `with capture(…)` and call attention by transformers' AttentionInterface"
        raise KeyError(f"layer {index if layer < 0 else layer} is not captured; {there}. To be captured, {needed}")

    def heatmap(
        self,
        stage: Any = "attention_weights",
        *,
        theme: Theme = "auto",
        title: str | None = None,
        width_mm: float | None = None,
        dpi: int = 192,
        **options: Any,
    ) -> Heatmap:
        """A picture of all layers and heads: a row for each layer, a small heatmap for each head, one scale of colours.

        options: of AttentionResult, but that each heatmap has up to 64 cells on a side (max_cells), without numbers

        Errors: ValueError if nothing is captured, or for another stage, InvalidRequest for a wrong argument.
        """
        calls = self._last_calls()
        check_sizes([call.size for call in calls])
        options = {"max_cells": MAX_CELLS, **options, "theme": theme, "title": title, "width_mm": width_mm, "dpi": dpi}
        pictures = [call.heatmap(stage, **options).requested for call in calls]
        rows = [
            OverviewRow(name, list(map(str, options.get("select_heads") or call.heads)), picture)
            for name, call, picture in zip(_names(calls), calls, pictures, strict=True)
        ]
        wanted = OverviewRequested(rows, stage, theme, title, width_mm, dpi)
        return Heatmap(wanted, Backends().choose("numpy", "cpu"))

    def page(self, path: str | Path, *, title: str = TITLE) -> None:
        """Write a page of all layers: one HTML file, which needs no server.

        It has all heads of all layers, each as a heatmap and as lines between tokens, and each row by hand. If query,
        key, value, scores, scaled_scores and capped_scores were captured, it has these, too. Of a layer that ran
        several times, it has the last call.

        Errors: ValueError if nothing is captured, or for more than 512 queries or keys, 2²⁰ weights of a layer, or
        2²² of all; OSError.
        """
        content = self._page(title).encode()
        with whole_file(path) as file:
            file.write(content)

    def _page(self, title: str = TITLE) -> str:
        calls = self._last_calls()
        check_sizes([call.size for call in calls])
        named = zip(calls, _names(calls), strict=True)
        return page_of_layers([call.page_layer(name) for call, name in named], title)

    def _repr_html_(self) -> str | None:
        """What Jupyter, VS Code and Colab show: the page, unless a notebook would become too large by it."""
        size = sum(call.size for call in self._last_calls())
        return in_frame(self._page()) if 0 < size <= MOST_IN_NOTEBOOK else None

    def _last_calls(self) -> list[CapturedAttention]:
        """The last call of each module, in the order of their first calls."""
        return list(dict(zip(self._identities, self.calls, strict=True)).values())

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(self._modules))

    def __len__(self) -> int:
        return len(self._modules)

    def __repr__(self) -> str:
        return "\n".join(map(repr, self.calls)) or "nothing is captured yet"

    def add(self, found: CapturedAttention, identity: str) -> None:
        """Keep a call. identity: names its module"""
        self.calls.append(found)
        self._identities.append(identity)
        self._modules.setdefault(found.layer, set()).add(identity)

    def see(self, role: str, layer: int) -> None:
        """Note that a layer ran."""
        self._last[role] = max(layer, self._last.get(role, 0))

    def miss(self, role: str, layer: int, queries: int) -> None:
        """Note that a call of a layer had none of the chosen rows."""
        self._short[role, layer] = queries

    def check_layers(self, chosen: Iterable[int]) -> None:
        """Check at the end that the chosen layers are within those that ran. Errors: IndexError."""
        last = max(self._last.values(), default=None)
        for layer in sorted(chosen):
            if last is not None and layer > last:
                raise IndexError(f"layers: the layers that ran are within 0 to {last}; got {layer}")

    def _part(self, role: str) -> Captured:
        """The layers of one role."""
        part = Captured()
        part._last = {role: self._last[role]} if role in self._last else {}
        part._short = {place: queries for place, queries in self._short.items() if place[0] == role}
        for call, identity in zip(self.calls, self._identities, strict=True):
            if call.role == role:
                part.add(call, identity)
        return part


def picture_of(
    sinks: Mapping[str, Any], scores: np.ndarray, hidden: np.ndarray, labels: Mapping[str, Any]
) -> tuple[AttentionSpec, Plan]:
    """The specification and the plan of a request with these masked scores, which does not keep query, key and value.

    sinks, labels: fields of the request, or nothing
    """
    batch, heads, queries, keys = scores.shape
    light: dict[str, Any] = {
        "query": np.zeros((batch, heads, queries, 1), scores.dtype),
        "key": np.zeros((batch, heads, keys, 1), scores.dtype),
        "value": np.zeros((batch, heads, keys, 1), scores.dtype),
        "layout": "bhld",
        "bias": np.where(hidden, 0, scores),
        "mask": ~hidden,
        **sinks,
        **labels,
    }
    return plan_of_fields(light)


def _names(calls: Sequence[CapturedAttention]) -> list[str]:
    """The names of layers: with their roles if there are several, and with their modules if these are not enough."""
    names = [f"Layer {call.layer}" for call in calls]
    if len(set(names)) < len(names):
        names = [f"{call.role} {call.layer}".capitalize() for call in calls]
    return names if len(set(names)) == len(names) else [call.module for call in calls]


def _listed(numbers: list[int]) -> str:
    """Numbers as text, long lists shortened."""
    shown = numbers if len(numbers) <= 8 else [*numbers[:4], "…", numbers[-1]]
    return ", ".join(map(str, shown))
