"""Processors and memory that this process may use, and how much memory is left."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath

with suppress(ImportError):  # not on every system
    import resource

ROOT = Path("/")


def cpu_count() -> int:
    """Processors that this process may use: by its affinity, and by the quota of its control group."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with suppress(OSError, ValueError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
        count = min(count, math.ceil(int(quota) / int(period)))
    return max(1, count)


def memory_limit(root: Path = ROOT) -> int | None:
    """Bytes that this process may use at most: the least of its control groups' limits and RLIMIT_AS.

    None if there is no limit below the memory of the machine. `root` is the folder that holds `proc` and `sys`.
    """
    limits = [*_cgroup_limits(root), _address_space()]
    least = min((limit for limit in limits if limit is not None), default=math.inf)
    return int(least) if least < (memory_total(root) or math.inf) else None


def memory_total(root: Path = ROOT) -> int | None:
    """Bytes of memory of the machine; None if the system does not tell."""
    return _meminfo(root, "MemTotal")


def memory_left() -> int | None:
    """Bytes that this process could still allocate, by the machine's free memory and RLIMIT_AS. None if unknown."""
    left, limit = _meminfo(ROOT, "MemAvailable"), _address_space()
    if left is None or limit is None:
        return left
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    return min(left, max(0, limit - pages * resource.getpagesize()))


def _meminfo(root: Path, name: str) -> int | None:
    """Bytes of one row of /proc/meminfo, which are in KiB."""
    with suppress(OSError):
        for line in (root / "proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
    return None


def _address_space() -> int | None:
    """The limit on the address space of this process; None if it has none."""
    with suppress(NameError):
        limit, _ = resource.getrlimit(resource.RLIMIT_AS)
        return None if limit == resource.RLIM_INFINITY else limit
    return None


def _cgroup_limits(root: Path) -> Iterator[int]:
    """Limits of the control groups that this process is in, versions 1 and 2, and of all groups above them.

    A container may see its own group at the root, under another path than /proc/self/cgroup tells: a file that is
    missing counts as no limit.
    """
    groups = root / "proc/self/cgroup"
    text = groups.read_text(encoding="utf-8", errors="surrogateescape") if groups.exists() else ""
    for line in text.splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:  # version 2
            folder, name = root / "sys/fs/cgroup", "memory.max"
        elif "memory" in controllers.split(","):
            folder, name = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        group = PurePosixPath(path.lstrip("/"))
        for place in (group, *group.parents):
            with suppress(OSError, ValueError):  # "max" is no limit
                yield int((folder / place / name).read_text(encoding="ascii"))
