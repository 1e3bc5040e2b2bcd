"""The memory that a process may use, read from files of the Linux kernel: examples, and those of this machine."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from service.runtime.machine import memory_left, memory_total

MIB = 2**20
V2 = "0::/kubepods/pod/box\n"
V1 = "9:name=systemd:/docker/box\n4:cpu,memory:/docker/box\n"
UNLIMITED_V1 = "9223372036854771712"  # the largest multiple of a page below 2**63

TREES: dict[str, tuple[dict[str, str], int]] = {
    "no group": ({}, 8192),
    "version 2, no limit": ({"proc/self/cgroup": V2, "sys/fs/cgroup/kubepods/pod/box/memory.max": "max\n"}, 8192),
    "version 2, own limit": ({"proc/self/cgroup": V2, "sys/fs/cgroup/kubepods/pod/box/memory.max": "104857600\n",
                              "sys/fs/cgroup/kubepods/memory.max": "209715200\n"}, 100),
    "version 2, limit of a parent": ({"proc/self/cgroup": V2, "sys/fs/cgroup/kubepods/pod/box/memory.max": "max\n",
                                      "sys/fs/cgroup/kubepods/memory.max": "209715200\n"}, 200),
    "version 2, within a namespace": ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "104857600\n"}, 100),
    "version 1": ({"proc/self/cgroup": V1, "sys/fs/cgroup/memory/docker/box/memory.limit_in_bytes": "104857600\n",
                   "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{UNLIMITED_V1}\n"}, 100),
    "version 1, no limit": ({"proc/self/cgroup": V1,
                             "sys/fs/cgroup/memory/docker/box/memory.limit_in_bytes": f"{UNLIMITED_V1}\n"}, 8192),
    "version 1, within a container": ({"proc/self/cgroup": V1,
                                       "sys/fs/cgroup/memory/memory.limit_in_bytes": "104857600\n"}, 100),
    "versions 1 and 2": ({"proc/self/cgroup": f"{V1}0::/docker/box\n",
                          "sys/fs/cgroup/memory/docker/memory.limit_in_bytes": "104857600\n"}, 100),
    "more than the machine has": ({"proc/self/cgroup": V2, "sys/fs/cgroup/memory.max": f"{2**40}\n"}, 8192),
    "path that is not UTF-8": ({"proc/self/cgroup": "0::/caf\udce9\n", "sys/fs/cgroup/memory.max": "104857600\n"}, 100),
}  # fmt: skip


@pytest.mark.parametrize("name", TREES)
def test_the_smallest_limit_applies(name: str, tmp_path: Path) -> None:
    files, expected = TREES[name]
    for path, text in ({"proc/meminfo": "MemTotal:        8388608 kB\nMemFree:  1 kB\n"} | files).items():
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8", errors="surrogateescape")
    assert memory_total(tmp_path) == expected * MIB


def test_the_memory_of_this_machine_is_known() -> None:
    total, left = memory_total(), memory_left()
    assert total is not None
    assert left is not None
    assert 64 * MIB < total <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert left > 0


def test_the_memory_is_none_without_the_files(tmp_path: Path) -> None:
    assert memory_total(tmp_path) is None
