"""Heatmaps of the gradients of scores: by hand, and by the definition of docs/gradients.md in NumPy."""

from __future__ import annotations

import json
import math
import tracemalloc
from pathlib import Path
from typing import Any, Final
from xml.etree import ElementTree

import httpx
import numpy as np
import pytest

from attention_service import attend
from attention_service.cli import main
from attention_service.codecs.decoded import Decoded
from attention_service.errors import MissingField
from attention_service.pipeline.engine import Engine
from attention_service.render.heatmap import SVG, draw, make_heatmap_request
from attention_service.render.operation import HeatmapOperation
from attention_service.settings import Settings
from tests.test_heatmap import cells, normal, picture, svg, texts

STAGES: Final = ("grad_masked_scores", "grad_scaled_scores", "grad_scores")
# Weights 1/4 and 3/4, values 1 and 5: D = 4, and the gradient of the masked scores is (-3/4, 3/4).
BY_HAND: Final[dict[str, Any]] = {
    "query": [[1.0]],
    "key": [[0.0], [math.log(3)]],
    "value": [[1.0], [5.0]],
    "scale": 1.0,
    "query_offset": 0,
    "grad_output": [[1.0]],
}
HEADS: Final[dict[str, Any]] = {
    "query": normal(3, 6, 2),
    "key": normal(3, 5, 2, seed=1),
    "value": normal(3, 5, 4, seed=2),
    "grad_output": normal(3, 6, 4, seed=3),
    "layout": "hld",
    "query_offset": 0,
}


def gradient(fields: dict[str, Any], hidden: np.ndarray) -> np.ndarray:
    """The gradient of the masked scores by its definition. hidden: True where a key is hidden"""
    query, key, value, cotangent = (np.asarray(fields[name]) for name in ("query", "key", "value", "grad_output"))
    scores = np.where(hidden, -np.inf, query @ key.swapaxes(-1, -2) / np.sqrt(query.shape[-1]))
    weights = np.exp(scores) / np.exp(scores).sum(axis=-1, keepdims=True)
    of_weights = cotangent @ value.swapaxes(-1, -2)
    return np.asarray(weights * (of_weights - (weights * of_weights).sum(axis=-1, keepdims=True)))


def test_the_gradient_by_hand_has_the_colours_of_both_signs() -> None:
    root = svg(heatmap={"stage": "grad_masked_scores"}, **BY_HAND)
    found = cells(root)
    assert found == {"0 → 0": ("-0.75", "#053061"), "0 → 1": ("0.75", "#67001f")}  # the ends of RdBu
    assert texts(root)[0] == "gradient of masked scores: 1 query by 2 keys"


def test_each_gradient_is_that_of_its_stage() -> None:
    """Scores 0 and s are scaled by 2, then capped to 0 and ln 3, half of the softcap, where the slope is 3/4."""
    cap = 2 * math.log(3)
    request = BY_HAND | {"key": [[0.0], [cap * math.atanh(0.5) / 2]], "scale": 2.0, "softcap": cap}
    for stage, right in zip(STAGES, (0.75, 0.75 * 0.75, 2 * 0.75 * 0.75), strict=True):
        found = cells(svg(heatmap={"stage": stage}, **request))
        assert float(found["0 → 1"][0]) == pytest.approx(right, rel=1e-5), stage
        assert float(found["0 → 0"][0]) == pytest.approx(-0.75 * (2 if stage == "grad_scores" else 1), rel=1e-5)


def test_a_hidden_key_is_hidden_in_the_gradient() -> None:
    request = {name: normal(3, 2, seed=seed) for seed, name in enumerate(("query", "key", "value", "grad_output"))}
    found = cells(svg(heatmap={"stage": "grad_scores"}, is_causal=True, **request))
    assert found["0 → 1"][0] == "hidden by the causal mask"
    right = gradient(request, np.triu(np.ones((3, 3), bool), 1)) / math.sqrt(2)
    for row, column in zip(*np.tril_indices(3), strict=True):
        assert float(found[f"{row} → {column}"][0]) == pytest.approx(right[row, column], rel=1e-5, abs=1e-15)


def test_heads_and_queries_are_selected() -> None:
    fewer = {"select_heads": np.array([2, 0]), "select_queries": np.array([5, 1]), "average_heads": True}
    found = picture({"stage": "grad_masked_scores"}, **HEADS, **fewer)
    right = gradient(HEADS, np.zeros((6, 5), bool))[[2, 0]][:, [1, 5]]
    np.testing.assert_allclose([panel.values for panel in found.panels], right, rtol=1e-12, atol=1e-15)
    assert [panel.title for panel in found.panels] == ["head 2", "head 0"]


def test_columns_of_tokens_and_batch_entries_are_drawn() -> None:
    names = ("query", "key", "value", "grad_output")
    request = {name: normal(2, 3, 4, seed=seed) for seed, name in enumerate(names)}
    turned = {name: array.swapaxes(-1, -2) for name, array in request.items()}
    found = picture({"stage": "grad_masked_scores", "batch_entry": 1}, **turned, layout="bdl")
    right = gradient(request, np.zeros((3, 3), bool))[1].T
    np.testing.assert_allclose(found.panels[0].values, right, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("bins", ["max", "mean"])
def test_many_tokens_are_put_into_bins(bins: str) -> None:
    names = ("query", "key", "value", "grad_output")
    request = {name: normal(50, 4, seed=seed) for seed, name in enumerate(names)}
    hidden = np.triu(np.ones((50, 50), bool), 1)
    found = picture({"stage": "grad_masked_scores", "bins": bins, "max_cells": 5}, **request, is_causal=True)
    right = gradient(request, hidden)
    for row, column in np.ndindex(5, 5):
        part = slice(10 * row, 10 * row + 10), slice(10 * column, 10 * column + 10)
        seen = right[part][~hidden[part]]
        if seen.size:
            expected = seen.max() if bins == "max" else seen.mean()
            assert found.panels[0].values[row, column] == pytest.approx(expected, rel=1e-9)
        else:
            assert found.panels[0].hidden_by[row, column]


def test_the_gradient_of_the_logsumexp_is_the_weights() -> None:
    request = {**BY_HAND, "grad_output": None, "grad_logsumexp": [2.0]}
    found = cells(svg(heatmap={"stage": "grad_masked_scores"}, **request))
    assert (found["0 → 0"][0], found["0 → 1"][0]) == ("0.5", "1.5")


@pytest.mark.parametrize("stage", STAGES)
def test_without_a_cotangent_there_is_no_gradient(stage: Any, client: httpx.Client) -> None:
    request = {**BY_HAND, "grad_output": None}
    answer = client.post("/attention/heatmap", json=request | {"heatmap": {"stage": stage}})
    assert (answer.status_code, answer.json()["errors"][0]["pointer"]) == (422, "/grad_output")
    with pytest.raises(MissingField, match="/grad_output: expected grad_output or grad_logsumexp"):
        attend(**request).heatmap(stage)


@pytest.mark.parametrize(
    ("change", "pointer"),
    [
        ({"grad_output": [[1.0, 2.0]]}, "/grad_output"),
        ({"grad_output": [["a"]]}, "/grad_output/0/0"),
        ({"heatmap": {"stage": "grad_scores", "scale": "log"}}, "/heatmap/scale"),
        ({"heatmap": {"stage": "grad_query"}}, "/heatmap/stage"),
    ],
)
def test_errors_name_the_field(change: dict[str, Any], pointer: str, client: httpx.Client) -> None:
    request = {**BY_HAND, "heatmap": {"stage": "grad_scores"}, **change}
    answer = client.post("/attention/heatmap", json=request)
    assert (answer.status_code, answer.json()["errors"][0]["pointer"]) == (422, pointer)


@pytest.mark.parametrize("fields", [{}, {"gradients": "all"}, {"include": ["grad_query"]}], ids=str)
def test_one_request_draws_scores_and_gradients(fields: dict[str, Any], client: httpx.Client) -> None:
    """Other stages do not depend on a cotangent, and no picture on which gradients are asked for."""
    forward = {**BY_HAND, "grad_output": None}
    for stage in ("attention_weights", "grad_scores"):
        plain = client.post(
            "/attention/heatmap", json=(BY_HAND if "grad" in stage else forward) | {"heatmap": {"stage": stage}}
        )
        answer = client.post("/attention/heatmap", json={**BY_HAND, **fields, "heatmap": {"stage": stage}})
        assert (answer.status_code, answer.content) == (200, plain.content), answer.text


def test_the_command_line_draws_a_gradient(tmp_path: Path) -> None:
    request = tmp_path / "request.json"
    request.write_text(json.dumps(BY_HAND | {"gradients": "all"}))
    assert main(["heatmap", str(request), "-o", str(tmp_path / "a.svg"), "--stage", "grad_masked_scores"]) == 0
    assert cells(ElementTree.parse(tmp_path / "a.svg").getroot())["0 → 1"][0] == "0.75"


def test_a_result_draws_its_gradients() -> None:
    """Also in halves, whose gradients are computed in float32, and where hidden tokens are not finite."""
    key = np.array([*BY_HAND["key"], [np.nan]])
    fields = BY_HAND | {"key": key, "value": [[1.0], [5.0], [np.inf]], "key_lengths": 2, "dtype": "float16"}
    result = attend(**fields, gradients="all", include=["grad_masked_scores"])
    found = cells(ElementTree.fromstring(result.heatmap("grad_masked_scores").svg))
    assert float(found["0 → 1"][0]) == pytest.approx(0.75, rel=1e-3)
    assert found["0 → 1"][0] == f"{float(result.grad_masked_scores[0, 1]):.6g}"
    assert found["0 → 2"][0] == "hidden by key padding"


@pytest.mark.slow
@pytest.mark.parametrize(("heads", "tokens", "dim"), [(1, 2048, 64), (12, 256, 16)])
@pytest.mark.parametrize("options", [{}, {"is_causal": True, "softcap": 5.0, "normalization": "sigmoid"}], ids=str)
def test_memory_is_estimated(options: dict[str, Any], heads: int, tokens: int, dim: int) -> None:
    """The whole matrix of the gradient is kept."""
    query = normal(heads, tokens, dim).astype(np.float32)
    fields = {"query": query, "key": query, "value": query, "grad_output": query, "layout": "hld", **options}
    wanted = make_heatmap_request(Decoded({**fields, "heatmap": {"stage": "grad_scores"}}, frozenset()))
    engine = Engine(Settings.model_construct())
    tracemalloc.start()
    draw(wanted, SVG, engine.reference)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak <= HeatmapOperation(engine.reference).cost(wanted, SVG).compute
