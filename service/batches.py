"""Small requests of one kind that are at hand together, computed as one.

A GPU takes as long for one small attention as for a hundred, and so does what stands around it. Requests of one kind
differ in their numbers and in how many tokens they have, so that each is one more entry on the batch axis of all,
filled up where it is shorter: none changes another's.

Who comes while nothing is at work goes at once, with those that came in the same turn of the event loop. Who comes
while others are at work waits until these are done, or for the window: nobody waits where waiting gains nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from typing import Final, NamedTuple

import numpy as np
from anyio import to_thread

from service.attention import together
from service.attention.operands import Operands, make_operands
from service.attention.plan import Plan
from service.attention.result import Result, make_result
from service.backends import Executor
from service.errors import ServiceError
from service.gate import Gate
from service.jobs import Job
from service.stop import Abandoned, Stop

# Members of a batch: what is left of the time around a launch is then nothing to that of a request on its way.
MOST: Final = 256

Outcome = Result | Exception
# What computes one request by itself.
Alone = Callable[[Job, Executor, Stop], Result]


class Member(NamedTuple):
    """One request of a batch, and who waits for its outcome. begin: told how many there are when computing begins"""

    job: Job
    stop: Stop
    begin: Callable[[int], None]
    turn: asyncio.Future[Result]


class Group:
    """Requests of one kind.

    kind: under which they are gathered; executor, device: which compute them
    entry: a plan with the lengths that all of them are filled up to; memory: of one of them then, at most
    """

    def __init__(self, kind: Hashable, executor: Executor, device: str, entry: Plan, memory: int) -> None:
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
        entry = together.holding(self.entry, plan)
        before, alone, after = (self.executor.peak_bytes(one, self.device) for one in (self.entry, plan, entry))
        return entry, after + max(self.memory - before, memory - alone)

    def begin(self) -> list[Member]:
        """Those who still wait, told that it begins."""
        members = [member for member in self.members if not member.turn.done()]
        for member in members:
            member.begin(len(members))
        return members


class Batches:
    """Gathers small requests, and computes them together.

    window: seconds that one waits for others; work: the gate to places and memory
    inline_flops: operations that are computed in the event loop; more of them in a thread, and those on a GPU

    Belongs to one event loop, in whose thread all of this runs but for the computing.
    """

    def __init__(self, window: float, work: Gate, inline_flops: int, alone: Alone) -> None:
        self._window = window
        self._work = work
        self._inline_flops = inline_flops
        self._alone = alone
        self._gathering: dict[Hashable, Group] = {}
        self._at_work: set[asyncio.Task[None]] = set()
        self.batches = 0  # of more than one request
        self.requests = 0  # in these

    def takes(self, job: Job, executor: Executor) -> bool:
        """Whether a small request may wait for others: there may be some, and it would not be answered at once.

        Not where one request may be told of something that another one is not.
        """
        shared = job.shared and job.plan.normalization == "softmax"
        return shared and not executor.is_quick(job.plan, job.spec.device)

    async def attend(
        self, job: Job, executor: Executor, memory: int, stop: Stop, begin: Callable[[int], None]
    ) -> Result:
        """Compute, with others if there are some; memory: what one takes; begin: told how many when computing begins.

        Errors: those of the request; Busy, Abandoned, TimeLimit.
        """
        turn: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._join(executor, memory, Member(job, stop, begin, turn))
        stop.on_abandon = turn.cancel
        try:
            return await turn
        except asyncio.CancelledError:
            if stop.abandoned:
                raise Abandoned from None
            raise
        finally:
            stop.on_abandon = bool

    def _join(self, executor: Executor, memory: int, member: Member) -> None:
        plan, device = member.job.plan, member.job.spec.device
        kind = id(executor), device, together.kind(plan)
        group = self._gathering.get(kind)
        if group is not None:
            entry, needed = group.with_another(plan, memory)
            if needed * (len(group.members) + 1) <= self._work.memory:
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
        if count == MOST or (count + 1) * group.memory > self._work.memory:
            self._begin(group)

    def _begin(self, group: Group) -> None:
        """Nobody joins from now on."""
        del self._gathering[group.kind]
        assert group.timer is not None
        group.timer.cancel()
        if not group.executor.is_apart(group.device) and group.flops <= self._inline_flops:
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
        """Compute in a thread, when there is a place and memory."""
        try:
            with await self._work.enter(group.memory * len(group.members), _Longest(group.members)):
                members = group.begin()
                self._tell(members, *await to_thread.run_sync(self._compute, group, members))
        except Exception as error:
            self._tell(group.members, [error] * len(group.members), 0)

    def _tell(self, members: list[Member], outcomes: list[Outcome], gathered: int) -> None:
        """Let all go on who are still there."""
        self.batches += gathered > 0
        self.requests += gathered
        for member, outcome in zip(members, outcomes, strict=True):
            if member.turn.done():  # its client has hung up
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
            with suppress(ServiceError, MemoryError, Abandoned):  # whose fault it was is found below
                results = iter(_together(group, *zip(*good, strict=True)))
                return [next(results) if isinstance(one, Operands) else one for one in prepared], len(good)
        return [
            self._by_itself(member, group.executor) if isinstance(one, Operands) else one
            for member, one in zip(members, prepared, strict=True)
        ], 0

    def _by_itself(self, member: Member, executor: Executor) -> Outcome:
        try:
            return self._alone(member.job, executor, member.stop)
        except Exception as error:
            return error


class _Longest(Stop):
    """Ends when every member has ended."""

    def __init__(self, members: Sequence[Member]) -> None:
        super().__init__(max((member.stop.left for member in members), default=0.0))
        self._members = members

    def check(self) -> None:
        """Errors: Abandoned, whatever ended them."""
        for member in self._members:
            try:
                member.stop.check()
            except (Abandoned, ServiceError):
                continue
            return
        raise Abandoned


def _prepare(member: Member) -> Operands | Exception:
    """The numbers of one request, or what is wrong with it."""
    job = member.job
    try:
        member.stop.check()
        return make_operands(job.spec, job.plan, job.sources)
    except Exception as error:
        return error


def _together(group: Group, members: Sequence[Member], operands: Sequence[Operands]) -> list[Result]:
    """The result of each, computed as one. Errors: those of any of them."""
    plans = [member.job.plan for member in members]
    plan = together.merge(plans)
    merged = together.merge_operands(plan, operands)
    computed = group.executor.execute(plan, merged, group.device, _Longest(members).check)
    return [make_result(plan, part) for plan, part in zip(plans, together.split(plans, computed), strict=True)]
