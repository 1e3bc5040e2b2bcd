"""Captured layers as one HTML file: every head of every layer, and each row by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from html import escape
from typing import Any, Final, NamedTuple

import numpy as np
import orjson

from attention_service.attention.result import Result
from attention_service.codecs.json.writer import dumps
from attention_service.library.page import CHOICE, html

# Digits of weights and of operands, and decimals of scores: 4 decimals of a score are 4 digits of its exponential.
DIGITS: Final = 4
# Scores of all layers: more would be a file of tens of megabytes. And of those that a notebook shows and keeps.
MOST: Final = 2**22
MOST_IN_NOTEBOOK: Final = 2**18
# What `include` has to name, all of it, for the page to show the stages before the masks, by the names of the page.
STAGES: Final = {
    "query": "query",
    "key": "present_key",
    "value": "present_value",
    "scores": "scores",
    "scaled_scores": "scaled_scores",
    "capped_scores": "capped_scores",
}
NOTE: Final = (
    f"A saved page, which computes nothing new. Numbers are rounded here: scores to {DIGITS} decimals, others to "
    f"{DIGITS} digits"
)
FRAME: Final = 'width="100%" height="960" sandbox="allow-scripts allow-downloads" style="border:0"'


class PageLayer(NamedTuple):
    """A call of a layer as a page shows it. name: of the layer; rows, heads: as of CapturedAttention

    kept: what was captured; drawn: the weights, the masked scores and what hides keys
    request: fields that the page reads: sinks, `query_tokens` and `key_tokens`, if there are any
    """

    name: str
    rows: list[int]
    heads: list[int]
    kept: Result
    drawn: Result
    request: Mapping[str, Any]


def check_sizes(sizes: Sequence[int]) -> None:
    """Check that a page shows layers with so many weights. Errors: ValueError."""
    if not sizes:
        raise ValueError("nothing is captured: a model must run within `with capture(…)`")
    if sum(sizes) > MOST:
        advice = "Choose layers, heads or rows in capture()"
        raise ValueError(f"a page shows up to {MOST:,} weights of all layers; got {sum(sizes):,}. {advice}")


def page_of_layers(layers: Sequence[PageLayer], title: str) -> str:
    """The page of layers, as HTML."""
    content = [_saved(layer) for layer in layers]
    batch = max(layer.kept.metadata.batch_size for layer in layers)
    return html({"layers": content, "note": NOTE, "choice": _first_choice(layers)}, title, has_batch=batch > 1)


def _first_choice(layers: Sequence[PageLayer]) -> dict[str, Any]:
    """What a page shows first: of the middle layer the largest weight between two words that are no neighbours.

    Most heads of the first layers look at neighbours, and many of all layers at the first or the last token, such as
    [CLS] and [SEP], where they find nothing (Clark et al. 2019, What does BERT look at?): such a head explains little.
    """
    index = len(layers) // 2
    layer = layers[index]
    weights = layer.drawn.arrays["attention_weights"][0]
    rows, keys = np.array(layer.rows)[:, None], np.arange(weights.shape[-1])
    says_little = (np.abs(rows - keys) < 2) | (keys == 0) | (keys == keys[-1]) | (rows == 0)
    head, query, key = np.unravel_index(np.where(says_little, 0, weights).argmax(), weights.shape)
    return {**CHOICE, "layer": index, "head": int(head), "query": int(query), "key": int(key)}


def in_frame(page: str) -> str:
    """A page as a part of another one, as notebooks show it: it runs by itself, and sees nothing of the other one."""
    return f'<iframe srcdoc="{escape(page)}" {FRAME}></iframe>'


def _saved(layer: PageLayer) -> dict[str, Any]:
    """A layer as the page keeps it: request, answer and tensors."""
    kept, drawn = layer.kept.arrays, layer.drawn.arrays
    weights = kept.get("attention_weights", drawn["attention_weights"])
    tensors = {
        # Of a query that sees no key, like padding, eager attention averages all values, which are hidden.
        "attention_weights": _digits(np.where(drawn["hidden_by"] != 0, 0, weights)),
        "masked_scores": _decimals(drawn["masked_scores"]),
        "hidden_by": _text(drawn["hidden_by"]),
    }
    if STAGES.keys() <= kept.keys():
        rounded = {name: _decimals if "score" in name else _digits for name in STAGES}
        tensors |= {shown: rounded[name](kept[name]) for name, shown in STAGES.items()}
        tensors["head_outputs"] = _digits(layer.kept.output)
    about = replace(layer.kept.metadata, hidden_by=layer.drawn.metadata.hidden_by)
    answer = {"name": layer.name, "heads": layer.heads, "digits": DIGITS, "metadata": about.present}
    if layer.rows != list(range(len(layer.rows))):
        answer["query_places"] = layer.rows
    return {"request": {"layout": "bhld", **layer.request}, "answer": answer, "tensors": tensors}


def _digits(numbers: np.ndarray) -> orjson.Fragment:
    """Numbers with so many digits as JSON."""
    wide = numbers.astype(np.float64)
    with np.errstate(divide="ignore"):
        places = np.where(wide == 0, 0, DIGITS - 1 - np.floor(np.log10(np.abs(wide))))
    powers = 10 ** np.minimum(places, 280)  # a larger power may overflow: numbers below 1e-280 become 0
    return _text(np.rint(wide * powers) / powers)


def _decimals(numbers: np.ndarray) -> orjson.Fragment:
    """Numbers with so many decimals as JSON."""
    return _text(np.round(numbers.astype(np.float64), DIGITS))


def _text(numbers: np.ndarray) -> orjson.Fragment:
    """Nested lists as JSON. JSON has no infinity, but a parser reads -1e999 as minus infinity."""
    return orjson.Fragment(dumps(numbers).replace(b"null", b"-1e999"))
