"""Execute: compute a prepared request in the thread of the caller."""

from __future__ import annotations

from service.attention.result import Result
from service.backends.base import OutOfMemory
from service.pipeline.admit import memory_limit_error
from service.pipeline.deadline import Deadline
from service.pipeline.prepare import PreparedRequest
from service.runtime.machine import memory_left


def execute(request: PreparedRequest, deadline: Deadline | None = None) -> Result:
    """The result of a prepared request. deadline: checked between tiles

    Errors: InvalidRequest, MemoryLimit; Cancelled and TimeLimit by the deadline.
    """
    spec, plan, sources, _, (backend, memory, _) = request
    check = None if deadline is None else deadline.check
    try:
        return backend.run(plan, spec, sources, check)
    except OutOfMemory as error:
        needed, available = error.needed, error.available
    except MemoryError:
        needed, available = memory, None
    if available is None:
        available = memory_left()
    raise memory_limit_error(plan, needed, available)
