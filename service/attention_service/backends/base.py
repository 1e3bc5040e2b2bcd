"""What a backend is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from typing import ClassVar, Self

import numpy as np

from attention_service.attention.operands import Operands, make_operands
from attention_service.attention.plan import Plan
from attention_service.attention.result import Computed, Result, make_result
from attention_service.attention.spec import AttentionSpec
from attention_service.backends.threads import TilePool

# Called before each tile; raises to end a computation.
Check = Callable[[], None]
# See `Backend.program`.
Program = Callable[[Mapping[str, np.ndarray], Check | None], Result]


def no_check() -> None:
    """Do nothing: the check of a computation that is not ended before its time."""


class OutOfMemory(MemoryError):
    """Raised if the memory of the machine or of a device is not enough.

    needed: bytes, by an estimate; available: bytes that there are, None if that is not known
    """

    def __init__(self, needed: int, available: int | None = None) -> None:
        super().__init__(f"about {needed} bytes needed, {available} available")
        self.needed = needed
        self.available = available


class Backend(ABC):
    """Computes plans with one array library.

    To add one write a subclass and put it into attention_service.backends.registry.BACKENDS.

    threads: number of threads to compute with; None leaves the threads of the process as they are
    pool: threads for independent parts of a computation; None for the calling thread alone
    lost: True once this process can no longer use a device, until it is started anew
    is_remote: True if other machines compute: estimates may wait for them, and change with them
    """

    name: ClassVar[str]
    is_remote: ClassVar[bool] = False
    lost: bool = False

    def __init__(self, threads: int | None = None) -> None:
        self.threads = threads
        self.pool: TilePool | None = None

    # Overflow is found by checking the numbers, with an error that says what to do; a warning would add nothing.
    @np.errstate(all="ignore")
    def run(
        self, plan: Plan, spec: AttentionSpec, sources: Mapping[str, np.ndarray], check: Check | None = None
    ) -> Result:
        """The result of a plan for the numbers of a request.

        sources: the fields that query, key and value come from

        Errors: InvalidRequest, MemoryError, and what `check` raises.
        """
        operands = make_operands(spec, plan, sources)
        return make_result(plan, self.execute(plan, operands, spec.device, check or no_check))

    def cut_for(self, workers: int) -> Self:
        """This backend with plans cut as for so many threads, so that no bits depend on how many it has."""
        return self

    def program(self, plan: Plan, spec: AttentionSpec) -> Program:
        """`run` for one plan, as a function of sources and check, which may do once what depends on the plan alone.

        It should be kept no longer than the plan.
        """
        return partial(self.run, plan, spec)

    @abstractmethod
    def execute(self, plan: Plan, operands: Operands, device: str, check: Check = no_check) -> Computed:
        """Compute all that the plan includes, from operands that were made for it.

        Errors: Overflow if a visible score is not finite, UnknownBackend for a device that is not there, MemoryError,
        and what `check` raises.
        """

    @abstractmethod
    def peak_bytes(self, plan: Plan, device: str, copied: int) -> int:
        """Upper bound of the machine's memory for computing a plan, beyond the arrays of the request, in bytes.

        The results are included; the memory of a GPU is not. copied: bytes of arrays of the request that are cast, see
        `cost.copied_bytes`

        Errors: UnknownBackend.
        """

    def is_gpu(self, device: str) -> bool:
        """True if the device is a GPU, which a thread waits for. Errors: UnknownBackend."""
        return False

    def warm_up(self, device: str) -> None:  # noqa: B027  # most backends have nothing to load
        """Load everything that the first request would otherwise wait for."""
