"""What the host gives to a rank: cores and threads, memory, shared memory, locked pages."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path

import torch

from fxzero.cost.resources import available_bytes, cores, host_bytes
from fxzero.doctor.verdicts import Checked, fail, ok, warn

LITTLE_MEMORY = 2 << 30
LITTLE_SHARED = 256 << 20
"""NCCL takes some 10 MB for a pair of ranks of a host, and a loader's workers a batch each."""
PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def check_cores(per_node: int) -> Checked:
    """Threads of all ranks of this host, against its cores."""
    threads, there = torch.get_num_threads(), cores()
    setting = os.environ.get("OMP_NUM_THREADS")
    by = f"OMP_NUM_THREADS={setting}" if setting else "OMP_NUM_THREADS is not set"
    found = f"{there} cores for {per_node} rank(s) of {threads} thread(s); {by}"
    best = max(there // per_node, 1)
    if per_node > there:
        return warn("cores", found, f"Ranks take turns: start {there} of them on this host.")
    if threads * per_node > there:
        return warn("cores", found, f"Threads wait for each other: OMP_NUM_THREADS={best}.")
    if per_node > 1 and 2 * threads * per_node <= there and not torch.cuda.is_available():
        return warn("cores", found, f"Cores are idle: OMP_NUM_THREADS={best}.")
    return ok("cores", found)


def check_memory(per_node: int) -> Checked:
    """The machine's memory, or its cgroup's, for each rank."""
    mine = host_bytes()
    free = available_bytes() // per_node
    found = f"{mine / 2**30:.1f} GiB of the host for each rank, {free / 2**30:.1f} of them free"
    if free < LITTLE_MEMORY:
        return warn("memory", found, "Compiling alone takes 1 to 2 GiB: end what else runs here.")
    return ok("memory", found)


def check_shared_memory(per_node: int) -> Checked:
    """What processes of one host share."""
    try:
        found = os.statvfs("/dev/shm")
    except OSError as error:
        return warn("shared memory", f"/dev/shm: {error.strerror}", "Mount a tmpfs there.")
    free = found.f_bavail * found.f_frsize
    text = f"{free / 2**30:.2f} GiB free in /dev/shm"
    if free < LITTLE_SHARED * per_node:
        return warn(
            "shared memory", text, "In a container: docker run --shm-size=8g, or --ipc=host."
        )
    return ok("shared memory", text)


def check_huge_pages() -> Checked:
    """What the kernel does about them: it is a fact, and no finding."""
    try:
        text = PAGES.read_text()
    except OSError:
        return ok("huge pages", "this kernel has none")
    chosen = text.partition("[")[2].partition("]")[0]
    return ok("huge pages", f"{chosen or text.strip()} ({PAGES})")


def check_locked_memory() -> Iterator[Checked]:
    """How much memory may be pinned: it is asked for where there is a GPU alone."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    limit = "no limit" if soft == resource.RLIM_INFINITY else f"ulimit -l is {soft >> 10} KiB"
    if not torch.cuda.is_available():
        yield ok("pinned memory", f"not needed without a GPU; {limit}")
        return
    try:
        memory = torch.empty(64 << 20, dtype=torch.uint8, pin_memory=True)
    except RuntimeError as error:
        yield fail(
            "pinned memory",
            f"64 MiB cannot be pinned ({str(error).splitlines()[0]}); {limit}",
            "Offload needs it: raise the limit of locked memory, ulimit -l unlimited.",
        )
        return
    yield ok("pinned memory", f"{memory.nbytes >> 20} MiB can be pinned; {limit}")
