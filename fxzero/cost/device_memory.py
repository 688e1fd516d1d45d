"""How much memory there is for a rank."""

from __future__ import annotations

import os
from pathlib import Path

import torch


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


def device_bytes(device_type: str) -> int:
    """What the device of this rank has."""
    if device_type == "cuda":
        _, total = torch.cuda.mem_get_info()
        return int(total)
    return host_bytes()
