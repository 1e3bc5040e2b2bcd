"""Every option of a request means the same in every transport: what `attend` computes in Python."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest

from attention_service import attend
from tests.helpers import messages, oip
from tests.helpers.options import as_fields
from tests.helpers.rpc import remote
from tests.test_options import PLAIN, UNUSUAL
from tests.test_outputs import TRANSPORTS

# Fields of Python alone; the types of results, which lists do not have, have tests of their own.
ELSEWHERE = {"untyped", "allow_non_finite", "dtype", "query_tokens", "key_tokens"}
NAMES = [name for name in UNUSUAL if name not in ELSEWHERE]


def fields_of(name: str) -> dict[str, Any]:
    """The fields of a request with an option that is not usual."""
    return as_fields(PLAIN._replace(**UNUSUAL[name]))


def check(found: dict[str, Any], fields: dict[str, Any]) -> None:
    expected = attend(**fields)
    for name, array in expected.items():
        if isinstance(array, dict):
            continue
        np.testing.assert_allclose(np.array(found[name], np.float64), array, rtol=1e-12, atol=1e-13, err_msg=name)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("name", NAMES)
def test_options_mean_the_same_in_every_transport(name: str, transport: str, client: httpx.Client) -> None:
    fields = fields_of(name)
    check(TRANSPORTS[transport](client, fields), fields)


@pytest.fixture(scope="module")
def grpc() -> Iterator[Any]:
    with remote() as server:
        yield server


@pytest.mark.parametrize("name", NAMES)
def test_options_mean_the_same_over_grpc(name: str, grpc: Any) -> None:
    fields = fields_of(name)
    arrays, parameters = oip.arrays_of(fields)
    check(grpc.infer(messages.request(arrays, parameters)), fields)
