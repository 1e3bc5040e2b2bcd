"""Schemathesis makes requests from the API document of a live server, and holds the answers to it."""

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

from service.version import MODEL, MODEL_VERSION
from tests.attack.corpus import seeds
from tests.attack.server import Live, live
from tests.wire import JSON, NPZ, SAFETENSORS

# In CI; `make test-deep` asks for more.
CASES = int(os.environ.get("ATTACK_CASES", "500"))
SEED = int(os.environ.get("ATTACK_SEED", "1"))
# Of the cases with tensors, those that are computed: without examples to begin with, hardly any would fit together.
GOOD = 0.3
# No schema can say that inner sizes match, nor what fits into the memory of a server; a busy one says so.
EXPECTED = ["2xx", "404", "413", "422", "503"]
# What may be asked of any example.
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
    """The document as the server has it, with all checks on."""
    checks = ChecksConfig(positive_data_acceptance=PositiveDataAcceptanceConfig(expected_statuses=EXPECTED))
    # A key with NUL is refused, which a schema could say only for keys that it names.
    project = ProjectConfig(checks=checks, generation=GenerationConfig(allow_x00=False))
    config = SchemathesisConfig(projects=ProjectsConfig(default=project))
    return schemathesis.openapi.from_url(f"http://127.0.0.1:{server.port}/openapi.json", config=config)


def attack(strategy: st.SearchStrategy[Any], cases: int) -> Counter[int]:
    """Send so many cases, hold the answers to the document, and count their statuses."""
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
    """The examples of the document, with other options."""
    content = operation.definition.raw["requestBody"]["content"][JSON]
    examples = st.sampled_from([example["value"] for example in content["examples"].values()])
    bodies = st.builds(dict.__or__, examples, st.fixed_dictionaries({}, optional=VARIATIONS))
    return bodies.flatmap(lambda body: operation.as_strategy(body=body, media_type=JSON))


def test_attention(document: Any, capsys: pytest.CaptureFixture[str]) -> None:
    operation = document["/attention"]["POST"]
    statuses: Counter[int] = Counter()
    for strategy, part in (
        (from_examples(operation), 0.5),
        (operation.as_strategy(GenerationMode.POSITIVE), 0.3),
        (operation.as_strategy(GenerationMode.NEGATIVE), 0.2),
    ):
        statuses += attack(strategy, int(CASES * part))
    with capsys.disabled():
        print(f"\n{statuses.total()} cases by status: {dict(sorted(statuses.items()))}")
    assert statuses.total() >= CASES * 0.9  # hypothesis leaves out what it made already
    assert statuses[200] >= GOOD * statuses.total()


# What the protocol asks for shapes that no schema can say, and names that are not there.
INFER = ("/v2/models/{model_name}/infer", "/v2/models/{model_name}/versions/{model_version}/infer")
OTHERS = (
    "/health/live",
    "/health/ready",
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
def test_other_operations(document: Any, path: str) -> None:
    assert attack(document[path]["GET"].as_strategy(), max(CASES // 25, 10)).total() >= 1


@pytest.mark.parametrize("path", INFER)
def test_inference(document: Any, path: str) -> None:
    """Of the names in the path nearly all are unknown, so those that are known are given."""
    operation = document[path]["POST"]
    names = {"model_name": MODEL} | ({"model_version": MODEL_VERSION} if "model_version" in path else {})
    content = operation.definition.raw["requestBody"]["content"][JSON]
    examples = st.sampled_from([example["value"] for example in content["examples"].values()])
    given = examples.flatmap(lambda body: operation.as_strategy(body=body, media_type=JSON, path_parameters=names))
    statuses = attack(given, max(CASES // 10, 10))
    assert statuses[200] >= GOOD * statuses.total()
    for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
        attack(operation.as_strategy(mode), max(CASES // 20, 10))


def test_no_operation_is_left_out(document: Any) -> None:
    """One that is added needs a test above."""
    found = {result.ok().path for result in document.get_all_operations()}
    assert found == {"/attention", *INFER, *OTHERS}
