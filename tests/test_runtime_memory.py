"""Free memory is returned to the system, each case in a process of its own, whose heap nobody else uses."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from attention_service.runtime.memory import resident

MB = 2**20
# The process frees 96 MiB in 1,024 blocks, but for every 64th of them, so that none of it is at the end of the heap.
SCRIPT = """
import asyncio, json
import attention_service.runtime.memory
from attention_service.runtime.memory import FreeMemory, resident, reuse_memory

reuse_memory()
attention_service.runtime.memory.IDLE = {idle}
allowed, held = {allowed}, {held}
memory = FreeMemory(allowed, lambda: held)
idle = resident()
blocks = [bytearray(96 * 1024) for _ in range(1024)]
full = resident()
blocks = blocks[::64]
freed = resident()

async def main():
    memory.check_soon()
    memory.check_soon()
    await asyncio.sleep(0.5)

asyncio.run(main())
print(json.dumps([number / 2**20 for number in (idle, full, freed, resident())]))
"""


def run(allowed: int, held: int, idle: float = 10) -> list[float]:
    """Resident MiB when idle, with all blocks, after freeing, and half a second later. idle: seconds, see IDLE"""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(allowed=allowed, held=held, idle=idle)],
        capture_output=True,
        text=True,
        check=True,
    )
    numbers: Any = json.loads(done.stdout)
    return list(numbers)


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(resident() is None, reason="the system does not tell how much memory a process has"),
]


def test_free_memory_is_returned_once_there_is_too_much() -> None:
    idle, full, freed, checked = run(allowed=16 * MB, held=0)
    assert full - idle > 90
    assert freed - idle > 80, "without holes there is nothing to show"
    assert checked - idle < 16


@pytest.mark.parametrize(("allowed", "held"), [(128 * MB, 0), (16 * MB, 96 * MB)])
def test_memory_that_is_allowed_or_held_is_kept(allowed: int, held: int) -> None:
    idle, _, freed, checked = run(allowed, held)
    assert checked - idle > 80
    assert abs(checked - freed) < 4


def test_all_is_returned_when_no_request_comes() -> None:
    idle, _, freed, checked = run(allowed=128 * MB, held=0, idle=0.1)
    assert freed - idle > 80
    assert checked - idle < 16


def test_nothing_is_returned_while_a_request_is_computed() -> None:
    idle, _, _, checked = run(allowed=128 * MB, held=1, idle=0.1)
    assert checked - idle > 80
