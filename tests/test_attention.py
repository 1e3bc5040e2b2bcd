"""Edge cases of the mathematics: extreme scores, hidden keys, scales, sums. Expected numbers are calculated by hand."""

from __future__ import annotations

import math
from typing import Any

import httpx
import numpy as np
import pytest

from tests.cases import as_array
from tests.test_layouts import post

EYE = [[1.0, 0.0], [0.0, 1.0]]


def one_row(client: httpx.Client, scores: list[float], **options: Any) -> dict[str, Any]:
    """The response for one query with these scores, over values 1, 2, 3, …"""
    request = {"query": [[1.0]], "key": [[s] for s in scores], "value": [[i + 1.0] for i in range(len(scores))]}
    return post(client, **request, scale=1.0, **options)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(
    ("scores", "weights", "logsumexp"),
    [
        ([1e4, 1e4], [0.5, 0.5], 1e4 + math.log(2)),
        ([-1e4, -1e4], [0.5, 0.5], -1e4 + math.log(2)),
        ([1e4, -1e4], [1, 0], 1e4),
        ([1e4, 1e4 - 1], [1 / (1 + math.exp(-1)), 1 / (1 + math.e)], 1e4 + math.log1p(math.exp(-1))),
        ([0.0], [1], 0),
    ],
)
def test_scores_that_would_overflow_exp_give_finite_weights(
    client: httpx.Client, dtype: str, scores: list[float], weights: list[float], logsumexp: float
) -> None:
    answer = one_row(client, scores, dtype=dtype, include=["attention_weights", "logsumexp"])
    tolerance = 1e-7 if dtype == "float32" else 1e-15
    np.testing.assert_allclose(answer["attention_weights"], [weights], rtol=tolerance, atol=0)
    np.testing.assert_allclose(answer["logsumexp"], [logsumexp], rtol=tolerance)
    expected = sum((i + 1) * weight for i, weight in enumerate(weights))
    np.testing.assert_allclose(answer["output"], [[expected]], rtol=tolerance)


@pytest.mark.parametrize("include", [[], ["entropy"], ["scores"]])
@pytest.mark.parametrize(("query", "scale"), [(2.6e-23, 999999.0), (-2.6e-23, 215000.0)])
def test_a_query_whose_square_underflows_has_exact_weights(
    client: httpx.Client, query: float, scale: float, include: list[str]
) -> None:
    """Its square is 0 in float32, and its scores are above 400 or below -100."""
    keys = [1.8e19, 1.79e19]
    answer = post(
        client,
        query=[[query]],
        key=[[key] for key in keys],
        value=[[1], [2]],
        dtype="float32",
        scale=scale,
        include=["attention_weights", *include],
    )
    low, high = (float(np.float32(query)) * float(np.float32(key)) * scale for key in keys)
    weights = [1 / (1 + math.exp(high - low)), 1 / (1 + math.exp(low - high))]
    np.testing.assert_allclose(answer["attention_weights"], [weights], rtol=1e-4)
    np.testing.assert_allclose(answer["output"], [[weights[0] + 2 * weights[1]]], rtol=1e-4)


def test_a_projection_whose_square_underflows_gives_exact_weights(client: httpx.Client) -> None:
    answer = post(
        client,
        query=[[1e150]],
        key=[[1e150], [2e150]],
        value=[[1], [2]],
        projection={"query": {"weight": [[-1e-162]]}},
        include=["attention_weights", "logsumexp"],
    )
    assert (answer["attention_weights"], answer["output"]) == ([[1, 0]], [[1]])
    np.testing.assert_allclose(answer["logsumexp"], [-1e138], rtol=1e-12)


@pytest.mark.parametrize(
    "hide",
    [
        {"mask": [[False, False], [True, False]]},
        {"bias": [[None, None], [0.0, None]]},
        {"is_causal": True, "query_offset": -1},
        {"is_causal": True, "query_offset": [-1]},
        {"mask": [[True, False], [True, True]], "bias": [[None, 0.5], [0.0, None]]},
    ],
)
def test_a_fully_masked_row_is_zero_and_counted(client: httpx.Client, hide: dict[str, Any]) -> None:
    include = ["attention_weights", "logsumexp", "masked_scores"]
    answer = post(client, query=EYE, key=EYE, value=[[5, 6], [7, 8]], include=include, **hide)
    assert answer["attention_weights"] == [[0, 0], [1, 0]]
    assert answer["output"] == [[0, 0], [5, 6]]
    assert answer["logsumexp"] == [None, 0]
    assert answer["masked_scores"] == [[None, None], [0, None]]
    assert answer["metadata"]["fully_masked_rows"] == 1


def test_fully_masked_rows_are_counted_over_batch_and_heads(client: httpx.Client) -> None:
    tokens = np.zeros((2, 3, 4, 1)).tolist()
    answer = post(client, input=tokens, mask=[False, False, False, False])
    assert answer["metadata"]["fully_masked_rows"] == 2 * 3 * 4


def test_the_output_projection_applies_to_fully_masked_rows(client: httpx.Client) -> None:
    """The output before the projection is zero, so that the bias of the projection remains."""
    projection = {"output": {"kernel": EYE, "bias": [0.25, -1]}}
    answer = post(client, input=EYE, projection=projection, mask=[[False, False], [True, False]])
    assert answer["output"] == [[0.25, -1], [1.25, -1]]


def test_hidden_keys_with_extreme_numbers_have_no_effect(client: httpx.Client) -> None:
    """The hidden score overflows float32, and its value is the largest number."""
    answer = one_row(client, [1.0, 2.0, 3e38], dtype="float32", mask=[True, True, False], bias=[0, 0, 3e38])
    clean = one_row(client, [1.0, 2.0], dtype="float32", bias=[0, 0])
    np.testing.assert_allclose(answer["output"], clean["output"], rtol=2e-7)
    np.testing.assert_allclose(answer["attention_weights"], [[*clean["attention_weights"][0], 0]], rtol=2e-7)


def test_scale_zero_gives_the_mean_of_the_values(client: httpx.Client) -> None:
    answer = post(client, query=[[3.0], [-8.0]], key=[[1.0], [2.0], [9.0]], value=[[1.0], [2.0], [6.0]], scale=0)
    np.testing.assert_allclose(answer["output"], [[3], [3]], rtol=1e-15)
    assert answer["metadata"]["scale"] == 0


def test_the_default_scale_depends_on_the_size_of_one_head(client: httpx.Client) -> None:
    answer = post(client, input=np.zeros((2, 8)).tolist(), num_heads=2)
    assert answer["metadata"]["scale"] == 0.5


def test_causal_masking_follows_the_query_offset(client: httpx.Client) -> None:
    """Two queries over three keys: offset 0 aligns the first tokens, offset 1 the last tokens."""
    request = {"query": [[0.0]] * 2, "key": [[0.0]] * 3, "value": [[0.0]] * 3, "is_causal": True}
    top_left = post(client, **request, query_offset=0)["attention_weights"]
    assert top_left == [[1, 0, 0], [0.5, 0.5, 0]]
    bottom_right = as_array(post(client, **request, query_offset=1)["attention_weights"])
    np.testing.assert_allclose(bottom_right, [[0.5, 0.5, 0], [1 / 3, 1 / 3, 1 / 3]], rtol=1e-15)
    all_seen = as_array(post(client, **request, query_offset=2**62)["attention_weights"])
    np.testing.assert_allclose(all_seen, np.full((2, 3), 1 / 3), rtol=1e-15)
    assert post(client, **request, query_offset=-(2**62))["metadata"]["fully_masked_rows"] == 2


def test_each_batch_entry_may_have_its_own_offset(client: httpx.Client) -> None:
    tokens = np.zeros((2, 2, 1)).tolist()
    weights = post(client, input=tokens, is_causal=True, query_offset=[0, 1])["attention_weights"]
    assert weights == [[[1, 0], [0.5, 0.5]], [[0.5, 0.5], [0.5, 0.5]]]


def test_a_key_is_visible_only_if_all_masks_allow_it(client: httpx.Client) -> None:
    weights = post(
        client,
        input=np.zeros((3, 1)).tolist(),
        is_causal=True,
        mask=[True, True, False],
        bias=[[None, 0, 0], [None, 0, 0], [0, 0, 0]],
    )["attention_weights"]
    assert weights == [[0, 0, 0], [0, 1, 0], [0.5, 0.5, 0]]


def test_bias_is_added_after_scaling(client: httpx.Client) -> None:
    answer = post(
        client,
        query=[[2.0]],
        key=[[3.0], [1.0]],
        value=[[0.0], [0.0]],
        scale=0.5,
        bias=[1, -1],
        include=["scores", "scaled_scores", "masked_scores"],
    )
    assert answer["scores"] == [[6, 2]]
    assert answer["scaled_scores"] == [[3, 1]]
    assert answer["masked_scores"] == [[4, 0]]


@pytest.mark.parametrize(
    ("scores", "options", "weights", "warned"),
    [
        ([1.0, 3.0], {}, [0.25, 0.75], False),
        ([-1.0, 3.0], {}, [-0.5, 1.5], False),
        ([1.0, 3.0, 4.0], {"mask": [True, False, True]}, [0.2, 0, 0.8], False),
        ([1.0, 2.0], {"bias": [0.5, 0.5]}, [0.375, 0.625], False),
        ([1.0, -1.0], {}, [0, 0], True),
        ([0.0, 0.0], {}, [0, 0], True),
        ([1.0, 2.0], {"mask": [False, False]}, [0, 0], False),
    ],
)
def test_normalization_by_sum_divides_by_the_sum_of_scores(
    client: httpx.Client, scores: list[float], options: dict[str, Any], weights: list[float], warned: bool
) -> None:
    answer = one_row(client, scores, normalization="sum", **options)
    np.testing.assert_allclose(answer["attention_weights"], [weights], rtol=1e-15)
    assert [warning["code"] for warning in answer["metadata"]["warnings"]] == ["zero_sum"] * warned


def test_a_bias_of_zeros_and_ones_gives_a_warning(client: httpx.Client) -> None:
    def codes(bias: list[float]) -> list[str]:
        return [warning["code"] for warning in one_row(client, [1.0, 2.0], bias=bias)["metadata"]["warnings"]]

    assert codes([0, 1]) == ["bias_looks_like_mask"]
    assert codes([0, 0]) == []
    assert codes([0, 1.5]) == []


SCORES = np.zeros((2, 3, 4, 5))  # b, h, q, k


@pytest.mark.parametrize(
    ("shape", "axes"),
    [((5,), "k"), ((4, 5), "qk"), ((4, 1), "qk"), ((3, 4, 5), "hqk"), ((1, 4, 5), "hqk"), ((3, 1, 5), "hqk"),
     ((2, 3, 4, 5), "bhqk"), ((2, 1, 1, 5), "bhqk"), ((1, 3, 4, 1), "bhqk")],
)  # fmt: skip
def test_a_mask_broadcasts_over_the_axes_of_the_scores(client: httpx.Client, shape: tuple[int, ...], axes: str) -> None:
    """A mask hides the keys that einsum selects for its axes."""
    mask = np.random.default_rng(1).random(shape) < 0.6
    full = np.broadcast_to(mask.reshape([mask.shape[axes.index(a)] if a in axes else 1 for a in "bhqk"]), (2, 3, 4, 5))
    request = {name: np.zeros((2, 3, length, 1)).tolist() for name, length in (("query", 4), ("key", 5), ("value", 5))}
    answer = post(client, **request, mask=mask.tolist(), include=["masked_scores"])
    np.testing.assert_array_equal(np.isfinite(as_array(answer["masked_scores"])), full)
    assert answer["metadata"]["fully_masked_rows"] == (~full.any(axis=-1)).sum()


@pytest.mark.parametrize(
    ("layout", "shape", "mask"),
    [
        ("bld", (2, 3, 1), (2, 3, 3)),  # one head: the first axis of rank 3 is b
        ("hld", (2, 3, 1), (2, 3, 3)),
        ("bdl", (2, 1, 3), (2, 3, 3)),
        ("ld", (3, 2), (1, 1, 3, 3)),
        ("dl", (2, 3), (1, 1, 3, 3)),
    ],
)
def test_a_mask_has_the_axes_of_the_scores_as_returned(
    client: httpx.Client, layout: str, shape: tuple[int, ...], mask: tuple[int, ...]
) -> None:
    hidden = np.random.default_rng(3).random(mask) < 0.5
    answer = post(
        client, input=np.zeros(shape).tolist(), layout=layout, mask=hidden.tolist(), include=["masked_scores"]
    )
    shown = np.isfinite(as_array(answer["masked_scores"]))
    np.testing.assert_array_equal(shown, hidden.reshape(shown.shape))


def test_a_mask_over_keys_works_in_column_layout(client: httpx.Client) -> None:
    """A mask of rank 1 is over k in every layout; in column layout the hidden key is a row of the weights."""
    weights = post(client, input=[[0.0, 0.0, 0.0]], layout="dl", mask=[True, False, True])["attention_weights"]
    assert weights == [[0.5, 0.5, 0.5], [0, 0, 0], [0.5, 0.5, 0.5]]


def test_a_mask_of_rank_three_with_one_entry_broadcasts(client: httpx.Client) -> None:
    tokens = np.zeros((2, 2, 2, 1)).tolist()
    mask = [[[True, False], [True, True]]]
    weights = as_array(post(client, input=tokens, mask=mask)["attention_weights"])
    np.testing.assert_array_equal(weights, np.broadcast_to([[1, 0], [0.5, 0.5]], (2, 2, 2, 2)))


def test_float32_is_computed_in_float32(client: httpx.Client) -> None:
    answer = one_row(client, [0.1, 0.2], dtype="float32", include=["scores", "attention_weights"])
    assert answer["metadata"]["dtype"] == "float32"
    assert answer["scores"] == [[0.1, 0.2]]  # the shortest text for the float32, not 0.10000000149
    exponentials = np.exp(np.array([0.1, 0.2], np.float32) - np.float32(0.2))
    np.testing.assert_allclose(answer["attention_weights"], [exponentials / exponentials.sum()], rtol=2e-7)


def test_include_selects_the_outputs_of_the_response(client: httpx.Client) -> None:
    assert set(post(client, input=EYE)) == {"output", "attention_weights", "metadata"}
    assert set(post(client, input=EYE, include=[])) == {"output", "metadata"}
    assert set(post(client, input=EYE, include=["scores", "scores"])) == {"output", "scores", "metadata"}


def test_a_projection_has_several_equivalent_shapes(client: httpx.Client) -> None:
    """A bias has four equivalent forms; a kernel per head is the packed kernel split by heads."""
    kernel = np.arange(8.0).reshape(2, 4) / 10
    bias = np.array([0.1, 0.2, 0.3, 0.4])
    maps = {"kernel": kernel.tolist()}
    answers = [
        post(client, input=EYE, num_heads=2, include=["query"], projection={"query": maps | {"bias": b.tolist()},
             "key": maps, "value": maps})
        for b in (bias, bias.reshape(4, 1), bias.reshape(2, 2), bias.reshape(2, 2, 1))
    ]  # fmt: skip
    heads = np.moveaxis((kernel + bias).reshape(2, 2, 2), 1, 0)  # rows of the kernel, as the input is the identity
    for answer in answers:
        np.testing.assert_allclose(answer["query"], heads, rtol=1e-15)
        assert answer["output"] == answers[0]["output"]
    per_head = {"kernel": np.moveaxis(kernel.reshape(2, 2, 2), 1, 0).tolist()}
    cut = post(
        client,
        input=EYE,
        include=["query"],
        projection={"query": per_head | {"bias": bias.tolist()}, "key": per_head, "value": per_head},
    )
    assert cut["metadata"]["num_heads"] == 2
    np.testing.assert_allclose(cut["output"], answers[0]["output"], rtol=1e-15)


def test_a_per_head_key_projection_sets_the_number_of_kv_heads(client: httpx.Client) -> None:
    one = [[[1.0, 0.0]]]
    projection = {"query": {"weight": one * 4}, "key": {"weight": one * 2}, "value": {"weight": one * 2}}
    metadata = post(client, input=EYE, projection=projection)["metadata"]
    assert (metadata["num_heads"], metadata["num_kv_heads"]) == (4, 2)


def test_a_projection_of_the_values_alone(client: httpx.Client) -> None:
    answer = post(client, input=EYE, projection={"value": {"weight": [[1.0, 1.0]], "bias": [1.0]}}, scale=0)
    assert answer["output"] == [[2], [2]]


def test_each_batch_entry_may_have_its_own_token_labels(client: httpx.Client) -> None:
    labels = [["a", "[b]"], ["c", "d"]]
    answer = post(client, input=[[[1], [2]], [[3], [4]]], query_tokens=labels, key_tokens=["e", "f"])
    assert (answer["query_tokens"], answer["key_tokens"]) == (labels, ["e", "f"])
