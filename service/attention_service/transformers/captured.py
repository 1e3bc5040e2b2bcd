"""What `capture` found: the attention of layers, by their index."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from attention_service.attention.plan import Plan
from attention_service.attention.result import Result
from attention_service.attention.spec import AttentionSpec
from attention_service.codecs.decoded import Decoded
from attention_service.library import AttentionResult
from attention_service.pipeline.prepare import make_spec_and_plan
from attention_service.render.heatmap import Heatmap

# Stages that a picture can be drawn of from what is kept.
DRAWN = ("attention_weights", "masked_scores")


class CapturedAttention(AttentionResult):
    """The attention of some queries in one call of a layer. Arrays have the axes b, h, q (only the rows), k or d.

    layer: the index of the layer
    module: the name of its module within the model if `capture` knows the model, else the name of its class
    rows, heads: the queries and the heads that were captured
    """

    __slots__ = ("heads", "layer", "module", "rows")

    def __init__(self, found: Result, picture: tuple[AttentionSpec, Plan], layer: int, module: str) -> None:
        super().__init__(found, *picture)
        self.layer = layer
        self.module = module
        self.rows: list[int] = []
        self.heads: list[int] = []

    def __repr__(self) -> str:
        rows, heads = _listed(self.rows), _listed(self.heads)
        return f"layer {self.layer} ({self.module}), rows {rows}, heads {heads}\n{super().__repr__()}"

    def heatmap(self, stage: Any = "attention_weights", **options: Any) -> Heatmap:
        """A picture of the captured rows: of their weights, or of their masked scores. options: of AttentionResult

        Errors: ValueError for another stage, InvalidRequest for a wrong argument.
        """
        if stage not in DRAWN:
            raise ValueError(f"a captured layer draws {' or '.join(DRAWN)}, not {stage}")
        return super().heatmap(stage, **options)


class Captured(Mapping[int, CapturedAttention]):
    """The captured layers by their index; of a layer that was called several times, the last call.

    calls: all calls in their order
    """

    def __init__(self) -> None:
        self.calls: list[CapturedAttention] = []
        self._modules: dict[int, set[str]] = {}

    def __getitem__(self, layer: int) -> CapturedAttention:
        """The last call of a layer. Errors: KeyError if there is none, or if two modules have this index."""
        modules = self._modules.get(layer, set())
        if len(modules) > 1:
            names = ", ".join(sorted(modules))
            raise KeyError(
                f"{len(modules)} modules are layer {layer}: {names}. Use calls, or capture(model=…) for a part"
            )
        for call in reversed(self.calls):
            if call.layer == layer:
                return call
        there = f"there are {', '.join(map(str, self))}" if self.calls else "none is"
        needed = "its model must run within `with capture(…)` and call attention by transformers' AttentionInterface"
        raise KeyError(f"layer {layer} is not captured; {there}. To be captured, {needed}")

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(self._modules))

    def __len__(self) -> int:
        return len(self._modules)

    def __repr__(self) -> str:
        return "\n".join(map(repr, self.calls)) or "nothing is captured yet"

    def add(self, found: CapturedAttention, identity: str) -> None:
        """Keep a call. identity: names its module"""
        self.calls.append(found)
        self._modules.setdefault(found.layer, set()).add(identity)


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
    return make_spec_and_plan(Decoded(light, frozenset()), allow_non_finite=True)


def _listed(numbers: list[int]) -> str:
    """Numbers as text, long lists shortened."""
    shown = numbers if len(numbers) <= 8 else [*numbers[:4], "…", numbers[-1]]
    return ", ".join(map(str, shown))
