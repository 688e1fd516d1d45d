"""What of a step graph's inputs lives on disk, and what somebody has changed of it since."""

from __future__ import annotations

import gc
import logging
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from fxzero import _compat
from fxzero.graph import StepGraph
from fxzero.graph.operators import num_bytes
from fxzero.graph.stamps import Role, stamp_of
from fxzero.runtime.arena import Home, let_go
from fxzero.runtime.disk_arena import Bucket, DiskArena, disk_arena_for, disk_arena_of
from fxzero.runtime.disk_streams import StoredUpdate
from fxzero.transfer import Form, Pool

log = logging.getLogger("fxzero")


class DiskBinder:
    """Sees that what a graph reads from disk is there."""

    def __init__(self, graph: StepGraph, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.device = graph.device
        self.homes: list[tuple[int, Home]] = []
        """Positions in the graph of what lives on disk."""
        self.buffers: tuple[int, int] | None = None
        """The position of the buffers, and their bytes."""
        self.buckets: list[Bucket] = [
            node.target.bucket
            for node in graph.nodes(role=Role.UPDATE)
            if isinstance(node.target, StoredUpdate)
        ]
        self._arena: DiskArena | None = None
        for i, node in enumerate(graph.graph.find_nodes(op="placeholder")):
            source = node.meta.get("fxzero_source")
            if source is not None and source[0] == "disk_buffers":
                self.buffers, self._settings = (i, num_bytes(node)), source[1]
            elif stamp_of(node).pool is Pool.DISK:
                key, name = (graph.inputs[node], "") if source is None else source[1:]
                self.homes.append((i, (key, name)))

    def bring_home(self, values: list[Any]) -> None:
        """Let what lives on disk be there: it may have been loaded, or changed, or made anew.

        Raises:
            DiskError: there is no room, no right to write, or what is there is not what was
                written.
            HostMemoryError: a GPU has to reach the buffers, and the system does not let it.
        """
        if self.buffers is None:
            return
        position, num_bytes = self.buffers
        given = next(value for value in values if isinstance(value, Tensor))
        if _compat.is_fake(given):
            values[position] = given.new_empty(num_bytes, dtype=torch.uint8)
            return
        arena = disk_arena_of(self.optimizer)
        is_new = arena is None or arena is not self._arena
        if is_new:
            layout = {home: Form.of(values[i]) for i, home in self.homes}
            wanted = {b: tuple(layout[key, ""] for key in b.keys) for b in self.buckets}
            settings = self._settings
            arena = self._arena = disk_arena_for(self.optimizer, wanted, settings, self.device)
        assert arena is not None
        if is_new:
            let_go(self.optimizer, {home for _, home in self.homes})
            self.homes.sort(key=lambda home: arena.begin_of(home[1]))  # pieces are written once
        away = [(i, home) for i, home in self.homes if not arena.bring_home(home, values[i])]
        if away and is_new:
            gc.collect()  # what tracing has left behind looks at parameters too
            away = [(i, home) for i, home in away if not arena.bring_home(home, values[i])]
            if away:
                log.warning(
                    "%d of %d tensors that were to be on disk stay in memory: something else looks "
                    "at them, a state dict that is held, say (the first is of %s)",
                    len(away),
                    len(self.homes),
                    away[0][1][0].partition("/")[2],
                )
        arena.store.write_changes()
        values[position] = arena.buffers
