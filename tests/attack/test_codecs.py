"""Every codec, driven from the table: good bodies parse, nasty ones cost no more than bounds.py says."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

import pytest

from tests.attack.bounds import MB, address_space, memory_bound, parse, peak_of_parsing
from tests.attack.corpus import TARGETS, bomb, nasty, seeds
from tests.attack.fuzz import fuzz
from tests.helpers.wire import NPZ

# For each codec in CI.
SECONDS = 15
FEWEST = 1000


@pytest.mark.parametrize("media_type", TARGETS)
def test_seeds_are_good(media_type: str) -> None:
    """Else fuzzing would begin where bodies are refused already."""
    for body in seeds(media_type):
        with address_space(memory_bound(TARGETS[media_type], len(body))):
            assert parse(TARGETS[media_type], body)


def nasties() -> Iterator[tuple[str, str, Callable[[], bytes]]]:
    for media_type in TARGETS:
        for name, make in nasty(media_type).items():
            yield media_type, name, make


@pytest.mark.parametrize(
    ("media_type", "name", "make"), list(nasties()), ids=lambda part: part if isinstance(part, str) else ""
)
def test_nasty_bodies_cost_no_more_than_others(media_type: str, name: str, make: Callable[[], bytes]) -> None:
    codec, body = TARGETS[media_type], make()
    assert peak_of_parsing(codec, body) < memory_bound(codec, len(body))


def test_bombs_pack_as_much_as_deflate_can() -> None:
    """Deflate alone gets to a thousand to one, and members in one place to ten thousand."""
    content = bomb(2**30)
    assert 2**30 / len(content) > 1000
    many = nasty(NPZ)["200 members, 2 GB in one place"]()
    assert 200 * 10 * MB / len(many) > 10_000


@pytest.mark.skipif(sys.version_info >= (3, 14) or sys.platform != "linux", reason="atheris is not made for it")
@pytest.mark.parametrize("media_type", TARGETS)
def test_mutated_bodies(media_type: str) -> None:
    executed, wrong = fuzz(media_type, 1_000_000, SECONDS, seed=sum(media_type.encode()))
    assert wrong == ""
    assert executed >= FEWEST
