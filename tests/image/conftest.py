"""Fixtures of the tests of the image."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.conftest import uncaptured


@pytest.fixture
def report(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """A function that prints a line, also if pytest captures output."""

    def show(line: str) -> None:
        with uncaptured(request):
            print(f"\n{line} ", end="", flush=True)

    return show
