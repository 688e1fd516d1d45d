"""Collections that do not walk through what outlives a test, and housekeeping done without."""

from __future__ import annotations

import gc

import torch._dynamo.guards
import torch._dynamo.utils
import torch._functorch._aot_autograd.graph_compile


def freeze() -> None:
    """Take what is alive now out of every later collection.

    `fxzero.shard` and every compilation ask for collections, which would walk through all of torch.
    They also ask whether anything is frozen, and Python counts hundreds of thousands of objects
    to answer: from here on the answer is that something is.
    """
    gc.collect()
    gc.freeze()
    gc.get_freeze_count = _something  # type: ignore[assignment]


def _something() -> int:
    return 1


def keep_house_less_often() -> None:
    """Leave out what takes time in each of some thousand compilations, and changes no result.

    Dynamo fills a processor's caches to tell in its log how long new guards take, AOTAutograd
    prints each joint graph for a log that nobody has asked for, and both describe each compilation
    for telemetry.
    """
    torch._dynamo.guards.profile_guard_manager = _takes_no_time
    torch._functorch._aot_autograd.graph_compile._log_joint_graph = _says_nothing
    torch._dynamo.utils.record_compilation_metrics = _says_nothing


def _says_nothing(*_: object) -> None:
    return None


def _takes_no_time(*_: object) -> float:
    return 0.0
