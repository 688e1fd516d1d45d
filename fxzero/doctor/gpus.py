"""Which GPUs there are, what they can do, and whether they reach each other."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import permutations

import torch

from fxzero.doctor.verdicts import Checked, fail, ok, warn

LEAST_CAPABILITY = (7, 0)
"""Triton's."""


def check_gpus(num_ranks: int) -> Iterator[Checked]:
    """Those that this process sees.

    Args:
        num_ranks: of this host: each takes one.
    """
    if not torch.cuda.is_available():
        if torch.version.cuda is None:
            yield ok("gpu", "none: ranks compute on CPUs, by a torch that was built for them")
        else:
            yield warn(
                "gpu",
                f"none, though torch was built for CUDA {torch.version.cuda}: CPUs compute",
                "If there is one: nvidia-smi, and CUDA_VISIBLE_DEVICES, say why it is not seen.",
            )
        return
    count = torch.cuda.device_count()
    for number in range(count):
        yield _check_gpu(number)
    if num_ranks > count:
        found = f"{count} for {num_ranks} ranks of this host"
        yield fail("gpus", found, f"Start {count} ranks a host: each takes a GPU.")
    if count > 1:
        yield _check_peers(count)


def _check_gpu(number: int) -> Checked:
    name = f"gpu {number}"
    of = torch.cuda.get_device_properties(number)
    free, total = torch.cuda.mem_get_info(number)
    found = (
        f"{of.name}, capability {of.major}.{of.minor}, {total / 2**30:.1f} GiB, "
        f"{free / 2**30:.1f} of them free"
    )
    try:
        right = float(torch.ones(8, device=f"cuda:{number}").sum()) == 8.0
    except RuntimeError as error:
        what = str(error).splitlines()[0]
        return fail(name, f"{found}: {what}", "The driver and torch's CUDA do not go together.")
    if not right:
        return fail(name, f"{found}: it sums wrong", "Take it out of CUDA_VISIBLE_DEVICES.")
    if (of.major, of.minor) < LEAST_CAPABILITY:
        least = ".".join(map(str, LEAST_CAPABILITY))
        return fail(name, found, f"Triton needs capability {least}: lower_regions.backend=eager.")
    if free < total / 2:
        return warn(name, found, "Others use it: what they hold is not there for a step.")
    return ok(name, found)


def _check_peers(count: int) -> Checked:
    pairs = list(permutations(range(count), 2))
    apart = [pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)]
    found = f"{len(pairs) - len(apart)} of {len(pairs)} pairs of GPUs reach each other's memory"
    if apart:
        advice = "Others go through the host: nvidia-smi topo -m shows how they are joined."
        return warn("peer access", found, advice)
    return ok("peer access", found)
