"""The models of requests: the fields of the specs, and what validation says of unknown names and wrong values."""

from __future__ import annotations

import inspect
from typing import Any

import httpx
import pytest

from attention_service.attention import spec as specs
from attention_service.attention.spec import AttentionSpec
from attention_service.schemas import request as schemas
from attention_service.schemas.closed import Part
from tests.test_bad_requests import GOOD, errors, good, projected, raw

# Fields that the codec and the caller set, not the request.
NOT_SENT = {"untyped", "allow_non_finite"}
# Fields for the service around a computation.
OF_THE_SERVICE = {"encoding", "layer"}


@pytest.mark.parametrize(
    ("model", "spec"),
    [
        (schemas.AttentionRequest, AttentionSpec),
        *((part, getattr(specs, part.__name__)) for part in Part.__subclasses__()),
    ],
)
def test_schema_and_spec_have_the_same_fields_and_defaults(model: Any, spec: Any) -> None:
    """The schema, which documents fields and defaults, agrees with the spec, which the code uses."""
    fields = [name for name in inspect.signature(spec).parameters if name not in NOT_SENT]
    assert [name for name in model.model_fields if name not in OF_THE_SERVICE] == fields
    for name in fields:
        default = model.model_fields[name].default
        assert (tuple(default) if isinstance(default, list) else default) == getattr(spec(), name)


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("num_head", "did you mean num_heads?"),
        ("Query", "did you mean query?"),
        ("attn_mask", "mask"),
        ("key_padding_mask", "use key_mask, inverted"),
        ("dropout_p", "exact"),
        ("enable_gqa", "num_kv_heads"),
        ("need_weights", "include"),
        ("q_num_heads", "use num_heads"),
        ("embed_dim", "read from the shapes"),
        ("nonpad_kv_seqlen", "use key_lengths"),
        ("sliding_window", "window"),
        ("logit_cap", "use softcap"),
        ("past_key_values", "past_key and past_value"),
        ("heads", "use num_heads"),
        ("quary", "did you mean query?"),
        ("Wq", "use projection.query with weight"),
        ("cu_seqlens", "use segment_ids"),
        ("temperature", "use scale"),
        ("cache", "use past_key and past_value"),
        ("batch_size", "read from the shapes"),
        ("precision", "use dtype"),
        ("top_p", "nothing is sampled"),
        ("tokens", "use query_tokens, and key_tokens"),
        ("logsumexp", "list logsumexp in include"),
        ("query_mask", "use query_lengths, or mask"),
    ],
)
def test_unknown_names_get_a_suggestion(client: httpx.Client, name: str, advice: str) -> None:
    (fault,) = errors(client, good(**{name: 1}))
    assert advice in fault["hint"]


@pytest.mark.parametrize("name", ["zzzzzz", "expected", "softmax", "block_size", "model"])
def test_a_name_unlike_all_fields_gets_no_suggestion(name: str, client: httpx.Client) -> None:
    (fault,) = errors(client, good(**{name: 1}))
    assert "hint" not in fault


def test_a_slip_within_an_object_is_not_taken_for_a_name_of_another_library(client: httpx.Client) -> None:
    (fault,) = errors(client, projected(query={"weights": [[1, 0], [0, 1]]}))
    assert fault["hint"] == "did you mean weight?"


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"window": [1, 1]}, "an object with left, right"),
        ({"segment_ids": [0, 1]}, "an object with query, key"),
        ({"is_causal": "true"}, "true or false"),
        ({"device": "gpu"}, "auto, cpu, cuda or cuda:N"),
    ],
)
def test_an_error_says_what_a_field_takes(fields: dict[str, Any], expected: str, client: httpx.Client) -> None:
    (fault,) = errors(client, good(**fields))
    assert fault["expected"] == expected


def test_faults_of_several_kinds_are_reported_together(client: httpx.Client) -> None:
    response = client.post("/attention", json=good(key=[[1], [2, 3]], num_head=2, scale="x"))
    problem = response.json()
    assert problem["code"] == "invalid_request"
    assert {fault["pointer"]: fault["code"] for fault in problem["errors"]} == {
        "/key/1": "invalid_array",
        "/scale": "invalid_value",
        "/num_head": "unknown_field",
    }


def test_at_most_ten_faults_are_reported(client: httpx.Client) -> None:
    assert len(errors(client, good(**{f"field{i}": i for i in range(50)}))) == 10
    strange = client.post("/attention", content=raw(str([["NaN"] * 50]).replace("'", "")),
                          headers={"Content-Type": "application/json"})  # fmt: skip
    assert len(strange.json()["errors"]) == 10


def test_long_names_and_values_are_truncated(client: httpx.Client) -> None:
    response = client.post("/attention", json=good(**{"x" * 100_000: "y" * 100_000, "layout": "z" * 100_000}))
    assert response.status_code == 422
    assert len(response.content) < 2000


def test_null_means_absent(client: httpx.Client) -> None:
    names = ("projection", "layout", "mask", "bias", "is_causal", "include", "dtype", "scale", "num_heads", "backend")
    response = client.post("/attention", json=GOOD | dict.fromkeys(names))
    assert response.status_code == 200
    assert response.json()["output"] == client.post("/attention", json=GOOD).json()["output"]
