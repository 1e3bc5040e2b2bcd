"""Every option of a request means the same in every transport: what `attend` computes in Python.

Each option by itself goes through each codec in this process. Over sockets, requests have many options at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import combinations
from typing import Any

import numpy as np
import pytest

from attention_service import attend
from attention_service.codecs.decoded import Decoded
from attention_service.codecs.oip.grpc import GRPCCodec
from attention_service.codecs.oip.http import HTTPCodec
from attention_service.codecs.table import CODECS
from attention_service.pipeline.prepare import make_spec_and_plan
from tests.helpers import messages, oip, wire
from tests.helpers.covering import HALF, Group, covering, with_options
from tests.helpers.options import as_fields
from tests.helpers.rpc import Remote, remote
from tests.test_options import PLAIN, UNUSUAL
from tests.test_outputs import TRANSPORTS

LIMIT = 10**6
# With outputs that show what is done to sources and scores, whatever is hidden then.
SHOWING = PLAIN._replace(include=("attention_weights", "masked_scores", "query", "key", "value"))
# Fields of Python alone.
OF_PYTHON = {"untyped", "allow_non_finite"}
# The types of results, which lists do not have, and labels have tests of their own.
ELSEWHERE = OF_PYTHON | {"dtype", "query_tokens", "key_tokens"}
OPTIONS = {name: option for name, option in UNUSUAL.items() if name not in ELSEWHERE}


@cache
def groups() -> list[Group]:
    """Options that stand together in one request: each two that can are in one of the groups."""
    return covering(SHOWING, OPTIONS, 2)


def groups_for(transport: str) -> list[Group]:
    """A share of the groups, and others until each option is there."""
    found = groups()[list(TRANSPORTS).index(transport) :: len(TRANSPORTS)]
    for group in groups():
        if not set(group) <= {name for other in found for name in other}:
            found.append(group)
    return found


def test_every_option_is_sent_by_every_transport_and_every_two_by_one() -> None:
    sent = set()
    for transport in TRANSPORTS:
        requests = groups_for(transport)
        assert len(requests) < 15
        assert {name for group in requests for name in group} == UNUSUAL.keys() - ELSEWHERE
        sent |= {frozenset(pair) for group in requests for pair in combinations(group, 2)}
    apart = [pair for pair in combinations(OPTIONS, 2) if frozenset(pair) not in sent]
    assert [pair for pair in apart if with_options(SHOWING, OPTIONS, pair, least=HALF)] == []
    assert len(apart) < 150, "nearly all can stand together"


@pytest.fixture(scope="module")
def server() -> Iterator[Remote]:
    with remote() as found:
        yield found


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_options_mean_the_same_in_every_transport(transport: str, server: Remote) -> None:
    for group in groups_for(transport):
        spec = with_options(SHOWING, OPTIONS, group)
        assert spec is not None
        fields = as_fields(spec)
        found = TRANSPORTS[transport](server, fields)
        for name, array in attend(**fields).items():
            if isinstance(array, dict):
                continue
            given = np.array(found[name], np.float64)
            if transport == "JSON" and name == "masked_scores":  # JSON has null for minus infinity
                given[np.isnan(given)] = -np.inf
            np.testing.assert_allclose(given, array, rtol=1e-12, atol=1e-13, err_msg=f"{name} of {group}")


def decoded(fields: dict[str, Any], form: str) -> Decoded:
    if form in CODECS:
        return CODECS[form].decode(wire.write(fields, form), LIMIT)
    if form.startswith("gRPC"):
        message = messages.request(*oip.arrays_of(fields), raw=form == "gRPC, raw")
        return GRPCCodec(message.SerializeToString()).decode(b"", LIMIT)
    body, headers = oip.request_of(fields, form == "inference, binary", form == "inference, nested")
    return HTTPCodec(int(headers[oip.HEADER]) if headers else None).decode(body, LIMIT)


OF_INFERENCE = ("gRPC, raw", "gRPC, typed", "inference, binary", "inference, flat", "inference, nested")


@pytest.mark.parametrize("form", [*CODECS, *OF_INFERENCE])
def test_every_option_is_decoded_from_every_format(form: str) -> None:
    """The specification of a request with one option is that of its fields."""
    for name in UNUSUAL.keys() - OF_PYTHON:
        fields = as_fields(PLAIN._replace(**UNUSUAL[name]))
        specs = [make_spec_and_plan(one)[0] for one in (decoded(fields, form), Decoded(fields, frozenset()))]
        found, expected = (as_fields(spec._replace(untyped=frozenset())) for spec in specs)
        np.testing.assert_equal(found, expected, err_msg=name)
