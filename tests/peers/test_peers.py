"""Both backends agree with each peer on at least 100 random configurations."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.conftest import uncaptured
from tests.peers.peers import PEERS
from tests.peers.run import run

EXAMPLES = 100
SEED = int(os.environ.get("PEERS_SEED", "20261121"))


@pytest.fixture(scope="module")
def table(request: pytest.FixtureRequest) -> Iterator[list[str]]:
    lines: list[str] = []
    yield lines
    with uncaptured(request):
        print(f"\n\nrandom configurations, seed {SEED}: worst deviation as a part of what is allowed")
        print("\n".join(lines))


@pytest.mark.filterwarnings("ignore:.*:UserWarning", "ignore:.*:DeprecationWarning", "ignore:.*:FutureWarning")
@pytest.mark.parametrize("name", PEERS)
def test_random_configurations_agree_with_the_peer(name: str, table: list[str]) -> None:
    count, worst = run(name, EXAMPLES, SEED)
    table.append(f"  {name:28} {count:6} {worst:.3f}")
    assert count >= EXAMPLES
