"""Waiting at the gate."""

from __future__ import annotations

import asyncio

import pytest

from service.errors import Busy
from service.gate import Gate
from service.stop import Stop


class EarlyStop(Stop):
    """One whose time is not quite over when a timer for it rings, as those of an event loop may."""

    @property
    def left(self) -> float:
        return 0.001


def test_a_timer_that_rings_early_refuses_all_the_same() -> None:
    async def wait() -> None:
        gate = Gate(1, 100, 10)
        with await gate.enter(1, EarlyStop(1)):
            with pytest.raises(Busy):
                await gate.enter(1, EarlyStop(1))
            assert gate.waiting == 0

    asyncio.run(wait())
