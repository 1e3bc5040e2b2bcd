"""gRPC's own client of health checks, as probes of Kubernetes and of Envoy ask."""

from __future__ import annotations

import json
from collections.abc import Iterator

import grpc
import pytest
from grpc_health.v1 import health_pb2 as messages
from grpc_health.v1.health_pb2_grpc import HealthStub

from attention_service.codecs.oip.messages import SERVICE
from attention_service.settings.keys import new_key
from tests.helpers.rpc import Remote, remote

KEY, HASH = new_key()


@pytest.fixture(scope="module")
def server() -> Iterator[Remote]:
    """A service that requires an API key for all but health."""
    with remote(api_keys=HASH) as server:
        yield server


@pytest.mark.parametrize("name", ["", "inference.GRPCInferenceService", "attention"])
def test_a_service_that_is_ready_is_serving(name: str, server: Remote) -> None:
    answer = HealthStub(server.channel).Check(messages.HealthCheckRequest(service=name), timeout=600)
    assert answer.status == messages.HealthCheckResponse.SERVING


def test_a_service_that_stops_is_not_serving(server: Remote) -> None:
    server.app.state.engine.stopping = True
    try:
        answer = HealthStub(server.channel).Check(messages.HealthCheckRequest(), timeout=600)
    finally:
        server.app.state.engine.stopping = False
    assert answer.status == messages.HealthCheckResponse.NOT_SERVING


def test_to_watch_is_not_implemented(server: Remote) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        next(HealthStub(server.channel).Watch(messages.HealthCheckRequest(), timeout=600))
    assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED


def test_a_client_that_balances_by_health_is_answered(server: Remote) -> None:
    """It watches without a key, and takes a service that has no Watch, but no other that refuses, as healthy."""
    balanced = {"loadBalancingConfig": [{"round_robin": {}}], "healthCheckConfig": {"serviceName": ""}}
    options = [("grpc.service_config", json.dumps(balanced))]
    metadata = (("authorization", f"Bearer {KEY}"),)
    with grpc.insecure_channel(f"127.0.0.1:{server.app.state.rpc.port}", options) as channel:
        ready = channel.unary_unary(f"/{SERVICE}/ServerReady")
        assert ready(b"", metadata=metadata, wait_for_ready=True, timeout=120) == b"\x08\x01"
