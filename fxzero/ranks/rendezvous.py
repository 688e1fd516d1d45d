"""Ranks compare their models before any of them waits in a broadcast.

Each rank writes down what it is about to shard; a hash of that goes to the store. Whoever comes
first posts his, the others compare, and all hear the verdict: another depth, width, dtype, stage
or set of frozen parameters on one rank is an error on every rank, instead of a hang or an abort.
A rank costs the store a handful of operations, whatever the size of the model.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import time
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from fxzero._compat import default_store
from fxzero.errors import ShardingError
from fxzero.ranks import watch
from fxzero.ranks.status import Limits

log = logging.getLogger("fxzero")

_AGREED = "agreed"
_models = itertools.count()
"""Models are sharded in the same order on all ranks."""


def describe(parameters: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Every parameter's shape, dtype and whether it is trained, for `compare_models`."""
    return {
        f"parameter {name}": f"{str(p.dtype).removeprefix('torch.')} {list(p.shape)}"
        + ("" if p.requires_grad else ", frozen")
        for name, p in parameters.items()
    }


def compare_models(description: Mapping[str, str]) -> None:
    """See that all ranks are about to shard the same model in the same way.

    All ranks call it, before the first collective. Nothing happens in a single process, or on a
    fake process group.

    Args:
        description: what must be equal, by name, in order: settings, then parameters.

    Raises:
        ShardingError: on every rank alike, if two differ; or a rank never came.
    """
    store = default_store()
    if store is None or dist.get_world_size() == 1:
        return
    base = f"fxzero/models/{next(_models)}"
    rank = dist.get_rank()
    text = json.dumps(list(description.items()))
    mine = hashlib.sha256(text.encode()).hexdigest()
    first, _, first_rank = store.compare_set(base, "", f"{mine} {rank}").decode().partition(" ")
    if int(first_rank) == rank:
        store.set(f"{base}/text", text)
    if first != mine:
        theirs = dict(json.loads(store.get(f"{base}/text")))
        why = _difference(dict(description), rank, theirs, int(first_rank))
        store.compare_set(f"{base}/verdict", "", why)
    store.set(f"{base}/{rank}", "here")
    if store.add(f"{base}/arrived", 1) == dist.get_world_size():
        store.compare_set(f"{base}/verdict", "", _AGREED)
    verdict = _hear(store, base)
    if verdict != _AGREED:
        raise ShardingError(verdict)


def _difference(mine: dict[str, str], rank: int, theirs: dict[str, str], other: int) -> str:
    """The first thing in which two ranks differ, as a message for all."""
    names = list(dict.fromkeys([*theirs, *mine]))
    differing = [name for name in names if mine.get(name) != theirs.get(name)]
    if differing:
        name = differing[0]
        what = (
            f"{name}: {mine.get(name, 'does not exist')} on rank {rank}, "
            f"{theirs.get(name, 'does not exist')} on rank {other}"
        )
        more = f", and {len(differing) - 1} more differences" if len(differing) > 1 else ""
    else:
        what, more = f"the parameters' order differs between ranks {rank} and {other}", ""
    return (
        f"ranks are about to shard different models. {what}{more}. Build the same model on all "
        "ranks, freeze the same parameters, and call fxzero.shard with the same arguments."
    )


def _hear(store: Any, base: str) -> str:
    """Wait until all ranks have compared, and say who is missing meanwhile."""
    key = f"{base}/verdict"
    limits = Limits.from_environment()
    began = time.monotonic()
    warned = pause = 0.001
    limit = min(store.timeout.total_seconds(), limits.timeout)
    while not store.check([key]):
        waited = time.monotonic() - began
        if waited > limits.warn and waited > 2 * warned:
            warned = waited
            log.warning("fxzero.shard has waited for %.0f s: %s", waited, _missing(store, base))
        gone = watch.silent() if waited > limits.look else []
        if gone or waited > limit:
            ranks = f"rank {', '.join(map(str, gone))} has died or stopped; " if gone else ""
            raise ShardingError(
                f"fxzero.shard has waited for {waited:.0f} s: {ranks}{_missing(store, base)}. All "
                "ranks must call fxzero.shard, in the same order for several models."
            )
        time.sleep(pause)
        pause = min(2 * pause, 0.1)
    return store.get(key).decode()


def _missing(store: Any, base: str) -> str:
    """Which ranks have not called `shard`."""
    ranks = [r for r in range(dist.get_world_size()) if not store.check([f"{base}/{r}"])]
    return f"rank {', '.join(map(str, ranks))} has not called it yet"
