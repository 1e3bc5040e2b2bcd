"""The lessons of the page: what their texts say is true of the numbers that are shown."""

from __future__ import annotations

import json
import re
import tomllib
from typing import Any

import numpy as np
import pytest

from attention_service import attend
from attention_service.library.result import AttentionResult
from attention_service.routes.page import FOLDER
from tests.cases import CASES, load
from tests.cases import FOLDER as CASES_FOLDER
from tests.helpers.documents import ROOT

EXAMPLES: dict[str, Any] = json.loads((FOLDER / "examples.json").read_text(encoding="utf-8"))
LESSONS = {name: example for name, example in EXAMPLES.items() if "text" in example}
STAGES = ["scores", "scaled_scores", "capped_scores", "masked_scores", "attention_weights"]


def stages(name: str, **options: object) -> AttentionResult:
    """All stages of a lesson, with other options."""
    return attend(**{**LESSONS[name]["request"], **options, "include": STAGES})


def weights(name: str, **options: object) -> np.ndarray:
    """The attention weights of a lesson, with other options."""
    return np.asarray(stages(name, **options).attention_weights)


def test_a_trained_head_comes_first_then_nine_lessons_then_the_notebooks() -> None:
    lessons = ["dot_product", "softmax_and_scale", "causal_mask", "padding", "heads_and_gqa", "softcap", "positions",
               "sinks", "gradient"]  # fmt: skip
    assert list(EXAMPLES) == ["trained_head", *lessons, *(case.name for case in CASES)]
    assert [lesson["title"][:2] for lesson in LESSONS.values()] == ["A ", *(f"{n}." for n in range(1, 10))]
    assert all(lesson["source"] for lesson in LESSONS.values())


@pytest.mark.parametrize("name", LESSONS)
def test_a_lesson_from_a_notebook_has_its_tensors(name: str) -> None:
    """Only options differ from the golden case."""
    options = {"scale", "key_lengths", "softcap", "sinks", "grad_output"}
    request = {field: value for field, value in LESSONS[name]["request"].items() if field not in options}
    cases = [{field: value for field, value in case.request.items() if field not in options} for case in CASES]
    is_own = LESSONS[name]["source"] not in {case.source for case in CASES}
    assert (request in cases) != is_own
    assert name in ("trained_head", "heads_and_gqa", "positions") or not is_own


def test_the_trained_head_has_the_weights_that_torch_computes() -> None:
    """And its text is true of them."""
    head = load(CASES_FOLDER / "lessons" / "0-trained_head.json")
    assert head.request == LESSONS["trained_head"]["request"]
    found = weights("trained_head")
    (expected,) = head.expected
    expected.compare({"attention_weights": found})
    tokens = head.request["query_tokens"]
    best = [tokens[key] for key in found[0].argmax(axis=-1)]
    assert (best[tokens.index("it")], best[tokens.index("cross")]) == ("animal", "street")
    assert found[0, tokens.index("it"), tokens.index("animal")].round(2) == 0.65
    assert best[tokens.index("animal")] == "[CLS]"
    assert len(json.dumps(head.request)) < 60_000


def test_the_dot_product_is_largest_where_features_agree() -> None:
    scores = stages("dot_product")["scores"][0]
    tokens = LESSONS["dot_product"]["request"]["key_tokens"]
    assert (tokens[scores.argmax()], scores.max().round(1)) == ("wolf", 93.7)
    assert (tokens[scores.argmin()], scores.min().round(1)) == ("lizard", 42.5)


def test_a_large_scale_takes_one_key_and_a_small_one_all() -> None:
    assert (weights("softmax_and_scale", scale=1).max(axis=-1) > 0.7).all()
    assert np.abs(weights("softmax_and_scale", scale=0.001) - 0.2).max() < 0.01
    np.testing.assert_allclose(weights("softmax_and_scale").sum(axis=-1), 1)
    for d in (16, 256):
        query, key = np.random.default_rng(d).normal(size=(2, 10_000, d))
        np.testing.assert_allclose((query * key).sum(axis=-1).std(), np.sqrt(d), rtol=0.05)


def test_a_causal_mask_hides_what_comes_after_the_query() -> None:
    result = stages("causal_mask")
    later = np.triu(np.ones((4, 4), bool), 1)
    assert np.isneginf(result["masked_scores"])[later].all()
    assert np.isfinite(result["masked_scores"])[~later].all()
    assert (np.asarray(result.attention_weights) == np.where(later, 0, result.attention_weights)).all()


@pytest.mark.parametrize("count", range(1, 7))
def test_only_the_keys_before_the_padding_count(count: int) -> None:
    """The weights are those of a softmax over the other keys."""
    found = weights("padding", key_lengths=count)
    visible = np.exp(stages("padding")["scores"][:, :count])
    np.testing.assert_allclose(found[:, :count], visible / visible.sum(axis=-1, keepdims=True))
    assert not found[:, count:].any()


def test_heads_with_the_same_queries_find_other_tokens_by_other_keys() -> None:
    found = weights("heads_and_gqa")
    strong, weak = np.exp(3) / (np.exp(3) + 2), 1 / (np.exp(3) + 2)
    own = np.eye(3)
    following = own[[1, 2, 0]]
    for head, chosen in enumerate((own, following, own[:, ::-1], following[:, ::-1])):
        np.testing.assert_allclose(found[head], np.where(chosen, strong, weak), err_msg=f"head {head}")
    queries = np.reshape(LESSONS["heads_and_gqa"]["request"]["query"], (3, 4, 3))
    assert (queries[:, 0] == queries[:, 2]).all()


def test_a_softcap_bends_scores_so_that_no_key_takes_a_row() -> None:
    result = stages("softcap")
    scaled = result["scaled_scores"]
    assert scaled.max() > 20
    np.testing.assert_allclose(result["capped_scores"], 20 * np.tanh(scaled / 20))
    assert np.asarray(result.attention_weights).max() < 0.6
    assert weights("softcap", softcap=None).max() > 0.99


def test_rotated_scores_depend_on_the_distance_only() -> None:
    distance = np.subtract.outer(np.arange(6), np.arange(6))
    np.testing.assert_allclose(stages("positions")["scores"], 4 * np.cos(distance), atol=1e-12)


def test_a_sink_takes_its_part_of_each_row() -> None:
    total = np.exp(stages("sinks")["scaled_scores"]).sum(axis=-1)
    np.testing.assert_allclose(weights("sinks").sum(axis=-1), total / (total + np.exp(2)))


def test_the_gradient_is_the_weight_times_value_minus_output() -> None:
    """For a loss that is one number of the output: of the weights and the output that the notebook prints."""
    (case,) = (case for case in CASES if case.name == "animals_two_queries")
    printed = {expected.name: np.array(expected.values) for expected in case.expected}
    request, value = LESSONS["gradient"]["request"], np.array(case.request["value"])[:, 3]
    assert np.argwhere(request["grad_output"]).tolist() == [[0, 3]]
    right = printed["attention_weights"][0] * (value - printed["output"][0, 3])
    found = attend(**{**request, "include": ["grad_masked_scores"]})["grad_masked_scores"]
    np.testing.assert_allclose(found, [right, np.zeros(5)], rtol=1e-6)
    tokens = request["key_tokens"]
    assert (tokens[found[0].argmax()], tokens[found[0].argmin()]) == ("kitten", "wolf")
    assert (value[0], value[4], printed["output"][0, 3].round(1)) == (9.8, 1.1, 2.7)


def test_a_notice_in_the_wheel_names_the_model_and_its_licence() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    model, licence = re.findall(r"^(\S+) \((.*?)\)", LESSONS["trained_head"]["source"])[0]
    assert "NOTICE" in project["license-files"]
    notice = (ROOT / "NOTICE").read_text(encoding="utf-8")
    assert model in notice
    assert licence == "Apache 2.0"
    assert "Apache License, Version 2.0" in notice
