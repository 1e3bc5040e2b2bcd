"""Schemathesis generates requests from the API document of a running server and validates the responses."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from schemathesis.config import (
    ChecksConfig,
    GenerationConfig,
    PositiveDataAcceptanceConfig,
    ProjectConfig,
    ProjectsConfig,
    SchemathesisConfig,
)
from schemathesis.generation import GenerationMode

from attention_service.version import MODEL, MODEL_VERSION
from tests.attack.corpus import seeds
from tests.attack.server import Live, live
from tests.helpers.wire import JSON, NPZ, SAFETENSORS

# The default; `make test-deep` sets more.
CASES = int(os.environ.get("ATTACK_CASES", "500"))
SEED = int(os.environ.get("ATTACK_SEED", "1"))
# The least share of requests that get a 200: without examples to start from, hardly any shapes would match.
SUCCESS_RATE = 0.3
# A JSON schema cannot express that inner sizes match, or what fits into memory; a busy server responds with 503.
EXPECTED = ["2xx", "404", "413", "422", "503"]
# Options that are valid for every example.
VARIATIONS: dict[str, st.SearchStrategy[Any]] = {
    "scale": st.floats(-10, 10) | st.none(),
    "is_causal": st.none() | st.just(False),
    "dtype": st.sampled_from(["float64", "float32"]),
    "encoding": st.sampled_from(["list", "base64"]),
    "include": st.lists(st.sampled_from(["attention_weights", "scores", "masked_scores", "logsumexp"]), unique=True),
    "top_k": st.integers(1, 10),
    "softcap": st.floats(0.1, 100),
    "select_queries": st.just([0]),
    "backend": st.sampled_from(["auto", "numpy"]),
}

for binary in (NPZ, SAFETENSORS):
    schemathesis.openapi.media_type(binary, st.sampled_from(seeds(binary)))


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    with live(time_limit=20) as server:
        yield server


@pytest.fixture(scope="module")
def document(server: Live) -> Any:
    """The API document that the server serves, with all checks of schemathesis enabled."""
    checks = ChecksConfig(positive_data_acceptance=PositiveDataAcceptanceConfig(expected_statuses=EXPECTED))
    # A key with NUL is refused; a schema can forbid that only for keys that it names.
    project = ProjectConfig(checks=checks, generation=GenerationConfig(allow_x00=False))
    config = SchemathesisConfig(projects=ProjectsConfig(default=project))
    return schemathesis.openapi.from_url(f"http://127.0.0.1:{server.port}/openapi.json", config=config)


# The options above that parts of any shape, and calls, may have.
MERGED = {"dtype", "encoding"}
CALLED = {"dtype", "encoding", "backend"}


def attack(strategy: st.SearchStrategy[Any], cases: int) -> Counter[int]:
    """Sends so many generated requests, validates the responses, and returns the number of each status."""
    statuses: Counter[int] = Counter()

    def check(case: Any) -> None:
        response = case.call()
        statuses[response.status_code] += 1
        case.validate_response(response)
        assert response.status_code != 500

    test: Any = settings(
        max_examples=cases,
        deadline=None,
        database=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )(given(case=strategy)(check))
    seed(SEED)(test)()
    return statuses


def from_examples(operation: Any) -> st.SearchStrategy[Any]:
    """Requests that combine the examples of the document with other options."""
    content = operation.definition.raw["requestBody"]["content"][JSON]
    examples = st.sampled_from([example["value"] for example in content["examples"].values()])
    known = MERGED if operation.path == "/attention/merge" else VARIATIONS.keys()
    known = CALLED if operation.path.startswith("/attention/call") else known
    optional = {name: values for name, values in VARIATIONS.items() if name in known}
    bodies = st.builds(dict.__or__, examples, st.fixed_dictionaries({}, optional=optional))
    return bodies.flatmap(lambda body: operation.as_strategy(body=body, media_type=JSON))


# Paths, the share of the cases that each gets, and of these the share that succeeds: a comparison refuses top_k, and
# shapes that do not fit those of `actual`, a merge parts of different shapes.
@pytest.mark.parametrize(
    ("path", "share", "success", "distinct"),
    [
        ("/attention", 1.0, SUCCESS_RATE, 0.9),
        ("/attention/compare", 0.25, SUCCESS_RATE / 2, 0.9),
        ("/attention/heatmap", 0.25, SUCCESS_RATE, 0.9),
        ("/attention/merge", 0.25, SUCCESS_RATE / 2, 0.6),  # has few examples
        ("/attention/call", 0.25, SUCCESS_RATE / 2, 0.6),
        ("/attention/call/compare", 0.25, SUCCESS_RATE / 2, 0.6),
    ],
)
def test_attention_responses_follow_the_api_document(
    document: Any, capsys: pytest.CaptureFixture[str], path: str, share: float, success: float, distinct: float
) -> None:
    operation, cases = document[path]["POST"], int(CASES * share)
    statuses: Counter[int] = Counter()
    for strategy, part in (
        (from_examples(operation), 0.5),
        (operation.as_strategy(GenerationMode.POSITIVE), 0.3),
        (operation.as_strategy(GenerationMode.NEGATIVE), 0.2),
    ):
        statuses += attack(strategy, int(cases * part))
    with capsys.disabled():
        print(f"\n{path}: {statuses.total()} cases by status: {dict(sorted(statuses.items()))}")
    assert statuses.total() >= cases * distinct  # hypothesis leaves out duplicates
    assert statuses[200] >= success * statuses.total()


# Operations with a request body; the schemas cannot express which shapes match.
INFER = ("/v2/models/{model_name}/infer", "/v2/models/{model_name}/versions/{model_version}/infer")
OTHERS = (
    "/health/live",
    "/health/ready",
    "/layers",
    "/layers/{name}",
    "/metrics",
    "/problems/{code}",
    "/v2",
    "/v2/health/live",
    "/v2/health/ready",
    "/v2/models/{model_name}",
    "/v2/models/{model_name}/ready",
    "/v2/models/{model_name}/versions/{model_version}",
    "/v2/models/{model_name}/versions/{model_version}/ready",
)


@pytest.mark.parametrize("path", OTHERS)
def test_other_operations_follow_the_api_document(document: Any, path: str) -> None:
    assert attack(document[path]["GET"].as_strategy(), max(CASES // 25, 10)).total() >= 1


@pytest.mark.parametrize("path", INFER)
def test_inference_responses_follow_the_api_document(document: Any, path: str) -> None:
    """The path has the names of the real model and version, as nearly all generated names are unknown."""
    operation = document[path]["POST"]
    names = {"model_name": MODEL} | ({"model_version": MODEL_VERSION} if "model_version" in path else {})
    content = operation.definition.raw["requestBody"]["content"][JSON]
    examples = st.sampled_from([example["value"] for example in content["examples"].values()])
    given = examples.flatmap(lambda body: operation.as_strategy(body=body, media_type=JSON, path_parameters=names))
    statuses = attack(given, max(CASES // 10, 10))
    assert statuses[200] >= SUCCESS_RATE * statuses.total()
    for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
        attack(operation.as_strategy(mode), max(CASES // 20, 10))


def test_every_operation_has_a_test(document: Any) -> None:
    """A new operation must be added to one of the lists above."""
    found = {result.ok().path for result in document.get_all_operations()}
    calls = {"/attention/call", "/attention/call/compare"}
    others = {"/attention", "/attention/compare", "/attention/heatmap", "/attention/merge"}
    assert found == {*calls, *others, *INFER, *OTHERS}
