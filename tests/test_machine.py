"""The memory that a process may use, read from files of the Linux kernel: examples, and those of this machine."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from attention_service.runtime.machine import memory_left, memory_limit, memory_total
from attention_service.settings.model import default_memory_limit

MIB = 2**20
V2 = "0::/kubepods/pod/box\n"
V1 = "9:name=systemd:/docker/box\n4:cpu,memory:/docker/box\n"
UNLIMITED_V1 = "9223372036854771712"  # the largest multiple of a page below 2**63

# Files, and the limit in MiB; None for no limit below the 8 GiB of the machine.
TREES: dict[str, tuple[dict[str, str], int | None]] = {
    "no group": ({}, None),
    "version 2, no limit": ({"proc/self/cgroup": V2, "sys/fs/cgroup/kubepods/pod/box/memory.max": "max\n"}, None),
    "version 2, own limit": ({"proc/self/cgroup": V2, "sys/fs/cgroup/kubepods/pod/box/memory.max": "104857600\n",
                              "sys/fs/cgroup/kubepods/memory.max": "209715200\n"}, 100),
    "version 2, limit of a parent": ({"proc/self/cgroup": V2, "sys/fs/cgroup/kubepods/pod/box/memory.max": "max\n",
                                      "sys/fs/cgroup/kubepods/memory.max": "209715200\n"}, 200),
    "version 2, within a namespace": ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "104857600\n"}, 100),
    "version 1": ({"proc/self/cgroup": V1, "sys/fs/cgroup/memory/docker/box/memory.limit_in_bytes": "104857600\n",
                   "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{UNLIMITED_V1}\n"}, 100),
    "version 1, no limit": ({"proc/self/cgroup": V1,
                             "sys/fs/cgroup/memory/docker/box/memory.limit_in_bytes": f"{UNLIMITED_V1}\n"}, None),
    "version 1, within a container": ({"proc/self/cgroup": V1,
                                       "sys/fs/cgroup/memory/memory.limit_in_bytes": "104857600\n"}, 100),
    "versions 1 and 2": ({"proc/self/cgroup": f"{V1}0::/docker/box\n",
                          "sys/fs/cgroup/memory/docker/memory.limit_in_bytes": "104857600\n"}, 100),
    "more than the machine has": ({"proc/self/cgroup": V2, "sys/fs/cgroup/memory.max": f"{2**40}\n"}, None),
    "path that is not UTF-8": ({"proc/self/cgroup": "0::/caf\udce9\n", "sys/fs/cgroup/memory.max": "104857600\n"}, 100),
}  # fmt: skip


def machine(root: Path, files: dict[str, str]) -> Path:
    """A folder with these files of a machine with 8 GiB of memory."""
    for path, text in ({"proc/meminfo": "MemTotal:        8388608 kB\nMemFree:  1 kB\n"} | files).items():
        file = root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8", errors="surrogateescape")
    return root


@pytest.mark.parametrize("name", TREES)
def test_the_smallest_limit_applies(name: str, tmp_path: Path) -> None:
    files, expected = TREES[name]
    root = machine(tmp_path, files)
    assert memory_limit(root) == (None if expected is None else expected * MIB)
    assert memory_total(root) == 8192 * MIB


@pytest.mark.parametrize("limit", [512, 2048, 6144])
@pytest.mark.parametrize("version", [1, 2])
def test_the_default_budget_is_half_of_the_limit_of_the_container(version: int, limit: int, tmp_path: Path) -> None:
    groups, file = (
        (V1, "memory/docker/box/memory.limit_in_bytes") if version == 1 else (V2, "kubepods/pod/box/memory.max")
    )
    files = {"proc/self/cgroup": groups, f"sys/fs/cgroup/{file}": f"{limit * MIB}\n"}
    assert default_memory_limit(machine(tmp_path, files)) == limit * MIB // 2


@pytest.mark.parametrize(("kib", "budget"), [(1024**2, 512), (8 * 1024**2, 2048), (64 * 1024**2, 2048)])
def test_the_default_budget_without_a_container_is_at_most_2_gib(kib: int, budget: int, tmp_path: Path) -> None:
    assert default_memory_limit(machine(tmp_path, {"proc/meminfo": f"MemTotal: {kib} kB\n"})) == budget * MIB


def test_the_memory_of_this_machine_is_known() -> None:
    total, left = memory_total(), memory_left()
    assert total is not None
    assert left is not None
    assert 64 * MIB < total <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert left > 0


def test_the_memory_is_none_without_the_files(tmp_path: Path) -> None:
    assert memory_total(tmp_path) is None
    assert memory_limit(tmp_path) is None
    assert default_memory_limit(tmp_path) == 2048 * MIB
