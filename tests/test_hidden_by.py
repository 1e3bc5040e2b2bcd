"""`hidden_by`: which fields of a request hide each key from each query. Expected numbers are from hand calculation."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attention_service import attend
from attention_service.attention.score_term import ScoreTerm
from attention_service.attention.shapes import Sizes
from attention_service.attention.spec import AttentionSpec
from attention_service.attention.terms import CAUSES, TERMS
from attention_service.commands.files import read_arrays
from attention_service.comparison.actual import NAMES
from attention_service.errors import FieldConflict, InvalidRequest
from attention_service.library import compare
from tests.helpers import oip, wire
from tests.helpers.backends import BACKENDS, compute_as_if_large

ROOT = Path(__file__).resolve().parent.parent
# In the order of their bits, which never changes.
FIELDS = ("mask", "key_mask", "key_lengths", "query_lengths", "segment_ids", "window", "chunk_size", "is_causal",
          "bias", "selected_keys")  # fmt: skip
BITS = {name: cause.bit for name, cause in CAUSES.items()}
FOUR = np.eye(4)
INF = math.inf
T, F = True, False

# Requests, their hidden_by and the names in their metadata.
CASES: dict[str, tuple[dict[str, Any], Any, set[str]]] = {
    "nothing hides": ({"input": FOUR, "softcap": 2.0}, np.zeros((4, 4)), set()),
    "causal, window, padding": (
        {"input": FOUR, "is_causal": True, "window": {"left": 1}, "key_lengths": 3, "query_lengths": 3},
        # Query 3 is padding (8), key 3 is padding (4), later keys are hidden by is_causal (128), earlier ones by
        # window (32).
        [[0, 128, 128, 132], [0, 0, 128, 132], [32, 0, 0, 132], [40, 40, 8, 12]],
        {"is_causal", "window", "key_lengths", "query_lengths"},
    ),
    "masks and a bias": (
        {
            "input": FOUR,
            "mask": [[T, F, T, F], [T] * 4, [T] * 4, [F] * 4],
            "key_mask": [T, F, T, T],
            "bias": np.array([[0, -INF, 3, 0], [0] * 4, [-INF] * 4, [-1e300] * 4]),
        },
        [[0, 259, 0, 1], [0, 2, 0, 0], [256, 258, 256, 256], [1, 3, 1, 1]],
        {"mask", "key_mask", "bias"},
    ),
    "segments of each batch entry": (
        {"input": np.stack([FOUR, FOUR]), "segment_ids": {name: [[0, 0, 7, 7], [5, 6, 6, 6]] for name in
                                                          ("query", "key")}},
        [[[0, 0, 16, 16], [0, 0, 16, 16], [16, 16, 0, 0], [16, 16, 0, 0]],
         [[0, 16, 16, 16], [16, 0, 0, 0], [16, 0, 0, 0], [16, 0, 0, 0]]],
        {"segment_ids"},
    ),
    "lengths of each batch entry": (
        {"input": np.ones((2, 2, 1)), "key_lengths": [1, 2], "query_lengths": [2, 0]},
        [[[0, 4], [0, 4]], [[8, 8], [8, 8]]],
        {"key_lengths", "query_lengths"},
    ),
    "chunks with an offset": (  # queries are at 1 to 4: chunks 0, 1, 1, 2; keys in chunks 0, 0, 1, 1
        {"input": FOUR, "chunk_size": 2, "query_offset": 1},
        [[0, 0, 64, 64], [64, 64, 0, 0], [64, 64, 0, 0], [64] * 4],
        {"chunk_size"},
    ),
    "selected keys and a causal mask": (  # -1 is no key
        {"input": FOUR, "selected_keys": [[0, 3], [-1, -1], [2, 2], [0, 1]], "is_causal": True},
        [[0, 640, 640, 128], [512, 512, 640, 640], [512, 512, 0, 640], [0, 0, 512, 512]],
        {"selected_keys", "is_causal"},
    ),
    "selected keys in columns": (
        {"input": np.ones((2, 3)), "layout": "dl", "selected_keys": [[0, 2], [-1, 1], [2, 2]]},
        np.transpose([[0, 512, 0], [512, 0, 512], [512, 512, 0]]),
        {"selected_keys"},
    ),
    "tokens in columns": (
        {"input": np.ones((2, 4)), "layout": "dl", "is_causal": True, "window": {"left": 1}},
        np.transpose([[0, 128, 128, 128], [0, 0, 128, 128], [32, 0, 0, 128], [32, 32, 0, 0]]),
        {"is_causal", "window"},
    ),
    "tokens in columns of a batch": (
        {"input": np.ones((1, 2, 2)), "layout": "bdl", "is_causal": True},
        [[[0, 0], [128, 0]]],
        {"is_causal"},
    ),
    "a vector": (
        {"query": [1.0, 0], "key": np.ones((3, 2)), "value": np.ones((3, 2)), "key_lengths": 2, "is_causal": True,
         "query_offset": 0},
        [0, 128, 132],
        {"key_lengths", "is_causal"},
    ),
    "a past": (  # the query is at 2
        {"input": np.ones((1, 1)), "past_key": np.ones((1, 2, 1)), "past_value": np.ones((1, 2, 1)),
         "is_causal": True, "window": {"left": 1}},
        [[32, 0, 0]],
        {"is_causal", "window"},
    ),
    "grouped heads": (
        {"query": np.ones((4, 2, 1)), "key": np.ones((2, 2, 1)), "value": np.ones((2, 2, 1)), "layout": "hld",
         "mask": [[[T, T], [T, T]], [[F, T], [T, T]], [[T, F], [T, T]], [[T, T], [F, F]]], "is_causal": True},
        [[[0, 128], [0, 0]], [[1, 128], [0, 0]], [[0, 129], [0, 0]], [[0, 128], [1, 1]]],
        {"mask", "is_causal"},
    ),
    "chosen heads and queries": (
        {"query": np.ones((4, 2, 1)), "key": np.ones((2, 2, 1)), "value": np.ones((2, 2, 1)), "layout": "hld",
         "mask": [[[T, T], [T, T]], [[F, T], [T, T]], [[T, F], [T, T]], [[T, T], [F, F]]], "is_causal": True,
         "select_heads": np.array([3, 1]), "select_queries": np.array([1, 0])},
        [[[1, 1], [0, 128]], [[0, 0], [1, 128]]],
        {"mask", "is_causal"},
    ),
    "chosen queries in columns": (
        {"input": np.ones((2, 4)), "layout": "dl", "is_causal": True, "select_queries": np.array([2, 0])},
        np.transpose([[0, 0, 0, 128], [0, 128, 128, 128]]),
        {"is_causal"},
    ),
    "normalised by sums": (
        {"input": FOUR, "normalization": "sum", "is_causal": True},
        np.triu(np.full((4, 4), 128), 1),
        {"is_causal"},
    ),
    "halves": ({"input": FOUR, "dtype": "bfloat16", "is_causal": True}, np.triu(np.full((4, 4), 128), 1),
               {"is_causal"}),
    "an open window and a finite bias": (
        {"input": FOUR, "window": {}, "bias": [1.0, 2, 3, 4]}, np.zeros((4, 4)), {"bias"}
    ),
}  # fmt: skip


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("tile", [None, 1, 5], ids=["default", "tiles of 1", "tiles of 5"])
@pytest.mark.parametrize("name", CASES)
def test_all_fields_that_hide_a_key_are_named(
    name: str, tile: int | None, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields, expected, causes = CASES[name]
    if tile is not None:
        compute_as_if_large(monkeypatch, tile)
    for others in ((), ("attention_weights", "masked_scores")):
        result = attend(**fields, include=("hidden_by", *others), backend=backend)
        np.testing.assert_array_equal(result["hidden_by"], expected)
        assert result["hidden_by"].dtype == np.int32
        assert result.metadata.hidden_by == {cause: bit for cause, bit in BITS.items() if cause in causes}
        assert result.metadata.kernel == "dense"


@pytest.mark.parametrize("backend", BACKENDS)
def test_top_k_does_not_cut_it(backend: str) -> None:
    fields, expected, _ = CASES["causal, window, padding"]
    result = attend(**fields, include=["attention_weights", "hidden_by"], top_k=1, backend=backend)
    np.testing.assert_array_equal(result["hidden_by"], expected)
    assert result["top_weights"]["values"].shape == (4, 1)


def test_heads_are_not_averaged() -> None:
    with pytest.raises(FieldConflict, match="/include: expected no hidden_by"):
        attend(np.eye(2), np.eye(2), np.eye(2), average_heads=True, include=["hidden_by"])


def test_the_metadata_has_no_bits_unless_they_are_asked_for(client: httpx.Client) -> None:
    answer = client.post("/attention", json={"input": [[1.0]], "is_causal": True}).json()
    assert "hidden_by" not in answer["metadata"]
    assert attend(np.eye(2), np.eye(2), np.eye(2)).metadata.hidden_by is None


@st.composite
def requests(draw: st.DrawFn) -> dict[str, Any]:
    """Requests with any of the fields that hide keys, and others that change scores."""
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    b, g, groups, q, k, d = (draw(st.integers(1, most)) for most in (2, 2, 2, 6, 6, 3))
    if b == g * groups > 1:  # where a mask of rank 3 would be ambiguous
        b = 1
    ids = {"query": random.integers(0, 2, (b, q)), "key": random.integers(0, 2, (b, k))}
    sizes = Sizes(g * groups, g, b, q, k, d, d)
    options: dict[str, Any] = {kind.field: kind.example(random, sizes) for kind in TERMS} | {
        "mask": random.random((b, g * groups, q, k)) < 0.7,
        "key_mask": random.random((b, k)) < 0.8,
        "key_lengths": random.integers(0, k + 1, b),
        "query_lengths": random.integers(0, q + 1, b),
        "segment_ids": ids,
        "window": {"left": int(random.integers(0, 3)), "right": int(random.integers(0, 3))},
        "chunk_size": int(random.integers(1, 4)),
        "is_causal": True,
        "bias": np.where(random.random((1, 1, q, k)) < 0.8, random.normal(size=(1, 1, q, k)), -INF),
        "selected_keys": random.integers(-1, k, (b, g * groups, q, 2)),
        "alibi_slopes": random.random(g * groups),
        "softcap": 2.0,
        "normalization": "sum",
    }
    chosen = draw(st.sets(st.sampled_from(sorted(options))))
    lengths = (("query", g * groups, q), ("key", g, k), ("value", g, k))
    sources = {name: random.normal(size=(b, heads, length, d)) for name, heads, length in lengths}
    offset = {"query_offset": random.integers(-2, 5, b)}
    return sources | offset | {"layout": "bhld"} | {name: options[name] for name in chosen}


@pytest.mark.parametrize("backend", BACKENDS)
@given(request=requests(), tile=st.sampled_from([None, 1, 5, 20]))
def test_a_key_is_hidden_where_its_masked_score_is_minus_infinity(
    backend: str, request: dict[str, Any], tile: int | None
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if tile is not None:
            compute_as_if_large(patch, tile)
        result = attend(**request, include=["hidden_by", "masked_scores"], backend=backend)
    bits = result["hidden_by"]
    np.testing.assert_array_equal(bits != 0, np.isneginf(result["masked_scores"]))
    # Each field hides the same keys when it is the only one, and no bit belongs to a field that the request lacks.
    others = {name: value for name, value in request.items() if name not in BITS}
    for name, bit in BITS.items():
        alone = np.zeros_like(bits)
        if name in request:
            alone = attend(**others, **{name: request[name]}, include=["hidden_by"], backend=backend)["hidden_by"]
        np.testing.assert_array_equal(bits & bit, alone)


def test_every_term_that_hides_keys_has_a_bit_of_its_own() -> None:
    assert {name: 2**n for n, name in enumerate(FIELDS)} == BITS
    assert {cause for _, _, causes in CASES.values() for cause in causes} == {*BITS}, "a field has no case by hand"
    hiding = [kind for kind in TERMS if kind.visible is not ScoreTerm.visible]
    assert [kind.field for kind in TERMS if kind.cause] == [kind.field for kind in hiding]
    assert len(hiding) == len(set(BITS.values())) == len(BITS)
    assert BITS.keys() <= set(AttentionSpec._fields)
    page = (ROOT / "docs" / "attention.md").read_text(encoding="utf-8")
    assert [name for name, bit in BITS.items() if f"| {bit} | `{name}` |" not in page] == []


@pytest.mark.parametrize("binary", [False, True])
def test_the_inference_protocol_returns_integers_and_the_bits_as_parameters(binary: bool, client: httpx.Client) -> None:
    fields = {"input": FOUR, "is_causal": True, "key_lengths": np.array(3, np.int32), "include": ["hidden_by"]}
    body, headers = oip.request_of(fields, binary)
    answer = oip.read(client.post(oip.INFER, content=body, headers=headers))
    assert answer["hidden_by"].dtype == np.int32
    assert answer["hidden_by"].tolist() == [[0, 128, 128, 132], [0, 0, 128, 132], [0, 0, 0, 132], [0, 0, 0, 4]]
    parameters = answer["rest"]["parameters"]
    assert {name: value for name, value in parameters.items() if name.startswith("hidden_by")} == {
        "hidden_by.key_lengths": 4,
        "hidden_by.is_causal": 128,
    }
    outputs = client.get("/v2/models/attention").json()["outputs"]
    assert {"name": "hidden_by", "datatype": "INT32", "shape": [-1, -1]} in outputs


@pytest.mark.parametrize("raw", [False, True])
def test_grpc_returns_integers_of_any_size(raw: bool) -> None:
    """Typed integers are encoded a part at a time; sums of bits above 127 take two bytes."""
    from tests.helpers import messages
    from tests.helpers.rpc import remote

    bias = np.where(np.eye(200) > 0, 0, -INF)
    arrays = {"input": np.ones((200, 1)), "bias": bias}
    with remote() as server:
        message = messages.request(arrays, {"is_causal": True}, raw=raw, outputs=("hidden_by",))
        answer = server.infer(message)
    np.testing.assert_array_equal(answer["hidden_by"], 256 * (np.eye(200) == 0) + 128 * np.triu(np.ones((200, 200)), 1))
    assert answer["rest"].outputs[0].datatype == "INT32"
    assert answer["rest"].parameters["hidden_by.bias"].int64_param == 256


def test_it_is_not_compared(client: httpx.Client, tmp_path: Path) -> None:
    """Not as an array of a kernel; in a stored response it is left out, as metadata are."""
    assert "hidden_by" not in NAMES
    fields: dict[str, Any] = {"input": FOUR.tolist(), "is_causal": True, "include": ["hidden_by"]}
    response = client.post("/attention", json=fields)
    (tmp_path / "answer.json").write_bytes(response.content)
    assert read_arrays(tmp_path / "answer.json", NAMES).keys() == {"output"}
    for actual in ({"hidden_by": response.json()["hidden_by"]}, {"output": FOUR, "hidden_by": FOUR}):
        with pytest.raises(InvalidRequest, match="/actual/hidden_by"):
            compare(actual, **fields)
    report = client.post("/attention/compare", json=fields | {"actual": {"output": response.json()["output"]}}).json()
    assert report["verdict"]["status"] in ("correct", "inconclusive")
    assert "hidden_by" not in report["metadata"]


@pytest.mark.parametrize("media_type", [wire.NPZ, wire.SAFETENSORS])
def test_binary_formats_have_the_bits_in_their_metadata(media_type: str, client: httpx.Client) -> None:
    body = wire.write({"input": FOUR, "is_causal": True, "include": ["hidden_by"]}, media_type)
    response = client.post("/attention", content=body, headers={"Content-Type": media_type})
    answer = wire.read(response.content, media_type)
    assert answer["hidden_by"].dtype == np.int32
    assert answer["metadata"]["hidden_by"] == {"is_causal": 128}
