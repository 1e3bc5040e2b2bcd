"""R's jsonlite: what it writes of lists and matrices is a request, and it reads the answer.

It writes each value as an array, numbers with few digits, and minus infinity as text or null.
"""

from __future__ import annotations

import json
from typing import Any

import httpx
import numpy as np
import pytest

from tests.clients.programs import HERE, run
from tests.helpers.wire import JSON

PROGRAM = HERE / "r" / "json.R"
# softmax of (1, 0), of which in a causal one the first token sees itself only
PAIR = np.array([np.e, 1]) / (1 + np.e)
CAUSAL = np.array([[1, 0], PAIR[::-1]])
# scale 1/3, which jsonlite writes with 15 digits
FLAT = np.array([np.exp(1 / 3), 1]) / (1 + np.exp(1 / 3))
OUTPUTS = {
    "causal": CAUSAL,
    "window": np.array([PAIR, [0, 1]]),  # each sees itself and what comes after it
    "bias": CAUSAL,
    "digits": np.array([FLAT, FLAT[::-1]]),
    "exact": np.array([PAIR, PAIR[::-1]]) / 3,
    "unboxed": CAUSAL,
    "columns": np.full((3, 1), 2.0),
}


@pytest.fixture(scope="module")
def bodies() -> dict[str, str]:
    lines = run("Rscript", PROGRAM, "write").splitlines()
    return dict(line.split("\t", 1) for line in lines)


def asked(client: httpx.Client, body: str, path: str = "/attention") -> httpx.Response:
    return client.post(path, content=body.encode(), headers={"Content-Type": JSON})


@pytest.mark.parametrize("name", OUTPUTS)
def test_r_writes_a_request_and_reads_its_answer(name: str, bodies: dict[str, str], client: httpx.Client) -> None:
    answer = asked(client, bodies[name])
    assert answer.status_code == 200, answer.text
    found = np.array(run("Rscript", PROGRAM, "read", stdin=answer.text).split(), float)
    np.testing.assert_allclose(found.reshape(OUTPUTS[name].shape), OUTPUTS[name], rtol=1e-14, atol=1e-300)


def test_what_it_writes_is_what_this_page_says(bodies: dict[str, str]) -> None:
    assert '"is_causal":[true]' in bodies["causal"]
    assert '"include":["attention_weights"]' in bodies["causal"]
    assert '"scale":[0.333333333333333]' in bodies["digits"]
    assert '"dtype":["float64"]' in bodies["exact"]


def test_minus_infinity_as_text_is_refused_with_a_hint(bodies: dict[str, str], client: httpx.Client) -> None:
    answer = asked(client, bodies["text"])
    assert (answer.status_code, answer.json()["errors"][0]["pointer"]) == (422, "/bias/0/1")
    assert "null is minus infinity" in answer.json()["detail"]


def test_the_inference_protocol(bodies: dict[str, str], client: httpx.Client) -> None:
    """With auto_unbox, as other servers of the protocol want it."""
    answer = asked(client, bodies["protocol"], "/v2/models/attention/infer")
    outputs: dict[str, Any] = {output["name"]: output for output in json.loads(answer.text)["outputs"]}
    np.testing.assert_allclose(outputs["output"]["data"], CAUSAL.ravel(), rtol=1e-15)
