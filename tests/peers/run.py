"""Run random configurations of a peer, reproducibly: drawn by hypothesis, or by seeds one after the other."""

from __future__ import annotations

from collections.abc import Callable
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


def run_seeds(name: str, ratio: Callable[[str, int], float], examples: int, first_seed: int) -> tuple[int, float]:
    """Compare so many configurations; returns their number and the largest ratio. Asserts that none exceeds 1.

    ratio: of a deviation to what is allowed, by the name and the seed of a configuration
    """
    worst = 0.0
    for number in range(first_seed, first_seed + examples):
        found = ratio(name, number)
        assert found <= 1, f"{name}, seed {number}: {found:.3g} times what is allowed"
        worst = max(worst, found)
    return examples, worst
