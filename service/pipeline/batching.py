"""Dynamic batching: small requests with the same options are computed in one launch.

A GPU takes as long for one small attention as for a hundred. Requests of a group differ in their numbers and lengths
only: each becomes one more entry of the batch axis, padded where it is shorter, and none changes another's result.

While no batch is being computed, a request is computed at once, with those that arrived in the same turn of the event
loop. Otherwise it waits until the batch before it is done, but no longer than the window.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from typing import Final, NamedTuple

import numpy as np
from anyio import to_thread

from service.attention import merging
from service.attention.operands import Operands, make_operands
from service.attention.plan import Plan
from service.attention.result import Result, make_result
from service.backends.base import Backend
from service.errors import ServiceError
from service.pipeline.admission import AdmissionController
from service.pipeline.deadline import Cancelled, Deadline
from service.pipeline.execution import Execution
from service.pipeline.preparation import PreparedRequest

# Requests of a batch: with so many, the time around a launch is small beside that of the requests themselves.
MOST: Final = 256

Outcome = Result | Exception
# What computes one request by itself.
Alone = Callable[[PreparedRequest, Backend, Deadline], Result]


class Member(NamedTuple):
    """One request of a batch. begin: called with the size of the batch when computing begins; turn: its outcome"""

    request: PreparedRequest
    deadline: Deadline
    begin: Callable[[int], None]
    turn: asyncio.Future[Result]


class Group:
    """Requests that will be computed in one batch.

    kind: key of the options that they share; entry: a plan with the lengths that all of them are padded to
    memory: bytes that one of them takes then, at most
    """

    def __init__(self, kind: Hashable, executor: Backend, device: str, entry: Plan, memory: int) -> None:
        self.kind = kind
        self.executor = executor
        self.device = device
        self.entry = entry
        self.memory = memory
        self.members: list[Member] = []
        self.timer: asyncio.Handle | None = None

    @property
    def flops(self) -> int:
        """Operations of all of them."""
        return self.entry.flops * len(self.members)

    def with_another(self, plan: Plan, memory: int) -> tuple[Plan, int]:
        """What entry and memory would be with a request of this plan, and this memory."""
        if plan is self.entry:
            return plan, max(self.memory, memory)
        entry = merging.padded(self.entry, plan)
        before, alone, after = (self.executor.peak_bytes(one, self.device) for one in (self.entry, plan, entry))
        return entry, after + max(self.memory - before, memory - alone)

    def begin(self) -> list[Member]:
        """Those who still wait, told that it begins."""
        members = [member for member in self.members if not member.turn.done()]
        for member in members:
            member.begin(len(members))
        return members


class Batcher:
    """Computes small requests in batches.

    window: seconds that a request waits for others; admission: grants a slot and memory to each batch
    inline_flops: operations of a batch that is computed in the event loop; larger ones, and a GPU's, in a worker thread
    alone: computes one request by itself
    on_batch: called with the number of requests of each batch of more than one

    Belongs to one event loop; all methods but `_compute` run in its thread.
    """

    def __init__(
        self, window: float, admission: AdmissionController, inline_flops: int, alone: Alone, *, padding: bool
    ) -> None:
        self._padding = padding
        self._window = window
        self._admission = admission
        self._inline_flops = inline_flops
        self._alone = alone
        self._gathering: dict[Hashable, Group] = {}
        self._at_work: set[asyncio.Task[None]] = set()
        self.on_batch: Callable[[int], object] | None = None

    def takes(self, request: PreparedRequest, executor: Backend) -> bool:
        """True if a small request may be batched: others can have the same plan, and it is not answered at once.

        Not with `sum`, whose warnings are of one request.
        """
        shared = request.shared and merging.can_be_merged(request.plan)
        return shared and executor.gains_from_batching(request.plan, request.spec.device)

    async def attend(self, request: PreparedRequest, executor: Backend, memory: int, execution: Execution) -> Result:
        """Compute a request, in a batch if there are others of its kind. memory: bytes that computing it takes

        Errors: those of the request; Busy, Cancelled, TimeLimit.
        """
        turn: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        deadline = execution.deadline
        self._join(executor, memory, Member(request, deadline, execution.timings.begin_batch, turn))
        return await deadline.wait(turn)

    def _join(self, executor: Backend, memory: int, member: Member) -> None:
        plan, device = member.request.plan, member.request.spec.device
        kind = id(executor), device, merging.padding_key(plan) if self._padding else id(plan)
        group = self._gathering.get(kind)
        if group is not None:
            entry, needed = group.with_another(plan, memory)
            if needed * (len(group.members) + 1) <= self._admission.memory:
                group.entry, group.memory = entry, needed
            else:  # the others would be too long for all
                self._begin(group)
                group = None
        if group is None:
            loop = asyncio.get_running_loop()
            group = self._gathering[kind] = Group(kind, executor, device, plan, memory)
            wait = self._window if self._at_work else 0
            group.timer = loop.call_later(wait, self._begin, group) if wait else loop.call_soon(self._begin, group)
        group.members.append(member)
        count = len(group.members)
        if count == MOST or (count + 1) * group.memory > self._admission.memory:
            self._begin(group)

    def _begin(self, group: Group) -> None:
        """Nobody joins from now on."""
        del self._gathering[group.kind]
        assert group.timer is not None
        group.timer.cancel()
        if not group.executor.is_gpu(group.device) and group.flops <= self._inline_flops:
            members = group.begin()
            self._tell(members, *self._compute(group, members))
            return
        task = asyncio.create_task(self._run(group))
        self._at_work.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._at_work.discard(task)
        if not self._at_work:  # nobody is left to wait for
            for group in list(self._gathering.values()):
                self._begin(group)

    async def _run(self, group: Group) -> None:
        """Compute in a worker thread, when a slot and memory are granted."""
        memory = group.memory * len(group.members)
        try:
            with self._admission.admit(memory) as lease:
                await lease.grow(memory, _Longest(group.members), slot=True, compute=True)
                members = group.begin()
                self._tell(members, *await to_thread.run_sync(self._compute, group, members))
        except Exception as error:
            self._tell(group.members, [error] * len(group.members), 0)

    def _tell(self, members: list[Member], outcomes: list[Outcome], gathered: int) -> None:
        """Let all go on who are still there."""
        if gathered and self.on_batch is not None:
            self.on_batch(gathered)
        for member, outcome in zip(members, outcomes, strict=True):
            if member.turn.done():  # its client has disconnected
                continue
            if isinstance(outcome, Exception):
                member.turn.set_exception(outcome)
            else:
                member.turn.set_result(outcome)

    # Overflow is found by looking at the numbers, as where one request is computed by itself.
    @np.errstate(all="ignore")
    def _compute(self, group: Group, members: list[Member]) -> tuple[list[Outcome], int]:
        """The outcome of each, and how many were computed as one. May run in a thread."""
        if len(members) == 1:
            return [self._by_itself(members[0], group.executor)], 0
        prepared = [_prepare(member) for member in members]
        good = [(member, one) for member, one in zip(members, prepared, strict=True) if isinstance(one, Operands)]
        if len(good) > 1:
            with suppress(ServiceError, MemoryError, Cancelled):  # whose fault it was is found below
                results = iter(_together(group, *zip(*good, strict=True)))
                return [next(results) if isinstance(one, Operands) else one for one in prepared], len(good)
        return [
            self._by_itself(member, group.executor) if isinstance(one, Operands) else one
            for member, one in zip(members, prepared, strict=True)
        ], 0

    def _by_itself(self, member: Member, executor: Backend) -> Outcome:
        try:
            return self._alone(member.request, executor, member.deadline)
        except Exception as error:
            return error


class _Longest(Deadline):
    """Ends when every member has ended."""

    def __init__(self, members: Sequence[Member]) -> None:
        super().__init__(max((member.deadline.left for member in members), default=0.0))
        self._members = members

    def check(self) -> None:
        """Errors: Cancelled, whatever ended them."""
        for member in self._members:
            try:
                member.deadline.check()
            except (Cancelled, ServiceError):
                continue
            return
        raise Cancelled


def _prepare(member: Member) -> Operands | Exception:
    """The numbers of one request, or what is wrong with it."""
    request = member.request
    try:
        member.deadline.check()
        return make_operands(request.spec, request.plan, request.sources)
    except Exception as error:
        return error


def _together(group: Group, members: Sequence[Member], operands: Sequence[Operands]) -> list[Result]:
    """The result of each, computed as one. Errors: those of any of them."""
    plans = [member.request.plan for member in members]
    plan = merging.merge(plans)
    merged = merging.merge_operands(plan, operands)
    computed = group.executor.execute(plan, merged, group.device, _Longest(members).check)
    return [make_result(plan, part) for plan, part in zip(plans, merging.split(plans, computed), strict=True)]
