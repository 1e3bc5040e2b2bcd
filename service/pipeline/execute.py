"""Execute plans on a backend, in the thread of the caller."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from service.attention.operands import make_operands
from service.attention.plan import Plan
from service.attention.result import Result, make_result
from service.attention.spec import AttentionSpec
from service.backends import Executor
from service.backends.room import NoRoom
from service.pipeline.admit import memory_limit_error
from service.pipeline.deadline import Deadline
from service.pipeline.prepare import PreparedRequest
from service.runtime.machine import memory_left


def execute(request: PreparedRequest, deadline: Deadline | None = None) -> Result:
    """The result of a prepared request. deadline: checked between tiles

    Errors: InvalidRequest, MemoryLimit; Cancelled and TimeLimit by the deadline.
    """
    spec, plan, sources, _, (executor, memory, _) = request
    try:
        return execute_plan(plan, spec, sources, executor, deadline)
    except NoRoom as error:
        needed, available = error.needed, error.there
    except MemoryError:
        needed, available = memory, None
    if available is None:
        available = memory_left()
    raise memory_limit_error(plan, needed, available)


# Overflow is found by looking at the numbers, with an error that says what to do; a warning would add nothing.
@np.errstate(all="ignore")
def execute_plan(
    plan: Plan,
    spec: AttentionSpec,
    sources: Mapping[str, np.ndarray],
    executor: Executor,
    deadline: Deadline | None = None,
) -> Result:
    """The result of a plan with the numbers of a request.

    sources: the fields that query, key and value come from

    Errors: MemoryError and InvalidRequest; those of `deadline`.
    """
    if (result := executor.quick(plan, sources, spec.device)) is not None:
        return result
    check = None if deadline is None else deadline.check
    return make_result(plan, executor.execute(plan, make_operands(spec, plan, sources), spec.device, check))
