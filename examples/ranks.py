"""One Hydra application, any number of processes.

Rank 0 alone runs Hydra: it reads the command line, makes the output folder and sends
the job to the other ranks. So every rank trains with one and the same configuration,
and a run has one folder:

    rank 0    Hydra ── send ── job ── Hydra ── send Leave
    rank 1    receive ──────── job ── receive: leave

The jobs of a sweep have ranks of their own each: `examples/sweeps.py`.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

import fxzero
from examples.failures import GRACE_S, LEAVE_S, WRONG_USE, SettingsError, exit_code, report
from fxzero.ranks.groups import leave

T = TypeVar("T")


def rank() -> int:
    """This process's number; 0 without a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """How many processes train together; 1 without a process group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def under_torchrun() -> bool:
    """Whether somebody has started the ranks already."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def ranks_to_train(asked: int | None) -> int:
    """How many ranks will train: those that are there, or as many as are to be started."""
    return world_size() if under_torchrun() else asked or 1


def mean_over_ranks(value: Tensor) -> float:
    """The mean of a 0-d tensor over all ranks. A collective call."""
    value = value.detach().clone()
    if dist.is_initialized():
        dist.all_reduce(value)
    return value.item() / world_size()


def from_rank_0(value: Tensor) -> Tensor:
    """Rank 0's value, on every rank. A collective call."""
    if dist.is_initialized():
        dist.broadcast(value, 0)
    return value


def set_threads(threads: int | None) -> None:
    """CPU threads of this rank: those asked for, else OMP_NUM_THREADS, else a share of the cores.

    torchrun sets OMP_NUM_THREADS=1 by itself when the user did not set it. A 1 under
    torchrun therefore counts as not set; `trainer.threads=1` insists on it.
    """
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if threads is None and local_ranks > 1 and os.environ.get("OMP_NUM_THREADS") == "1":
        threads = max((os.cpu_count() or 1) // local_ranks, 1)
    if threads is not None:
        torch.set_num_threads(threads)


class Leave:
    """What rank 0 sends after the job, or in its place."""


class JobFailed(SystemExit):
    """A job failed on this rank; where the other ranks stand in it is not known."""


class Stopped(SystemExit):
    """All ranks were told to stop, and have saved what they had."""


def launch(app: Callable[[], Any], job: Callable[..., Any]) -> None:
    """Run a Hydra application on rank 0, and on the others the job that it sends."""
    fxzero.init_distributed()
    code = lead(app) if rank() == 0 else follow(job)
    if dist.is_initialized():
        leave()
        if code:
            time.sleep(LEAVE_S)  # or torchrun ends the others, and lists each as a failure
    sys.exit(code)


def lead(app: Callable[[], Any]) -> int:
    """Rank 0's part. Whatever Hydra ends with, the ranks that wait for a job are told.

    Only this rank leaves with an error's code: torchrun then shows one failure, and not one a rank.
    """
    os.environ["HYDRA_FULL_ERROR"] = "1"  # let errors through: they are told below, in a sentence
    code = 0
    try:
        app()
    except JobFailed:
        raise  # nobody waits for a job: torchrun ends them
    except Stopped:
        return 0  # nor here: they leave too
    except SystemExit as leaving:  # 0 after --help, 2 after an option that Hydra does not know
        code = leaving.code if isinstance(leaving.code, int) else WRONG_USE
        if code and "TORCHELASTIC_ERROR_FILE" in os.environ:  # far below what Hydra has printed
            report(SettingsError("Hydra knows no such option: --hydra-help shows those it has"))
    except Exception as error:
        report(error)
        code = exit_code(error)
    _broadcast(Leave())
    return code


def follow(job: Callable[..., Any]) -> int:
    """The part of all other ranks."""
    while not isinstance(message := _broadcast(None), Leave):
        try:
            job(*message)
        except Stopped:
            return 0
        except Exception as error:
            time.sleep(GRACE_S)  # rank 0 mostly says the same, and torchrun ends this process
            report(error, rank())
            raise JobFailed(exit_code(error)) from None
    return 0


def run_on_all_ranks(job: Callable[..., T], *args: Any) -> T:
    """Called on rank 0, inside `launch`: run `job(*args)` everywhere, return its result here."""
    _broadcast(args)
    try:
        return job(*args)
    except Exception as error:
        # The other ranks still wait in a collective. Leave: torchrun then ends them too.
        report(error)
        raise JobFailed(exit_code(error)) from None


def _broadcast(value: Any) -> Any:
    """Rank 0's value, on every rank."""
    if not dist.is_initialized():
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]
