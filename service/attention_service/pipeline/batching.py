"""Dynamic batching: small requests with the same options are computed in one launch.

A GPU takes as long for one small attention as for a hundred. Requests of a bucket have the same plan and differ in
their numbers. Each becomes more entries of the batch axis, and none changes the result of another.

While no batch is being computed, a request is computed at once, with those that arrived in the same turn of the event
loop. Otherwise it waits until no batch is being computed, but no longer than the window.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from typing import Final, NamedTuple, TypeVar

import numpy as np
from anyio import to_thread

from attention_service.attention import merging
from attention_service.attention.operands import Operands, make_operands
from attention_service.attention.result import Result, make_result
from attention_service.errors import ServiceError
from attention_service.pipeline.admission import AdmissionController, Lease
from attention_service.pipeline.attention import PreparedRequest
from attention_service.pipeline.deadline import Cancelled, Deadline
from attention_service.pipeline.execution import Execution
from attention_service.pipeline.operation import Cost, choose_strategy

# Requests of a batch: with so many, the time around a launch is small beside that of the requests themselves.
MAX_BATCH: Final = 256

ResultOrError = Result | Exception
T = TypeVar("T")


class Member(NamedTuple):
    """One request of a batch. result: set when it is computed"""

    request: PreparedRequest
    execution: Execution
    result: asyncio.Future[Result]


class Batch:
    """Requests that will be computed in one launch.

    bucket: key of what they have in common: plan, backend and device; memory: upper bound for one member, in bytes
    deadline: the latest deadline of the members, set by `close`; cancelled when no member waits any more
    """

    def __init__(self, bucket: Hashable, request: PreparedRequest) -> None:
        self.bucket = bucket
        self.plan = request.shared.plan
        self.backend, self.device = request.shared.backend, request.shared.spec.device
        self.memory = self.backend.peak_bytes(self.plan, self.device)
        self.members: list[Member] = []
        self.timer: asyncio.Handle | None = None
        self.deadline = Deadline(0)

    @property
    def cost(self) -> Cost:
        """What it costs to compute all requests, of which the results are encoded one by one."""
        count = len(self.members)
        flops, memory = self.plan.flops * count, self.memory * count
        return Cost(flops, memory, 0, waits_for_gpu=self.backend.is_gpu(self.device))

    def close(self) -> None:
        """Accept no more requests."""
        if self.timer is not None:
            self.timer.cancel()
        self.deadline = Deadline(max(member.execution.deadline.left for member in self.members))
        self._pending = len(self.members)
        for member in self.members:
            member.result.add_done_callback(self._count_down)

    def _count_down(self, _: asyncio.Future[Result]) -> None:
        """Cancel the deadline when no request waits for its result any more."""
        self._pending -= 1
        if not self._pending:
            self.deadline.cancel()

    def begin(self) -> list[Member]:
        """The requests that still wait, after noting that computing begins."""
        members = [member for member in self.members if not member.result.done()]
        for member in members:
            member.execution.timings.begin_batch(len(members))
        return members


class Batcher:
    """Computes small requests in batches.

    window: seconds that a request waits for others
    admission: grants a slot to each batch that needs a worker thread
    inline_flops: see `choose_strategy`

    Belongs to one event loop; all methods but `_compute` run in its thread.
    """

    def __init__(self, window: float, admission: AdmissionController, inline_flops: int) -> None:
        self._window = window
        self._admission = admission
        self._inline_flops = inline_flops
        self._open: dict[Hashable, Batch] = {}  # by bucket
        self._running: set[asyncio.Task[None]] = set()
        self.on_batch: Callable[[int], None] = lambda size: None  # called for each batch of more than one request

    async def compute(self, request: PreparedRequest, execution: Execution) -> Result:
        """The result of a request, computed in a batch with others of its bucket.

        Errors: those of the request; Busy, Cancelled, TimeLimit.
        """
        result: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._add(Member(request, execution, result))
        return await execution.deadline.wait(result)

    def _add(self, member: Member) -> None:
        """Add a request to the open batch of its bucket, or to a new one."""
        request, (spec, plan, backend, *_) = member.request, member.request.shared
        bucket = id(backend), spec.device, id(plan)
        batch = self._open.get(bucket)
        if batch is None:
            loop = asyncio.get_running_loop()
            batch = self._open[bucket] = Batch(bucket, request)
            batch.timer = loop.call_later(self._window if self._running else 0, self._start, batch)
        batch.members.append(member)
        if len(batch.members) == MAX_BATCH:
            self._start(batch)

    def _start(self, batch: Batch) -> None:
        """Close a batch and compute it."""
        del self._open[batch.bucket]
        batch.close()
        if choose_strategy(batch.cost, self._inline_flops, is_idle=False) == "inline":
            members = batch.begin()
            self._set_outcomes(members, *self._compute(batch, members))
            return
        task = asyncio.create_task(self._run_in_thread(batch))
        self._running.add(task)
        task.add_done_callback(self._end)

    def _end(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if not self._running:  # open batches have no other to wait for
            for batch in list(self._open.values()):
                self._start(batch)

    async def _run_in_thread(self, batch: Batch) -> None:
        """Compute in a worker thread, when a slot is granted. Its requests hold the memory that it takes."""
        try:
            with Lease(self._admission) as lease:
                await lease.grow(0, batch.deadline, slot=True)
                members = batch.begin()
                self._set_outcomes(members, *await to_thread.run_sync(self._compute, batch, members))
        except Exception as error:
            self._set_outcomes(batch.members, [error] * len(batch.members), 0)

    def _set_outcomes(self, members: list[Member], outcomes: list[ResultOrError], batched: int) -> None:
        """Set the results of all requests that were not cancelled. batched: how many were computed in one launch"""
        if batched:
            self.on_batch(batched)
        for member, outcome in zip(members, outcomes, strict=True):
            if member.result.done():  # its client has disconnected
                continue
            if isinstance(outcome, Exception):
                member.result.set_exception(outcome)
            else:
                member.result.set_result(outcome)

    # Overflow is found by looking at the numbers, as where one request is computed by itself.
    @np.errstate(all="ignore")
    def _compute(self, batch: Batch, members: list[Member]) -> tuple[list[ResultOrError], int]:
        """The outcome of each request, and how many were computed in one launch. May run in a thread."""
        if len(members) == 1:
            return [_compute_alone(members[0])], 0
        prepared = [_outcome(_operands, member) for member in members]
        operands = [one for one in prepared if isinstance(one, Operands)]
        if len(operands) > 1:
            with suppress(ServiceError, MemoryError, Cancelled):  # which request caused it is found below
                results = iter(_compute_batch(batch, operands))
                return [one if isinstance(one, Exception) else next(results) for one in prepared], len(operands)
        return [
            one if isinstance(one, Exception) else _compute_alone(member)
            for member, one in zip(members, prepared, strict=True)
        ], 0


def _outcome(function: Callable[[Member], T], member: Member) -> T | Exception:
    """The result of a function for one request, or the exception that it raises."""
    try:
        return function(member)
    except Exception as error:
        return error


def _compute_alone(member: Member) -> ResultOrError:
    program, sources, check = member.request.shared.program, member.request.sources, member.execution.deadline.check
    return _outcome(lambda _: program(sources, check), member)


def _operands(member: Member) -> Operands:
    """The operands of one request. Errors: InvalidRequest, and those of its deadline."""
    member.execution.deadline.check()
    return make_operands(member.request.shared.spec, member.request.shared.plan, member.request.sources)


def _compute_batch(batch: Batch, operands: Sequence[Operands]) -> list[Result]:
    """The result for the operands of each request, computed in one launch. Errors: those of any of them."""
    count = len(operands)
    plan = merging.merge(batch.plan, count)
    computed = batch.backend.execute(plan, merging.merge_operands(operands), batch.device, batch.deadline.check)
    return [make_result(batch.plan, part) for part in merging.split(computed, count)]
