"""What `attend` returns: the result of a request, with names to look up and to complete."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from attention_service.attention.outputs import OUTPUTS, make_selection
from attention_service.attention.plan import Plan
from attention_service.attention.result import Result
from attention_service.attention.spec import AttentionSpec
from attention_service.errors import InvalidValue
from attention_service.whole_file import whole_file

if TYPE_CHECKING:  # drawing is imported when it is asked for
    from attention_service.render.heatmap import Heatmap, HeatmapRequested
    from attention_service.render.options import Options
    from attention_service.schemas.heatmap import Bins, Colours, Stage, Theme

# Scores of the largest request that shows itself as a picture: a second.
SHOWN: Final = 2**24


class AttentionResult(Result, Mapping[str, Any]):
    """The output of attention, the results that `include` names, and the metadata.

        result.output, result.attention_weights, result["logsumexp"], result.metadata.kernel
        list(result), "scores" in result, dict(result)

    Each result is an ndarray with the axes that docs/attention.md describes; `top_weights` is a dict of the arrays
    `indices` and `values`.
    """

    __slots__ = ("_plan", "_spec")

    def __init__(self, found: Result, spec: AttentionSpec, plan: Plan) -> None:
        super().__init__(found.arrays, found.metadata)
        self._spec = spec
        self._plan = plan

    @property
    def query_tokens(self) -> list[Any] | None:
        """The labels of the queries, as the request has them; None if it has none."""
        return _as_lists(self._spec.query_tokens)

    @property
    def key_tokens(self) -> list[Any] | None:
        """The labels of the keys, as the request has them; None if it has none."""
        return _as_lists(self._spec.key_tokens)

    # Arrays have no one answer to whether they are equal.
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def __getitem__(self, name: str) -> Any:
        """A result by its name. Errors: KeyError, which lists what there is."""
        try:
            return self.arrays[name]
        except (KeyError, TypeError):
            raise KeyError(self._missing(name)) from None

    def __getattr__(self, name: str) -> Any:
        """A result by its name. Errors: AttributeError, which lists what there is."""
        # While an object is copied or unpickled, its own attributes are not there yet.
        if name.startswith("_") or name in Result.__slots__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)
        if name in self.arrays:
            return self.arrays[name]
        raise AttributeError(self._missing(name), name=name, obj=self)

    def __iter__(self) -> Iterator[str]:
        return iter(self.arrays)

    def __len__(self) -> int:
        return len(self.arrays)

    def __contains__(self, name: object) -> bool:
        return name in self.arrays

    def __dir__(self) -> Iterable[str]:
        return [*super().__dir__(), *self.arrays]

    def _ipython_key_completions_(self) -> list[str]:
        """The names that IPython offers after `result["`."""
        return list(self.arrays)

    def __repr__(self) -> str:
        about = self.metadata
        width = max(map(len, self.arrays))
        lines = [
            f"{type(self).__name__}: {about.dtype}, kernel {about.kernel} of {about.backend} on {about.device}",
            *(f"  {name:{width}}  {_described(value)}" for name, value in self.arrays.items()),
        ]
        if about.fully_masked_rows:
            lines.append(f"  rows without a visible key: {about.fully_masked_rows}")
        lines += [f"  warning {notice.code}: {notice.message}" for notice in about.warnings]
        return "\n".join(lines)

    def heatmap(
        self,
        stage: Stage = "attention_weights",
        *,
        scale: Colours = "linear",
        vmax: float | None = None,
        bins: Bins = "max",
        max_cells: int = 512,
        batch_entry: int = 0,
        theme: Theme = "auto",
        width_mm: float | None = None,
        dpi: int = 192,
        values: bool = True,
        title: str | None = None,
        select_heads: Sequence[int] | None = None,
        minus: AttentionResult | None = None,
    ) -> Heatmap:
        """A picture of the weights, a score stage or its gradient, of all heads that the request selects.

        select_heads: other heads than these
        minus: a result whose numbers are subtracted: the difference is blue below 0 and red above it

        It is computed from the request anew, so that the stage need not be in `include`. Notebooks show it;
        `heatmap.save("weights.svg")` writes it. docs/heatmaps.md describes the arguments.

        Errors: InvalidRequest for a wrong argument.
        """
        given: dict[str, Any] = {"stage": stage, "scale": scale, "vmax": vmax, "bins": bins, "max_cells": max_cells}
        given |= {"batch_entry": batch_entry, "theme": theme, "width_mm": width_mm, "dpi": dpi}
        given |= {"values": values, "title": title}
        plain = {name: value.item() if isinstance(value, np.generic) else value for name, value in given.items()}
        from attention_service.render.heatmap import Heatmap
        from attention_service.render.options import make_options
        from attention_service.schemas.heatmap import HeatmapOptions
        from attention_service.schemas.validate import validate

        options = make_options(validate(HeatmapOptions, plain))
        drawn = self._drawn(options, select_heads)
        if minus is None:
            return Heatmap.of(drawn)
        if not isinstance(minus, AttentionResult):
            raise InvalidValue.at("/minus", "a result of attend()", type(minus).__name__)
        return Heatmap.of(replace(drawn, minus=minus._drawn(options, select_heads)))

    def _drawn(self, options: Options, heads: Sequence[int] | None) -> HeatmapRequested:
        """What a picture shows. heads: None for those that the request selects. Errors: InvalidRequest."""
        from attention_service.render.heatmap import HeatmapRequested

        plan = self._plan
        if heads is not None:
            places = np.asarray(self._places(heads))
            chosen = make_selection(self._spec._replace(select_heads=places), plan.sizes)
            plan = replace(plan, selection=replace(plan.selection, heads=chosen.heads))
        return HeatmapRequested(self._spec, plan, options, heads=self._numbers)

    @property
    def _numbers(self) -> Sequence[int] | None:
        """What heads are called, None for their indices."""
        return None

    def _places(self, heads: Sequence[int]) -> Sequence[int]:
        """The indices of heads by what they are called. Errors: InvalidRequest."""
        return heads

    def page(self, path: str | Path) -> None:
        """Write the page with every stage of this request and each number by hand: one HTML file, without a server.

        It is computed from the request anew. Errors: ValueError for more than 512 queries or keys, or more than 2²⁰
        scores, OSError.
        """
        content = self._page().encode()
        with whole_file(path) as file:
            file.write(content)

    def _page(self) -> str:
        from attention_service.library.page import page_of_request

        return page_of_request(self._spec, self._plan)

    def _repr_html_(self) -> str | None:
        """What Jupyter, VS Code and Colab show: the picture, unless it would take seconds, above the `repr`.

        Where the result has the weights that are drawn, they are not computed again.
        """
        picture = self._picture()
        return f"{'' if picture is None else picture.html}<pre>{escape(repr(self))}</pre>"

    def _repr_png_(self) -> bytes | None:
        """What notebooks show as LaTeX and PDF, which take no HTML."""
        picture = self._picture()
        return None if picture is None else picture.png

    def _picture(self) -> Heatmap | None:
        """The picture that notebooks show; None if it would take seconds."""
        if self._plan.score_count > SHOWN:
            return None
        from attention_service.render.heatmap import Heatmap
        from attention_service.render.options import Options

        return Heatmap.of(replace(self._drawn(Options(), None), returned=self))

    def _missing(self, name: object) -> str:
        """The message of an error for a name that is not there."""
        text = f"no {name!r} here; there are {', '.join(self.arrays)}"
        if name in ("query_tokens", "key_tokens"):
            return f"{text}. They are an attribute: result.{name}"
        if name == "top_weights":
            return f"{text}. Ask for it with top_k=…"
        if name == "attention_weights" and "top_weights" in self.arrays:
            return f"{text}. top_k replaced it by top_weights"
        return f'{text}. Ask for it with include=["{name}"]' if name in OUTPUTS else text


def _as_lists(labels: tuple[Any, ...] | None) -> list[Any] | None:
    """Labels as `attend` was given them: a list, or one for each batch entry."""
    return None if labels is None else [list(row) if isinstance(row, tuple) else row for row in labels]


def _described(value: Any) -> str:
    """The shape and the type of an array, or of each array in a dict."""
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_described(inner)}" for name, inner in value.items())
    return f"{value.shape} {value.dtype}" if isinstance(value, np.ndarray) else type(value).__name__
