"""From a body to a job: read by a codec and planned, at once where that is quick, else in a thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from anyio import to_thread

from service.codecs.decoded import Body, Decoded
from service.engine import Call, Engine
from service.jobs import Job, make_job
from service.schemas.request import AttentionRequest


class Reader(Protocol):
    """What reads a body, like a codec."""

    @property
    def effort(self) -> int:
        """How many times the memory of a body is used while it is read, at most."""
        ...

    @property
    def inline(self) -> int:
        """Bytes of a body that are read in well below a millisecond."""
        ...

    @property
    def quick(self) -> Callable[[Body], Decoded | None]:
        """Reads a longer one at once, if that takes as long as a thread would keep others waiting; else gives None."""
        ...

    @property
    def packed(self) -> bool:
        """Whether a body is unpacked, no further than a limit."""
        ...

    @property
    def decode(self) -> Callable[[Body, int], Decoded]:
        """From bytes, and to how many they may unpack, to values. Errors: ServiceError of every kind."""
        ...

    def memory(self, length: int, limit: int) -> int:
        """Bytes for a body of this length and its arrays, which are unpacked up to a limit."""
        ...


def read(model: type[AttentionRequest], reader: Reader, body: Body, call: Call, limit: int) -> tuple[Job, Decoded]:
    """What a body asks for, and what it held. Errors: ServiceError of every kind."""
    decoded = reader.decode(body, limit)
    return plan(model, decoded, call), decoded


def plan(model: type[AttentionRequest], decoded: Decoded, call: Call) -> Job:
    """What the fields ask for that have been read. Errors: InvalidRequest."""
    call.timings.step("decode")
    job = make_job(model, decoded)
    call.timings.step("plan")
    return job


async def read_in_thread(
    model: type[AttentionRequest], reader: Reader, body: Body, call: Call, engine: Engine, limit: int
) -> Job:
    """The same, when there is a place and memory for it. Errors: Busy and Abandoned besides."""
    with await engine.work.enter(min(reader.effort * len(body), engine.work.memory), call.stop):
        call.timings.step("queue")
        job, decoded = await to_thread.run_sync(read, model, reader, body, call, limit)
    call.keep(len(body) + decoded.nbytes)
    return job
