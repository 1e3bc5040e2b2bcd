"""Run random configurations of a peer, reproducibly."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings

from tests.peers.peers import PEERS, Config, ratio


def run(name: str, examples: int, first_seed: int) -> tuple[int, float]:
    """Compare us with a peer on `examples` configurations; returns their number and the largest ratio to the tolerance.

    Asserts that no ratio exceeds 1; hypothesis reports the smallest configuration that fails.
    """
    peer = PEERS[name]
    ran: list[float] = []

    def check(config: Config) -> None:
        found = ratio(peer, config)
        ran.append(found)
        assert found <= 1, f"{name}: {found:.3g} times what is allowed"

    test: Any = given(config=peer.configs)(check)
    test = settings(
        max_examples=examples,
        deadline=None,
        database=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )(test)
    seed(first_seed)(test)()
    return len(ran), max(ran)
