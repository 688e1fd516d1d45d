"""All checks in order, and what they come to."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fxzero.cost.cluster import ClusterSpec
from fxzero.doctor import compilers, gpus, host, software, verdicts
from fxzero.doctor.cluster_file import values_of
from fxzero.doctor.compilers import Compiled, compile_chain
from fxzero.doctor.compute import CHAIN_SHAPES
from fxzero.doctor.measure import measure
from fxzero.doctor.verdicts import Checked, Verdict, fail, reason
from fxzero.doctor.world import World, check_backends, check_sum, joined, told_by_all


@dataclass(frozen=True)
class Examination:
    """What the doctor says. Equal on all ranks."""

    versions: dict[str, str]
    """Of fxzero, torch and Python."""
    device: str
    """``cpu`` or ``cuda``."""
    rank: int
    """Whose process this is: rank 0 speaks for all."""
    world_size: int
    checks: tuple[Checked, ...]
    cluster: ClusterSpec | None
    """This machine's figures; None if they were not measured."""
    seconds: float
    """That it took."""

    @property
    def is_fine(self) -> bool:
        """Whether everything that is needed works."""
        return all(checked.verdict is not Verdict.FAIL for checked in self.checks)

    def to_json(self) -> dict[str, Any]:
        """As `docs/doctor.md` has it."""
        return {
            **self.versions,
            "device": self.device,
            "world_size": self.world_size,
            "is_fine": self.is_fine,
            "checks": [asdict(checked) for checked in self.checks],
            "cluster": None if self.cluster is None else values_of(self.cluster),
            "seconds": round(self.seconds, 2),
        }


def examine(fxzero_version: str, *, disk: Path, measures: bool = True) -> Examination:
    """Look at this machine; under torchrun, together with the other ranks.

    Args:
        disk: the folder whose disk is measured.
        measures: whether figures are taken, which needs some seconds.

    Raises:
        ConfigError: torchrun's variables say what cannot be.
    """
    begin = time.perf_counter()
    world = World.of_environment()
    has_gpu = torch.cuda.is_available()
    number = int(os.environ.get("LOCAL_RANK", "0")) if world.size > 1 else 0
    has_own = has_gpu and number < torch.cuda.device_count()
    device = torch.device("cuda", number) if has_own else torch.device("cpu")
    checks = list(_of_software(fxzero_version, world))
    if has_own:
        torch.cuda.set_device(device)
    compiled = compile_chain(*CHAIN_SHAPES[device.type], device)
    checks.append(compiled.checked)
    checks += verdicts.run("triton", compilers.check_triton)
    cluster: ClusterSpec | None = None
    if has_gpu and not has_own:  # NCCL would wait for this rank, which has no GPU of its own
        checks.append(fail("nccl", f"rank {world.rank} has no GPU", "Start a rank for each GPU."))
    else:
        cluster, checks = _of_ranks(world, device, compiled, disk, measures, checks)
    return Examination(
        versions={
            "fxzero": fxzero_version,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        device=device.type,
        rank=world.rank,
        world_size=world.size,
        checks=tuple(checks),
        cluster=cluster,
        seconds=time.perf_counter() - begin,
    )


def _of_software(fxzero_version: str, world: World) -> Iterator[Checked]:
    """What one rank finds out by itself, in no time."""
    yield from verdicts.run("python", partial(software.check_python, fxzero_version))
    yield from verdicts.run("torch", software.check_torch)
    yield from verdicts.run("libraries", software.check_libraries)
    yield from verdicts.run("gpu", partial(gpus.check_gpus, world.per_node))
    yield from verdicts.run("pinned memory", host.check_locked_memory)
    yield from verdicts.run("cores", partial(host.check_cores, world.per_node))
    yield from verdicts.run("memory", partial(host.check_memory, world.per_node))
    yield from verdicts.run("shared memory", partial(host.check_shared_memory, world.per_node))
    yield from verdicts.run("huge pages", host.check_huge_pages)


def _of_ranks(
    world: World,
    device: torch.device,
    compiled: Compiled,
    disk: Path,
    measures: bool,
    checks: Sequence[Checked],
) -> tuple[ClusterSpec | None, list[Checked]]:
    """What ranks find out together, and what each had found by itself."""
    found = list(checks)
    found += verdicts.run("process groups", check_backends)
    try:
        with joined(world, device):
            found.append(check_sum(world, device))
            cluster = None
            if measures:
                cluster, said = measure(world, device, compiled.run, disk)
                found += said
            return cluster, world.first_of_all(told_by_all(world, found))
    except Exception as error:
        what = f"{world.size} ranks: {reason(error)}"
        advice = (
            "Whatever that names must work before ranks can train: the lines above may say why."
        )
        return None, [*found, fail("ranks" if world.size > 1 else "measuring", what, advice)]
