"""result.page(): the page as one file, with the numbers of a request. tests/page opens it in a browser."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from attention_service import attend
from attention_service.attention.planning import make_plan
from attention_service.attention.spec import AttentionSpec
from attention_service.backends.registry import Backends
from attention_service.codecs.table import CODECS
from attention_service.library.page import LONGEST, MOST_SCORES, page_of_request
from attention_service.pipeline.prepare import make_spec_and_plan
from tests.helpers.covering import covering
from tests.helpers.pages import addresses, array_of, parts_of
from tests.test_options import ONE_VECTOR, PLAIN, UNUSUAL, specs

TOKENS = ["a </script>", "<!-- b", "it’s", "שלום"]


def written(folder: Path, **fields: Any) -> tuple[str, Any]:
    """The page of a request, and what it holds."""
    attend(**fields).page(folder / "it.html")
    text = (folder / "it.html").read_text(encoding="utf-8")
    return text, json.loads(parts_of(text)["saved"])


def test_the_page_has_every_stage_of_the_request(tmp_path: Path) -> None:
    """Each number as `attend` returns it, whatever the request selects."""
    tokens = np.random.default_rng(0).normal(size=(4, 6))
    fields: dict[str, Any] = {"input": tokens, "num_heads": 2, "is_causal": True, "query_tokens": TOKENS}
    _, saved = written(tmp_path, **fields, select_heads=[1], top_k=2)
    (layer,) = saved["layers"]
    names = ["scores", "scaled_scores", "capped_scores", "masked_scores", "attention_weights", "hidden_by", "query"]
    expected = attend(**fields, include=[*names, "present_key", "present_value", "head_outputs"])
    assert layer["tensors"].keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(array_of(layer["tensors"][name]), array)
    assert layer["answer"]["query_tokens"] == layer["answer"]["key_tokens"] == TOKENS
    assert layer["answer"]["metadata"]["hidden_by"] == {"is_causal": expected.metadata.hidden_by["is_causal"]}  # type: ignore[index]
    np.testing.assert_array_equal(array_of(layer["request"]["input"]), tokens)
    assert saved["request"]["num_heads"] == 2
    assert "select_heads" not in layer["request"]


def test_labels_of_queries_are_those_of_as_many_keys(tmp_path: Path) -> None:
    fields: dict[str, Any] = {"query": np.eye(4), "key": np.eye(4), "value": np.eye(4), "query_tokens": TOKENS}
    _, saved = written(tmp_path, **fields)
    assert saved["layers"][0]["request"]["key_tokens"] == TOKENS
    _, saved = written(tmp_path, **fields | {"key": np.eye(5)[:, :4], "value": np.eye(5), "query_offset": 0})
    assert "key_tokens" not in saved["layers"][0]["request"]


@pytest.mark.parametrize("spec", specs(covering(PLAIN, UNUSUAL | {"one vector": ONE_VECTOR})))
def test_the_request_of_a_page_is_that_of_the_result(spec: AttentionSpec) -> None:
    """Sent to the service, as *Copy as curl* has it, it gives the numbers of the page."""
    saved = json.loads(parts_of(page_of_request(spec, make_plan(spec)))["saved"])
    (layer,) = saved["layers"]
    sent, plan = make_spec_and_plan(CODECS["application/json"].decode(json.dumps(layer["request"]).encode(), 2**20))
    computed = Backends().choose("numpy", "cpu").program(plan, sent)(sent.sources, None)
    assert layer["tensors"].keys() == computed.arrays.keys()
    for output, array in computed.arrays.items():
        np.testing.assert_array_equal(array_of(layer["tensors"][output]), array, err_msg=output)


def test_the_page_loads_nothing_and_its_policy_forbids_it(tmp_path: Path) -> None:
    text, _ = written(tmp_path, input=[[1.0]], query_tokens=['"<img src=x>'])
    assert addresses(text) == []
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)">', text)
    (nonce,) = set(re.findall(r"'nonce-(\w+)'", policy))
    assert policy == f"default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; img-src data: blob:"
    assert re.findall(r"<script (.*?)>", text) == ['type="text/plain" id="deflated"', f'type="module" nonce="{nonce}"']
    assert len(text) < 80_000
    written(tmp_path, input=[[1.0]], query_tokens=['"<img src=x>'])
    assert (tmp_path / "it.html").read_text(encoding="utf-8") == text, "the same page for the same numbers"


@pytest.mark.parametrize("shape", [(LONGEST + 1, 1, 1), (512, 5, 512)])
def test_more_than_the_page_draws_is_an_error(shape: tuple[int, int, int], tmp_path: Path) -> None:
    queries, heads, keys = shape
    assert queries > LONGEST or queries * heads * keys > MOST_SCORES
    query, key = np.zeros((heads, queries, 1)), np.zeros((heads, keys, 1))
    with pytest.raises(ValueError, match=f"up to 512 queries and keys, .* got {queries} queries, {keys} keys"):
        attend(query, key, key, layout="hld").page(tmp_path / "it.html")
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        attend(input=[[1.0]]).page(tmp_path / "no" / "it.html")
