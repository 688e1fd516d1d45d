"""End every gradient in the update of its parameter.

    g = wait(reduce)[0]                    g = wait(reduce)[0]
    return loss, g                     →   adamw([p], [g], [[exp_avg], …, [step]], group_0, …)
                                           return loss

The gradients of a bucket are there together, so their parameters are updated together, by
one call of torch's fused kernel for each parameter group among them. A gradient thus never
outlives its update. An optimizer without such a kernel runs its own ``step()`` once all
gradients are there. Buffers that the forward changed get their new values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from fxzero._compat import create_node
from fxzero.graph import Phase, Role, Stamp, StepGraph
from fxzero.graph.stamps import set_stamp, stamp_of
from fxzero.passes.base import Context, Door, Fact, Notes, Pass
from fxzero.runtime import updates
from fxzero.runtime.optimizers import Kernel, OptimizerLayout


@dataclass(frozen=True)
class Ready:
    """Gradients that are there at one time."""

    place: str
    """The bucket that brings them, or the layer whose backward ends with them."""
    keys: list[str]
    """Their parameters."""
    grads: list[fx.Node]


def ready_together(graph: StepGraph, layout: OptimizerLayout) -> list[Ready]:
    """The gradients of the optimizer's parameters, by the time at which they are there."""
    values = graph.output_values
    found: dict[str, Ready] = {}
    for position, key in graph.gradients.items():
        node = values[position]
        if not isinstance(node, fx.Node) or key not in layout.parameters:
            continue
        place = _bucket(node) or f"layer {stamp_of(node).layer}"
        ready = found.setdefault(place, Ready(place, [], []))
        ready.keys.append(key)
        ready.grads.append(node)
    return list(found.values())


def _bucket(node: fx.Node) -> str:
    """The bucket of the reduce that a gradient comes from; "" if nothing was reduced."""
    while node.op == "call_function":
        stamp = stamp_of(node)
        if stamp.bucket:
            return stamp.bucket
        if stamp.role is Role.ACCUMULATE:
            node = node.all_input_nodes[-1]
        elif stamp.role in (Role.PART, Role.WAIT, Role.FINISH):
            node = node.all_input_nodes[0]
        else:
            break
    return ""


class _Emitter:
    """Makes update nodes, and the inputs that they need."""

    def __init__(self, graph: StepGraph, layout: OptimizerLayout) -> None:
        self.graph = graph
        self.layout = layout
        self.params = {key: node for node, key in graph.inputs.items()}
        self.groups: dict[int, fx.Node] = {}

    def update(
        self, target: Callable[..., Any], keys: list[str], args: tuple[Any, ...], name: str
    ) -> None:
        """Emit one update of some parameters."""
        layers = {self.graph.specs[key].layer for key in keys}
        stamp = Stamp(
            Phase.OPTIMIZER,
            role=Role.UPDATE,
            layer=layers.pop() if len(layers) == 1 else "",
            params=tuple(keys),
            made_by="update",
        )
        node = create_node(self.graph.graph, "call_function", target, args, {}, name)
        node.meta["val"] = None
        set_stamp(node, stamp)

    def fused(self, keys: list[str], grads: list[fx.Node], index: int, kernel: Kernel) -> None:
        """Emit a fused update of parameters of one group."""
        params = [self.params[key] for key in keys]
        state = [[self.state(key, name) for key in keys] for name in kernel.state]
        place = self.graph.specs[keys[0]].layer.replace(".", "_")
        args = (params, grads, state, self.group(index), self.graph.scale, self.graph.skip)
        self.update(updates.KERNELS[kernel.name], keys, args, f"update_{place}")

    def own(self, ready: list[Ready]) -> None:
        """Emit the optimizer's own step."""
        keys = [key for r in ready for key in r.keys]
        grads = [grad for r in ready for grad in r.grads]
        params = [self.params[key] for key in keys]
        step = updates.OwnStep(self.layout.optimizer, [self.layout.parameters[key] for key in keys])
        args = (params, grads, self.graph.scale, self.graph.skip)
        self.update(step, keys, args, "update")

    def commit(self) -> None:
        """Emit the change of buffers."""
        values = self.graph.output_values
        changed = {source: values[position] for position, source in self.graph.changed.items()}
        if changed:
            args = (list(changed), list(changed.values()), self.graph.skip)
            self.update(updates.commit, [], args, "commit")

    def state(self, key: str, name: str) -> fx.Node:
        """An input: a tensor of the optimizer's state, on this rank."""
        spec = self.graph.specs[key]
        tensor = self.layout.optimizer.state[self.layout.parameters[key]][name]
        shape = spec.local_shape if tensor.shape == self.layout.parameters[key].shape else ()
        like = {"dtype": tensor.dtype, "device": tensor.device}
        value = self.graph.value_of(torch.empty, (shape,), like)
        label = f"{name}_{spec.name.replace('.', '_')}"
        return self.graph.input(label, value, ("state", key, name))

    def group(self, index: int) -> fx.Node:
        """An input: a parameter group, as the optimizer has it."""
        if index not in self.groups:
            self.groups[index] = self.graph.input(f"group_{index}", None, ("group", index))
        return self.groups[index]


@dataclass(frozen=True)
class Update(Pass):
    """Update parameters as soon as their gradients are there."""

    name: ClassVar[str] = "update"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.REDUCED, Fact.BUCKETED})
    provides: ClassVar[frozenset[Fact]] = frozenset({Fact.UPDATED})
    doors: ClassVar[frozenset[Door]] = frozenset({Door.STEP})

    def run(self, graph: StepGraph, ctx: Context) -> Notes:
        """See the module's docstring."""
        layout = ctx.optimizer
        assert layout is not None
        assert graph.loss is not None
        ready = ready_together(graph, layout)
        loss = graph.output_values[graph.loss]
        emitter = _Emitter(graph, layout)
        made = 0
        with graph.graph.inserting_before(graph.output):
            if not layout.kernels and ready:
                emitter.own(ready)
                made = 1
            for together in ready if layout.kernels else ():
                for index, kernel in enumerate(layout.kernels):
                    members = [
                        (key, grad)
                        for key, grad in zip(together.keys, together.grads, strict=True)
                        if layout.group[key] == index
                    ]
                    if members:
                        keys, grads = map(list, zip(*members, strict=True))
                        emitter.fused(keys, grads, index, kernel)
                        made += 1
            emitter.commit()
        graph.set_output_values((loss, graph.norm, graph.skip))
        graph.gradients, graph.changed = {}, {}
        by = layout.name if layout.kernels else f"{layout.name}.step()"
        return Notes(params=sum(len(r.keys) for r in ready), updates=made, by=by)
