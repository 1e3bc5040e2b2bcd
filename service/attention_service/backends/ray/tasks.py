"""Tasks of a cluster, whose results come in the order in which the tasks were given."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, Final

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from attention_service.backends.base import Check, no_check
from attention_service.backends.ray.cluster import connect, unavailable
from attention_service.errors import ServiceError

# Seconds between two looks at the deadline.
INTERVAL: Final = 0.1


def results(
    start: Callable[..., Any], arguments: Iterable[tuple[Any, ...]], workers: int, check: Check = no_check
) -> Iterator[Any]:
    """The results of tasks, in the order of their arguments. Closing the iterator cancels the tasks that still run.

    start: starts a task, as `remote` of a remote function; workers: processors of the cluster

    Errors: Busy if workers are lost, ServiceError and MemoryError that a task raises, and what the check raises.
    """
    arguments = iter(arguments)
    waiting: deque[Any] = deque()
    running: list[Any] = []
    try:
        while True:
            # One for each processor is computed, and one waits, so that no processor waits for this process.
            for given in islice(arguments, 2 * workers - len(running)):
                running.append(start(*given))
                waiting.append(running[-1])
            if not waiting:
                return
            check()
            _, running = ray.wait(running, timeout=INTERVAL)
            while waiting and waiting[0] not in running:
                found = _result(waiting[0], check)
                waiting.popleft()
                yield found
    except RayTaskError:  # a defect of ours
        raise
    except RayError as error:
        raise unavailable(f"{type(error).__name__}: {error}") from None
    finally:
        for reference in waiting:
            ray.cancel(reference, force=True)


def mapped(function: Callable[[Any], Any], items: Iterable[Any], address: str, threads: int | None) -> Iterator[Any]:
    """The results of a function for all items, in their order; each is a task.

    Errors: as of `connect` and `results`.
    """
    workers = connect(address, threads).all
    shared = ray.put(function)
    yield from results(_apply.remote, ((shared, item) for item in items), workers)


@ray.remote(num_cpus=1)
def _apply(function: Callable[[Any], Any], item: Any) -> Any:
    return function(item)


def _result(reference: Any, check: Check) -> Any:
    """The result of a task, which Ray computes again if it was lost. Errors: as of `results`."""
    while True:
        check()
        try:
            return ray.get(reference, timeout=INTERVAL)
        except GetTimeoutError:
            continue
        except RayTaskError as error:
            if isinstance(error.cause, ServiceError | MemoryError):
                raise error.cause from None
            raise
