"""What the tests of images share."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.conftest import uncaptured


@pytest.fixture
def report(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Prints a figure, whatever pytest captures."""

    def show(line: str) -> None:
        with uncaptured(request):
            print(f"\n{line} ", end="", flush=True)

    return show
