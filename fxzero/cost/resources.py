"""What the machine has for a rank: memory, what of it is free, and cores."""

from __future__ import annotations

import os
from pathlib import Path

import torch


def cores() -> int:
    """Of this process: those it may run on, and no more than its cgroup's share of time."""
    found = len(os.sched_getaffinity(0))
    try:
        share, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        found = min(found, max(int(share) // int(period), 1))
    except (OSError, ValueError):  # another version of cgroups; "max"
        pass
    return found


def host_bytes() -> int:
    """What this host has for each of its ranks: the cgroup's limit, or the machine's memory."""
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limits = [pages]
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        try:
            limits.append(int(Path("/sys/fs/cgroup", name).read_text()))
        except (OSError, ValueError):  # another version of cgroups; "max"
            continue
    return min(limits) // max(int(os.environ.get("LOCAL_WORLD_SIZE", "1")), 1)


def available_bytes() -> int:
    """What this host could still give away."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):  # another system
        pass
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def device_bytes(device_type: str) -> int:
    """What the device of this rank has."""
    if device_type == "cuda":
        _, total = torch.cuda.mem_get_info()
        return int(total)
    return host_bytes()
