"""Steps of the pipeline by themselves: deadline, timings, decoding, files of commands, execution strategy.

test_operations.py holds the whole path of a request (run.py); admission, attention, layers and prepare have modules of
their own.
"""

from __future__ import annotations

import asyncio
import math
import time
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

from attention_service.codecs.base import Codec
from attention_service.codecs.safetensors import request_bytes
from attention_service.codecs.table import CODECS
from attention_service.commands.files import read_arrays, read_request, write_request
from attention_service.comparison.actual import NAMES
from attention_service.errors import InvalidTensors, NotAcceptable, TimeLimit, UnsupportedMediaType
from attention_service.pipeline.admission import AdmissionController
from attention_service.pipeline.deadline import Cancelled, Deadline
from attention_service.pipeline.decode import decode, oversized_body
from attention_service.pipeline.execution import Execution, Timings
from attention_service.pipeline.operation import Cost, choose_strategy
from attention_service.settings import Settings


class Clock:
    """Takes the place of the clocks of `time`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        for name in ("monotonic", "perf_counter"):
            monkeypatch.setattr(time, name, lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_a_deadline_passes_after_its_seconds(clock: Clock) -> None:
    deadline = Deadline(2.5)
    clock.now += 1
    assert deadline.left == 1.5
    clock.now += 1.5
    deadline.check()
    clock.now += 0.25
    with pytest.raises(TimeLimit, match=r"at most 2\.5 s"):
        deadline.check()
    assert deadline.left == 0


def test_a_deadline_that_is_restarted_counts_what_was_used(clock: Clock) -> None:
    deadline = Deadline(2.0)
    clock.now += 60
    deadline.restart()
    assert deadline.left == 2
    deadline.restart(used=1.5)
    assert deadline.left == 0.5


def test_cancelling_ends_what_a_request_waits_for_and_its_computation() -> None:
    async def main() -> None:
        deadline = Deadline(60)
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_soon(deadline.cancel)
        with pytest.raises(Cancelled):
            await deadline.wait(future)
        assert future.cancelled()
        with pytest.raises(Cancelled):
            deadline.check()

    asyncio.run(main())


def test_timings_are_the_seconds_of_each_step(clock: Clock) -> None:
    timings = Timings()
    timings.begin()
    for step, seconds in (("decode", 0.5), ("queue", 0.25), ("compute", 2.0), ("decode", 0.125)):
        clock.now += seconds
        timings.step(step)  # type: ignore[arg-type]
    assert (timings.decode, timings.prepare, timings.queue, timings.compute) == (0.625, 0, 0.25, 2)
    assert timings.header() == "decode;dur=625.000, prepare;dur=0.000, queue;dur=250.000, compute;dur=2000.000"
    clock.now += 0.5
    timings.step("encode")
    assert timings.header().endswith(", compute;dur=2000.000, encode;dur=500.000")


@pytest.mark.parametrize(
    ("memory", "workers", "fits"), [("2GiB", 1, True), ("1GiB", 1, False), ("2GiB", 2, False), ("64MiB", 1, False)]
)
def test_a_budget_that_the_largest_body_does_not_fit_is_said_at_start(memory: str, workers: int, fits: bool) -> None:
    """64 MiB of `1,1,1`: simdjson's copy, a mark and a tape entry for each of 32 Mi numbers take 1.2 GiB and more."""
    warning = oversized_body(Settings(memory_limit=memory, workers=workers))
    assert (warning is None) == fits
    if warning is not None:
        assert warning.startswith("ATTENTION_MEMORY_LIMIT: ")
        assert "64.0MiB (ATTENTION_MAX_BODY_BYTES)" in warning
    assert oversized_body(Settings(memory_limit="256MiB", max_body_bytes="1MiB")) is None


# What docs/operations.md says of small and large requests.
FLOPS: Final = 1000
SMALL: Final = Cost(FLOPS, 8 * 2**20, 0)


LISTS: Final = b"[[1],[2]," + b"[3],[4,5]," * 20_000 + b"[6]]"  # no rectangle, and too many for the event loop


@pytest.mark.parametrize(
    ("codec", "body", "most"),
    [
        (CODECS["application/json"], b'{"query":[' + b"1.5," * 200_000 + b"1.5]}", 2 * 8 * 200_001),
        (CODECS["application/vnd.safetensors"], request_bytes({"query": np.zeros(10**6)}), 2 * 8 * 10**6),
        (CODECS["application/json"], b'{"query":' + LISTS + b"}", None),
    ],
    ids=["quick JSON", "quick safetensors", "slow JSON"],
)
def test_the_bound_of_decoding_is_not_held_afterwards(codec: Codec, body: bytes, most: int | None) -> None:
    async def main() -> int:
        running = Execution(AdmissionController(2, 2**30, 9), 60)
        with running.lease:
            running.lease.begin()
            await decode(codec, body, 2**26, running)
            return running.lease.memory

    expected = codec.decode_bytes(body, 2**26) if most is None else most + 10_000
    assert asyncio.run(main()) <= expected < codec.decode_bound(len(body), 2**26)


@pytest.mark.parametrize(
    ("cost", "is_idle", "strategy"),
    [
        (SMALL, False, "inline"),
        (SMALL._replace(compute=8 * 2**20 + 1), True, "thread"),
        (SMALL._replace(flops=FLOPS + 1), False, "thread"),
        (SMALL._replace(flops=20 * FLOPS), True, "inline"),
        (SMALL._replace(flops=20 * FLOPS + 1), True, "thread"),
        (SMALL._replace(flops=math.inf), True, "thread"),
        (SMALL._replace(waits_for_gpu=True), True, "thread"),
    ],
)
def test_the_execution_strategy_follows_from_the_cost(cost: Cost, is_idle: bool, strategy: str) -> None:
    assert choose_strategy(cost, FLOPS, is_idle=is_idle) == strategy


ROWS: Final = np.array([[1, 2], [3, 4.5]], np.float32)
FIELDS: Final[dict[str, Any]] = {"query": ROWS, "projection": {"key": {"weight": ROWS}}, "scale": 0.5}


@pytest.mark.parametrize("suffix", [".json", ".npz", ".safetensors"])
def test_a_request_in_a_file_has_the_fields_that_were_written(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"request{suffix}"
    write_request(FIELDS, path)
    fields = read_request(path).fields
    assert fields.get("dtype", "float32") == "float32"
    assert fields["scale"] == 0.5
    for array in (fields["query"], fields["projection"]["key"]["weight"]):
        np.testing.assert_array_equal(array, ROWS)


def test_files_of_other_formats_are_refused(tmp_path: Path) -> None:
    (tmp_path / "request.csv").write_text("1, 2")
    for function in (read_request, lambda path: read_arrays(path, NAMES), lambda path: write_request(FIELDS, path)):
        with pytest.raises(UnsupportedMediaType, match=r"\.json, \.npz, \.safetensors"):
            function(tmp_path / "request.csv")
    with pytest.raises(NotAcceptable, match="bfloat16"):
        write_request({"query": ROWS.astype("bfloat16")}, tmp_path / "request.npz")


def test_a_file_with_one_array_holds_the_output(tmp_path: Path) -> None:
    np.save(tmp_path / "output.npy", ROWS)
    (tmp_path / "output.json").write_text("[[1, 2], [3, 4.5]]")
    for name in ("output.npy", "output.json"):
        arrays = read_arrays(tmp_path / name, NAMES)
        assert arrays.keys() == {"output"}
        np.testing.assert_array_equal(arrays["output"], ROWS)
    (tmp_path / "output.npy").write_bytes(b"no array")
    with pytest.raises(InvalidTensors, match="in the format of npy"):
        read_arrays(tmp_path / "output.npy", NAMES)
