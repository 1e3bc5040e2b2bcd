"""Every codec decodes valid bodies, and stays within the bounds of bounds.py for hostile and mutated ones."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

import pytest

from tests.attack.bounds import MB, address_space, memory_bound, parse, peak_of_parsing
from tests.attack.corpus import TARGETS, bomb, hostile_bodies, seeds
from tests.attack.fuzz import fuzz
from tests.helpers.wire import NPZ

# Executions of each codec. `make fuzz` takes hours.
RUNS = 2000


@pytest.mark.parametrize("media_type", TARGETS)
def test_seeds_are_valid(media_type: str) -> None:
    """Fuzzing must start from bodies that the codecs accept."""
    for body in seeds(media_type):
        with address_space(memory_bound(TARGETS[media_type], len(body))):
            assert parse(TARGETS[media_type], body)


def all_hostile_bodies() -> Iterator[tuple[str, str, Callable[[], bytes]]]:
    for media_type in TARGETS:
        for name, make in hostile_bodies(media_type).items():
            yield media_type, name, make


@pytest.mark.parametrize(
    ("media_type", "name", "make"), list(all_hostile_bodies()), ids=lambda part: part if isinstance(part, str) else ""
)
def test_hostile_bodies_stay_within_the_bounds(media_type: str, name: str, make: Callable[[], bytes]) -> None:
    codec, body = TARGETS[media_type], make()
    assert peak_of_parsing(codec, body) < memory_bound(codec, len(body))


def test_bombs_have_the_highest_compression_ratios() -> None:
    """Deflate reaches a thousand to one, and 200 members that share the same bytes reach ten thousand to one."""
    content = bomb(2**30)
    assert 2**30 / len(content) > 1000
    many = hostile_bodies(NPZ)["200 members, 2 GB in one place"]()
    assert 200 * 10 * MB / len(many) > 10_000


@pytest.mark.skipif(sys.version_info >= (3, 14) or sys.platform != "linux", reason="atheris is not made for it")
@pytest.mark.parametrize("media_type", TARGETS)
def test_mutated_bodies_raise_only_service_errors(media_type: str) -> None:
    executed, wrong = fuzz(media_type, RUNS, 0, seed=sum(media_type.encode()))
    assert wrong == ""
    assert executed >= RUNS / 2  # it is told at times only
