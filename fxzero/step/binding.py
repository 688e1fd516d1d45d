"""What a step graph's inputs are at run time.

Dynamo's inputs     parameters, buffers, the batch: as Dynamo hands them over
tangents_1          the loss's gradient: 1/k for k micro-batches, times the loss scale
exp_avg_h_0_weight  a tensor of the optimizer's state, looked up on every call, so that
                    a loaded state dict takes effect
group_0             a parameter group, for its learning rate and whatever else changes
inverse_scale       one over the loss scale
staging             where in the host's memory gradients arrive: see `fxzero.runtime.arena`
disk_buffers        what is between the disk and memory: see `fxzero.runtime.disk_buffers`
"""

from __future__ import annotations

import gc
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.distributed.tensor import DTensor

from fxzero import _compat
from fxzero.errors import CaptureError, ConfigError
from fxzero.graph import StepGraph
from fxzero.graph.operators import num_bytes
from fxzero.graph.stamps import stamp_of
from fxzero.runtime import delayed
from fxzero.runtime.arena import Home, HostArena, arena_for, arena_of
from fxzero.runtime.held_states import give_back_before_steps, hold
from fxzero.runtime.optimizers import OptimizerLayout, create_state
from fxzero.runtime.streams import streams_of
from fxzero.sharding.host import HOST
from fxzero.step.disk_binding import DiskBinder
from fxzero.transfer import Form, Pool


class Binder:
    """Makes the list of inputs of one run of a graph."""

    def __init__(self, graph: StepGraph, layout: OptimizerLayout, micro_batches: int) -> None:
        self.layout = layout
        self.optimizer = layout.optimizer
        self.device = graph.device
        self.placeholders: list[fx.Node] = list(graph.graph.find_nodes(op="placeholder"))
        position = {
            key: _compat.input_index(node) for node, key in graph.inputs.items() if not node._erased
        }
        self.size = len(self.placeholders)
        self.inputs: list[tuple[int, int]] = []
        """Positions: in the graph, in Dynamo's inputs."""
        self.state: dict[int, list[tuple[int, str]]] = {}
        """By a parameter's position in Dynamo's inputs: positions in the graph, and names."""
        self.held_on: dict[int, torch.device] = {}
        """By a position in the graph, where a tensor of the state is: of a step on a GPU."""
        self.groups: list[tuple[int, int]] = []
        self.tangents: list[tuple[int, Tensor]] = []
        self.inverse_scales: list[tuple[int, Tensor]] = []
        """Positions in the graph, and what such an input looks like."""
        self.staging: list[tuple[int, int]] = []
        """The position in the graph of where gradients arrive on the host, and its bytes."""
        self.homes: list[tuple[int, Home]] = []
        """Positions in the graph of what lives on the host."""
        self.disk = DiskBinder(graph, self.optimizer)
        self._token = object()  # not an id, which another graph has once this one is gone
        self._arena: HostArena | None = None
        self._micro_batches = micro_batches
        self._constants: tuple[float, list[tuple[int, Tensor]]] = (-1.0, [])
        self.parameters = {key: index for key, index in position.items() if index is not None}
        """Positions of the parameters in Dynamo's inputs, by key."""
        for i, node in enumerate(self.placeholders):
            source = node.meta.get("fxzero_source")
            areas = ("staging", "disk_buffers")
            if stamp_of(node).pool is Pool.HOST and (source is None or source[0] not in areas):
                key, name = (graph.inputs[node], "") if source is None else source[1:]
                self.homes.append((i, (key, name)))
            match node.meta.get("fxzero_source"):
                case ("state", key, name):
                    self.state.setdefault(self.parameters[key], []).append((i, name))
                    if self.device != HOST:
                        self.held_on[i] = node.meta["val"].device
                case ("group", index):
                    self.groups.append((i, index))
                case ("staging",):
                    self.staging.append((i, num_bytes(node)))
                case ("disk_buffers", _):
                    pass  # of the disk's own binder
                case ("inverse_scale",):
                    self.inverse_scales.append((i, node.meta["val"]))
                case None:
                    self._bind(i, node)
        self.placeholders = []
        held = [self.held_on.get(i) for i, (_, name) in self.homes if name]
        self.state_home = HOST if HOST in held else None
        """Where state is made, if not where its parameters are."""
        if self.state_home is not None:
            give_back_before_steps(self.optimizer)

    def copied(self, batch: Collection[int]) -> list[int]:
        """Positions in the graph of what is another tensor in every step.

        Args:
            batch: positions in Dynamo's inputs of what is neither parameter nor buffer.
        """
        found = [i for i, index in self.inputs if index in batch]
        return [*found, *(i for i, _ in (*self.tangents, *self.inverse_scales))]

    def _bind(self, i: int, node: fx.Node) -> None:
        index = _compat.input_index(node)
        if index is not None:
            self.inputs.append((i, index))
        elif node.name.startswith("tangents_"):
            self.tangents.append((i, node.meta["val"]))
        else:
            raise CaptureError(
                f"the step graph has an input {node.name} ({node.meta.get('desc')}) that is no "
                "input of the model: do some of the model's inputs or buffers share memory? Use "
                "the ordinary loop with torch.compile(model, backend='fxzero')."
            )

    def __call__(self, inputs: Sequence[Any], loss_scale: float) -> list[Any]:
        """The graph's inputs.

        Args:
            inputs: Dynamo's.
            loss_scale: what the loss is multiplied by.
        """
        for key, parameter in self.layout.parameters.items():
            index = self.parameters.get(key)
            if index is not None and inputs[index] is not parameter:
                raise ConfigError(
                    f"parameter {key.partition('/')[2]} is another object than the optimizer's. "
                    "Was it replaced, by load_state_dict(assign=True) say? Make optimizer and step "
                    "anew after that."
                )
        values: list[Any] = [None] * self.size
        for i, index in self.inputs:
            value = inputs[index]
            values[i] = _compat.local_tensor(value) if isinstance(value, DTensor) else value
        state = self.optimizer.state
        for index, wanted in self.state.items():
            found = state[inputs[index]]
            for i, name in wanted:
                value = found.get(name)
                if value is None:
                    self._restore_state()
                    found = state[inputs[index]]
                    value = found[name]
                if i in self.held_on:
                    values[i] = hold(found, name, self.held_on[i])
                    continue
                values[i] = _compat.local_tensor(value) if isinstance(value, DTensor) else value
        if self.homes or self.staging:
            if not _compat.is_fake(next(v for v in values if isinstance(v, Tensor))):
                delayed.begin_run(self.optimizer, self._token)
            self.disk.bring_home(values)  # what goes to disk leaves the host's arena
            self._bring_home(values)
        for i, group in self.groups:
            values[i] = self.optimizer.param_groups[group]
        if self._constants[0] != loss_scale:
            self._constants = loss_scale, self._made_of(loss_scale)
        for i, value in self._constants[1]:
            values[i] = value
        return values

    def _bring_home(self, values: list[Any]) -> None:
        """Let what lives in the host's memory be there: it may have been loaded, or made anew."""
        given = next(value for value in values if isinstance(value, Tensor))
        if _compat.is_fake(given):
            for i, count in self.staging:
                values[i] = given.new_empty(count, dtype=torch.uint8, device=HOST)
            return
        arena = arena_of(self.optimizer)
        is_new = arena is None or arena is not self._arena
        if is_new:
            layouts = {home: Form.of(values[i]) for i, home in self.homes}
            staging_bytes = sum(count for _, count in self.staging)
            arena = arena_for(self.optimizer, layouts, staging_bytes, self.device)
            self._arena = arena
        assert arena is not None
        away = [(i, home) for i, home in self.homes if not arena.bring_home(home, values[i])]
        if away and is_new:
            gc.collect()  # what tracing has left behind looks at parameters too
            for i, home in away:
                arena.bring_home(home, values[i])
        if is_new and (streams := streams_of(self.device)) is not None:
            streams.return_pinned()  # where parameters were, as `shard` had left them
        for i, _ in self.staging:
            values[i] = arena.staging

    def _restore_state(self) -> None:
        """Begin with fresh state where somebody has cleared it, as the optimizer itself would."""
        create_state(self.layout, self.parameters, home=self.state_home)

    def _made_of(self, loss_scale: float) -> list[tuple[int, Tensor]]:
        """The inputs that depend on the loss scale alone."""
        return [
            (i, torch.full(like.shape, number, dtype=like.dtype, device=like.device))
            for wanted, number in (
                (self.tangents, loss_scale / self._micro_batches),
                (self.inverse_scales, 1.0 / loss_scale),
            )
            for i, like in wanted
        ]
