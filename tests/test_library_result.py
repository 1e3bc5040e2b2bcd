"""What `attend` returns: names to look up and to complete, errors that list them, copies."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from attention_service import attend, compare
from attention_service.attention.outputs import FORWARD
from attention_service.attention.planning import make_plan
from attention_service.attention.result import Result
from attention_service.attention.spec import AttentionSpec
from attention_service.backends.numpy.backend import NumpyBackend
from attention_service.library import AttentionResult
from attention_service.render.heatmap import HeatmapRequested
from attention_service.render.options import Options
from tests.helpers.covering import covering
from tests.test_options import CHANGES, PLAIN, specs

# Three keys, equal to the query, so that each weighs the same, and the logsumexp is log 3 + 1.
ONES = np.ones((3, 1))


def arrays(result: Mapping[str, Any]) -> dict[str, list[Any]]:
    return {
        name: [array.tolist() for array in (value.values() if isinstance(value, dict) else [value])]
        for name, value in result.items()
    }


def test_results_are_looked_up_by_name() -> None:
    result = attend(ONES, ONES, ONES, include=["attention_weights", "logsumexp"])
    assert list(result) == list(result.keys()) == ["output", "attention_weights", "logsumexp"]
    assert len(result) == 3
    assert "logsumexp" in result
    assert "scores" not in result
    assert result.logsumexp is result["logsumexp"] is dict(result)["logsumexp"]
    np.testing.assert_allclose(result.logsumexp, 1 + np.log([3, 3, 3]), rtol=1e-15)
    np.testing.assert_allclose(result.attention_weights, np.full((3, 3), 1 / 3), rtol=1e-15)
    assert result.output is result["output"]
    assert isinstance(result, Result)
    assert isinstance(result, Mapping)


def test_every_output_is_an_attribute_that_is_completed() -> None:
    names = list(FORWARD)
    result = attend(input=ONES, include=names)
    assert {"output", *names} <= set(dir(result))
    assert result._ipython_key_completions_() == list(result)
    for name in names:
        assert getattr(result, name) is result[name]
    top = attend(input=ONES, top_k=2)
    assert "top_weights" in dir(top)
    assert top.top_weights["indices"].tolist() == [[0, 1]] * 3


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("scores", {}, "no 'scores' here; there are output, attention_weights. Ask for it with include=[\"scores\"]"),
        ("attention_weights", {"include": []}, 'there are output. Ask for it with include=["attention_weights"]'),
        ("attention_weights", {"top_k": 1}, "there are output, top_weights. top_k replaced it by top_weights"),
        ("top_weights", {}, "there are output, attention_weights. Ask for it with top_k=…"),
        ("softmax", {}, "no 'softmax' here; there are output, attention_weights$"),
    ],
)
def test_a_name_that_is_not_there_is_explained(name: str, options: dict[str, Any], said: str) -> None:
    result = attend(input=ONES, **options)
    pattern = re.escape(said).replace(r"\$", "$")
    with pytest.raises(AttributeError, match=pattern):
        getattr(result, name)
    with pytest.raises(KeyError) as error:
        result[name]
    assert re.search(pattern, error.value.args[0])


def test_the_labels_of_the_request_are_attributes() -> None:
    """As they were given: the response over HTTP has them, too."""
    result = attend(input=ONES, query_tokens=["a", "b", "c"])
    assert result.query_tokens == ["a", "b", "c"]
    assert result.key_tokens is None
    batch = attend(input=[ONES, ONES], key_tokens=np.array([["a", "b", "c"], ["d", "e", "f"]]))
    assert (batch.query_tokens, batch.key_tokens) == (None, [["a", "b", "c"], ["d", "e", "f"]])
    assert {"query_tokens", "key_tokens"} <= set(dir(result))
    assert "query_tokens" not in result, "an item is an array"
    with pytest.raises(KeyError, match=r"attribute: result\.query_tokens"):
        result["query_tokens"]
    assert copy.copy(result).query_tokens == ["a", "b", "c"]


def test_its_text_names_shapes_types_and_what_to_know() -> None:
    result = attend(input=ONES, include=["attention_weights", "logsumexp"], dtype="float32", backend="numpy")
    assert repr(result) == (
        f"AttentionResult: float32, kernel {result.metadata.kernel} of numpy on cpu\n"
        "  output             (3, 1) float32\n"
        "  attention_weights  (3, 3) float32\n"
        "  logsumexp          (3,) float32"
    )
    masked = attend(input=ONES, top_k=2, key_mask=[False] * 3, bias=[[0, 1, 0]] * 3, backend="numpy")
    assert repr(masked).splitlines()[1:4] == [
        "  output       (3, 1) float64",
        "  top_weights  indices (3, 2) int64, values (3, 2) float64",
        "  rows without a visible key: 3",
    ]
    assert "\n  warning bias_looks_like_mask: " in repr(masked)


def test_results_are_compared_by_identity_and_can_be_hashed() -> None:
    one, other = (attend(input=ONES) for _ in range(2))
    assert one in [other, one]
    assert one != other
    assert len({one, other, one}) == 2


def test_a_result_can_be_compared_with_a_request() -> None:
    """Of a result, all arrays are compared that a comparison knows."""
    everything = attend(input=ONES, include=["attention_weights", "logsumexp", "entropy"])
    report = compare(everything, input=ONES)
    assert report.verdict.ratio == 0
    assert set(report.errors) == {"output", "attention_weights", "logsumexp", "entropy"}


def result_of(spec: AttentionSpec) -> AttentionResult:
    plan = make_plan(spec)
    return AttentionResult(NumpyBackend().run(plan, spec, spec.sources), spec, plan)


@pytest.mark.parametrize("spec", specs(covering(PLAIN, CHANGES)))
def test_a_result_survives_copies_and_pickles(spec: AttentionSpec) -> None:
    """With every option of a request, as a result keeps its request."""
    result = result_of(spec)
    for found in (copy.copy(result), copy.deepcopy(result), pickle.loads(pickle.dumps(result))):
        assert type(found) is AttentionResult
        assert arrays(found) == arrays(result)
        assert found.metadata == result.metadata
        assert repr(found) == repr(result)
        assert found._plan.options == result._plan.options
        assert found._spec.include == result._spec.include


# Without them, weights of all heads and queries are returned, which a picture shows.
COMPUTED = {"sinks", "select_heads", "select_queries", "average_heads", "top_k"}
RETURNED = {
    name: option for name, option in CHANGES.items() if option.get("include") != () and not COMPUTED & option.keys()
}


def panels(result: AttentionResult, returned: Result | None) -> list[tuple[np.ndarray, np.ndarray]]:
    wanted = HeatmapRequested(result._spec, result._plan, Options(max_cells=3), returned)
    return [(panel.values, panel.hidden_by) for panel in wanted.picture(NumpyBackend()).panels]


@pytest.mark.parametrize(
    "spec", specs([*covering(PLAIN, RETURNED), *((name,) for name in CHANGES if name not in RETURNED)])
)
def test_a_picture_of_returned_weights_is_that_of_computed_ones(spec: AttentionSpec) -> None:
    """With every option of a request, in bins of several queries and keys."""
    result = result_of(spec)
    for found, expected in zip(panels(result, result), panels(result, None), strict=True):
        np.testing.assert_allclose(found[0], expected[0], rtol=1e-6, atol=1e-12)
        np.testing.assert_array_equal(found[1], expected[1])


@pytest.mark.parametrize(
    ("options", "is_computed"),
    [
        ({}, False),
        ({"is_causal": True, "layout": "dl"}, False),
        ({"num_heads": 2, "query_tokens": ["a", "b"]}, False),
        ({"include": []}, True),
        ({"top_k": 1}, True),
        ({"sinks": [1.0]}, True),
        ({"select_queries": [0]}, True),
        ({"average_heads": True}, True),
    ],
    ids=str,
)
def test_what_notebooks_show_is_not_computed_again(
    options: dict[str, Any], is_computed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    original = NumpyBackend.bin_scores

    def counted(*given: Any) -> Any:
        calls.append(given)
        return original(*given)

    monkeypatch.setattr(NumpyBackend, "bin_scores", counted)
    result = attend(input=np.eye(2), **options)
    shown = result._repr_html_()
    assert bool(calls) == is_computed
    assert shown is not None
    assert shown.startswith(result.heatmap().html)
