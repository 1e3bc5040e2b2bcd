"""What requests with a stored layer compute, in every operation and format, and which are refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from tests.conftest import app, serving
from tests.helpers import wire
from tests.helpers.layers import FEATURES, INPUT, LENGTH, ROLES, ask, inline, numbers, write_layers


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_layers(tmp_path, 0)


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_layers(tmp_path_factory.mktemp("layers"), 0, 100)


@pytest.fixture(scope="module")
def server(stored: Path) -> Iterator[httpx.Client]:
    with serving(app(layers=stored)) as client:
        yield client


@pytest.mark.parametrize("media_type", wire.MEDIA_TYPES)
def test_a_layer_computes_what_its_fields_compute(server: httpx.Client, media_type: str) -> None:
    body = wire.write({"input": INPUT, "layer": "bert-0"}, media_type)
    for _ in range(3):  # with and without a plan
        response = server.post("/attention", content=body, headers={"Content-Type": media_type})
        assert response.status_code == 200, response.text
        expected = ask(server, **inline()).json()
        found = wire.read(response.content, media_type)
        for name in ("output", "attention_weights"):
            np.testing.assert_allclose(found[name], expected[name], rtol=1e-12)


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_a_layer_is_cast_to_the_type_of_the_request(server: httpx.Client, dtype: str) -> None:
    for _ in range(2):
        assert (
            ask(server, layer="bert-0", dtype=dtype).json()["output"]
            == ask(server, **inline(), dtype=dtype).json()["output"]
        )


def test_a_context_goes_through_the_layer_too(server: httpx.Client) -> None:
    context = numbers(3, FEATURES, seed=21).tolist()
    more = {"context": context, "query_offset": 0}
    assert ask(server, layer="bert-0", **more).json()["output"] == ask(server, **inline(), **more).json()["output"]


def test_query_key_and_value_go_through_the_layer_too(server: httpx.Client) -> None:
    sources = {name: numbers(LENGTH, FEATURES, seed=seed).tolist() for seed, name in enumerate(ROLES[:3])}
    found = server.post("/attention", json={**sources, "layer": "bert-0"}).json()
    assert found["output"] == server.post("/attention", json=sources | inline()).json()["output"]


@pytest.mark.parametrize(
    "more",
    [
        {"scale": 2.0},
        {"rotary": {"dim": 2}},
        {"is_causal": False},
        {"sinks": [0.5, -0.5]},
        {"num_heads": 4, "sinks": [0.0] * 4},
        {"softcap": 1.5, "include": ["logsumexp"], "key_lengths": 3},
    ],
    ids=str,
)
def test_fields_of_the_request_replace_those_of_the_layer_as_a_whole(
    server: httpx.Client, more: dict[str, Any]
) -> None:
    assert (
        ask(server, layer="bert-0", **more).json().items()
        >= {"output": ask(server, **(inline() | more)).json()["output"]}.items()
    )


def test_null_keeps_the_fields_of_the_layer(server: httpx.Client) -> None:
    nothing = dict.fromkeys(("projection", "scale", "sinks", "rotary", "num_heads", "is_causal", "include"))
    assert ask(server, layer="bert-0", **nothing).json()["output"] == ask(server, layer="bert-0").json()["output"]
    assert ask(server, layer=None, **inline()).status_code == 200


def test_a_projection_beside_a_layer_is_refused(server: httpx.Client) -> None:
    for projection in ({}, {"query": {"weight": numbers(FEATURES, FEATURES).tolist()}}):
        problem = ask(server, layer="bert-0", projection=projection).json()
        fault = problem["errors"][0]
        assert (problem["status"], fault["code"], fault["pointer"]) == (422, "field_conflict", "/projection")


@pytest.mark.parametrize(
    ("fields", "code", "pointer", "text"),
    [
        ({"layer": "bert-2"}, "unknown_layer", "/layer", "bert-0"),
        ({"layer": "nothing like it"}, "unknown_layer", "/layer", "bert-0"),
        ({"layer": "attention"}, "unknown_layer", "/layer", "bert-0"),
        ({"layer": "../bert-0"}, "unknown_layer", "/layer", "bert-0"),
        ({"layer": "/etc/passwd"}, "unknown_layer", "/layer", "bert-0"),
        ({"layer": "bert-0\u0000"}, "unknown_layer", "/layer", "bert-0"),
        ({"layer": "x" * 100_000}, "unknown_layer", "/layer", "bert-0"),
        ({"layer": 7}, "invalid_value", "/layer", "string"),
        ({"layer": ["bert-0", "bert-1"]}, "invalid_value", "/layer", "string"),
        ({"layer": "bert-0", "input": [[1.0, 2.0]]}, "shape_mismatch", "/layer", "projection.query.weight"),
        ({"layer": "bert-0", "num_heads": 3}, "shape_mismatch", "/layer", "in layer bert-0"),
        ({"layer": "bert-0", "softcap": 0}, "invalid_value", "/softcap", "above 0"),
        ({"layer": "bert-0", "sinks": [1.0]}, "shape_mismatch", "/sinks", "(2,)"),
        ({"layer": "bert-0", "layers": 1}, "unknown_field", "/layers", "layer"),
    ],
    ids=str,
)  # fmt: skip
def test_bad_requests_with_layers(server: httpx.Client, fields: Any, code: str, pointer: str, text: str) -> None:
    for operation in ("/attention", "/attention/compare", "/attention/heatmap"):
        response = server.post(operation, json={"input": INPUT.tolist()} | fields)
        problem = response.json()
        fault = problem["errors"][0]
        assert (response.status_code, fault["code"], fault["pointer"]) == (422, code, pointer), problem
        assert text in problem["detail"]
        assert len(problem["detail"]) < 400


def test_a_service_without_layers_says_how_to_set_them_up(client: httpx.Client) -> None:
    problem = ask(client, layer="bert-0").json()
    assert (problem["status"], problem["code"], problem["errors"][0]["pointer"]) == (422, "unknown_layer", "/layer")
    assert "ATTENTION_LAYERS" in problem["detail"]
    assert client.get("/layers").json() == {"layers": []}
    assert client.get("/layers/bert-0").status_code == 404


def test_the_library_has_no_layers() -> None:
    from attention_service import attend
    from attention_service.errors import InvalidRequest

    more: Any = {"layer": "bert-0"}
    with pytest.raises(InvalidRequest, match=r"/layer: .*a service"):
        attend(input=INPUT, **more)


def test_comparisons_and_heatmaps_take_layers(server: httpx.Client) -> None:
    output = ask(server, **inline()).json()["output"]
    body = {"input": INPUT.tolist(), "actual": {"output": output}, "time_limit": 0}
    report = server.post("/attention/compare", json=body | {"layer": "bert-0"}).json()
    assert report["verdict"]["status"] in ("correct", "inconclusive")
    assert server.post("/attention/compare", json=body | {"layer": "bert-1"}).json()["verdict"]["status"] == "wrong"
    pictures = [
        server.post("/attention/heatmap", json={"input": INPUT.tolist()} | fields).content
        for fields in ({"layer": "bert-0"}, inline())
    ]
    assert pictures[0] == pictures[1]


def test_the_command_line_computes_with_layers(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary: Any, server: httpx.Client
) -> None:
    from attention_service.cli import main

    monkeypatch.setenv("ATTENTION_LAYERS", str(folder))
    (folder / "request").write_text(json.dumps({"input": INPUT.tolist(), "layer": "bert-0"}))
    assert main(["compute", str(folder / "request")]) == 0
    expected = ask(server, layer="bert-0").json()["output"]
    assert json.loads(capfdbinary.readouterr().out)["output"] == expected


def test_a_cached_plan_is_not_that_of_another_layer(server: httpx.Client) -> None:
    outputs = [ask(server, layer=name).json()["output"] for name in ("bert-0", "bert-1", "bert-0", "bert-1")]
    assert outputs[0] == outputs[2] != outputs[1] == outputs[3]
    assert outputs[1] == ask(server, **inline(100)).json()["output"]


@pytest.mark.torch
def test_layers_are_computed_by_torch(server: httpx.Client) -> None:
    for dtype in ("float32", "float64", "bfloat16"):
        answers = [
            ask(server, layer="bert-0", dtype=dtype, backend=name).json() for name in ("numpy", "torch", "torch")
        ]
        assert [answer["metadata"]["backend"] for answer in answers] == ["numpy", "torch", "torch"]
        for answer in answers[1:]:
            tolerance = 0.05 if dtype == "bfloat16" else 1e-5
            np.testing.assert_allclose(answer["output"], answers[0]["output"], rtol=tolerance, atol=tolerance)
