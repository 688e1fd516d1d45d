"""End every gradient in the update of its parameter.

    g = wait(reduce)[0]                    g = wait(reduce)[0]
    return loss, g                     →   adamw([p], [g], [[exp_avg], …, [step]], group_0, …)
                                           return loss

The gradients of a bucket are there together, so their parameters are updated together, by
one call of torch's fused kernel for each parameter group among them. A gradient thus never
outlives its update. Where `fxzero.kernels.adamw_` was measured to be faster for a bucket of Adam or
AdamW it takes the place of torch's. An optimizer without such a kernel runs its own ``step()`` once
all gradients are there. Buffers that the forward changed get their new values.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import fx

from fxzero._compat import create_node
from fxzero.cost.kernel_table import WORTHWHILE
from fxzero.errors import ConfigError
from fxzero.graph import Phase, Role, Stamp, StepGraph
from fxzero.graph.aliases import root
from fxzero.graph.stamps import set_stamp, stamp_of
from fxzero.passes.base import Context, Door, Fact, Notes
from fxzero.passes.decision import DecidingPass, Decision
from fxzero.passes.lower_kernels import UPDATE, LowerKernels, gpu_name
from fxzero.passes.updated_together import (
    Ready,
    Together,
    fits_own_kernel,
    moved_bytes,
    ready_together,
    updated_together,
)
from fxzero.runtime import updates
from fxzero.runtime.optimizers import OptimizerLayout

_aten = torch.ops.aten


def _shared_gradients(together: list[Together]) -> set[fx.Node]:
    """Gradients in one memory: those of ``a`` and ``b`` in ``a + b``."""
    grads = [grad for update in together for grad in update.grads]
    times = Counter(map(root, grads))
    return {grad for grad in grads if times[root(grad)] > 1}


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

    def own_gradient(self, grad: fx.Node) -> fx.Node:
        """Emit a copy of a gradient that another parameter has too: each update scales its own, in
        place."""
        stamp = stamp_of(grad).but(role=Role.FINISH, phase=Phase.OPTIMIZER, made_by="update")
        return self.graph.call(_aten.clone.default, (grad,), stamp=stamp)

    def fused(self, together: Together, own: bool) -> None:
        """Emit a fused update of parameters of one group, by our own kernel or by torch's."""
        keys, kernel = together.keys, self.layout.kernels[together.group]
        params = [self.params[key] for key in keys]
        state = [[self.state(key, name) for key in keys] for name in kernel.state]
        place = self.graph.specs[keys[0]].layer.replace(".", "_")
        group = self.group(together.group)
        target: Callable[..., Any] = updates.KERNELS[kernel.name]
        if own:
            from fxzero.kernels.bucket_update import BucketAdam

            target = BucketAdam(decoupled=kernel.name == "adamw")
        args = (params, together.grads, state, group, self.graph.scale, self.graph.skip)
        self.update(target, keys, args, f"update_{place}")

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
        # Of the device, whoever holds it: what is on the host is so by `offload_states`.
        device = tensor.device if name == "step" else self.params[key].meta["val"].device
        like = {"dtype": tensor.dtype, "device": device}
        value = self.graph.value_of(torch.empty, (shape,), like)
        label = f"{name}_{spec.name.replace('.', '_')}"
        return self.graph.input(label, value, ("state", key, name))

    def group(self, index: int) -> fx.Node:
        """An input: a parameter group, as the optimizer has it."""
        if index not in self.groups:
            self.groups[index] = self.graph.input(f"group_{index}", None, ("group", index))
        return self.groups[index]


@dataclass(frozen=True)
class BucketUpdate:
    """By what the parameters of one group that are ready together are updated."""

    place: str
    """The bucket that brings their gradients, or the layer whose backward ends with them."""
    group: int
    kernel: str
    """``"torch"``, or ``"fxzero"`` for our own."""
    speedup: float | None = None
    """Torch's time over our kernel's, by the table."""


@dataclass(frozen=True)
class Updates(Decision):
    """The updates for which our own kernel was considered; all others are by torch's."""

    updates: tuple[BucketUpdate, ...] = ()


@dataclass(frozen=True)
class Update(DecidingPass[Updates]):
    """Update parameters as soon as their gradients are there."""

    name: ClassVar[str] = "update"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.REDUCED, Fact.BUCKETED})
    provides: ClassVar[frozenset[Fact]] = frozenset({Fact.UPDATED})
    doors: ClassVar[frozenset[Door]] = frozenset({Door.STEP})
    decides: ClassVar[type[Any]] = Updates

    kernels: LowerKernels = field(default_factory=LowerKernels, repr=False)
    """Which of our kernels may be used: see `fxzero.passes.lower_kernels`."""
    replayed: bool = field(default=False, repr=False)
    """Whether a CUDA graph replays the step. It could not tell whether parameters still count
    their steps alike, which our kernel needs."""
    offloaded: bool = field(default=False, repr=False)
    """Whether state is to live on the host, where our kernel does not go: then it is taken where
    somebody asks for it, and not by a table."""

    def decide(self, graph: StepGraph, ctx: Context) -> Updates:
        """Take our own kernel where it fits and was measured to be faster, or is asked for."""
        layout = ctx.optimizer
        assert layout is not None
        may = self.kernels.enabled and not self.replayed
        forced = may and UPDATE in self.kernels.forced
        by_table = may and not self.offloaded
        table = self.kernels.table_for(gpu_name(graph)) if by_table else None
        found = []
        considered = updated_together(graph, layout) if forced or table is not None else []
        for together in considered:
            if not fits_own_kernel(layout, together) or _are_elsewhere(graph, together):
                continue
            speedup = None
            if table is not None:
                dtype = layout.parameters[together.keys[0]].dtype
                speedup = table.speedup(UPDATE, dtype, moved_bytes(graph, layout, together))
            kernel = "fxzero" if forced or (speedup or 0.0) >= WORTHWHILE else "torch"
            found.append(BucketUpdate(together.place, together.group, kernel, speedup))
        if UPDATE in self.kernels.force and not any(u.kernel == "fxzero" for u in found):
            where = f"on {layout.name}"
            if self.replayed:
                where = "in a step that a CUDA graph replays"
            elif not layout.kernels:
                where += ", whose own step() runs here"
            ctx.warnings.append(
                f"lower_kernels.force={self.kernels.force!r}: {UPDATE} has no effect {where}. It "
                "computes Adam and AdamW without amsgrad or maximize, on contiguous parameters in "
                "float32, bfloat16 or float64 whose steps the host can count."
            )
        return Updates(tuple(found))

    def apply(self, graph: StepGraph, decision: Updates, ctx: Context) -> Notes:
        """Emit the updates.

        Raises:
            ConfigError: it names an update that there is not, or a kernel that does not fit.
        """
        layout = ctx.optimizer
        assert layout is not None
        assert graph.loss is not None
        loss = graph.output_values[graph.loss]
        together = updated_together(graph, layout)
        own = _by_own_kernel(layout, together, decision)
        emitter = _Emitter(graph, layout)
        made = len(together)
        shared = _shared_gradients(together) if graph.scale is not None else set()
        with graph.graph.inserting_before(graph.output):
            if not layout.kernels and (ready := ready_together(graph, layout)):
                emitter.own(ready)
                made = 1
            for update in together:
                if not shared.isdisjoint(update.grads):
                    grads = [emitter.own_gradient(g) if g in shared else g for g in update.grads]
                    update = replace(update, grads=grads)
                emitter.fused(update, (update.place, update.group) in own)
            emitter.commit()
        graph.set_output_values((loss, graph.norm, graph.skip))
        graph.gradients, graph.changed = {}, {}
        return Notes(
            params=sum(len(stamp_of(node).params) for node in graph.nodes(role=Role.UPDATE)),
            updates=made,
            by=layout.name if layout.kernels else f"{layout.name}.step()",
            **({"own_kernel": len(own)} if own else {}),
        )


def _are_elsewhere(graph: StepGraph, together: Together) -> bool:
    """Whether parameters live on the host of the GPU that computes with them."""
    devices = {graph.specs[key].device for key in together.keys} - {None}
    return any(device is not None and device.type != "cpu" for device in devices)


def _by_own_kernel(
    layout: OptimizerLayout, together: list[Together], decision: Updates
) -> set[tuple[str, int]]:
    """The places and groups that a decision gives to our kernel.

    Raises:
        ConfigError: it names an update that there is not, or a kernel that does not fit.
    """
    known = {(update.place, update.group): update for update in together}
    found = set()
    for chosen in decision.updates:
        update = known.get((chosen.place, chosen.group))
        where = f"the plan's update of {chosen.place}, group {chosen.group},"
        if update is None:
            places = ", ".join(f"{place} of group {group}" for place, group in known) or "none"
            raise ConfigError(
                f"{where} is none of this graph: {places}. Where buckets were changed, drop "
                "update: it is then decided anew."
            )
        if chosen.kernel not in ("torch", "fxzero"):
            raise ConfigError(f"{where} is by {chosen.kernel!r}: 'torch' or 'fxzero'")
        if chosen.kernel == "fxzero":
            if not fits_own_kernel(layout, update):
                raise ConfigError(f"{where} is by adamw_, which does not compute {layout.name}")
            found.add((chosen.place, chosen.group))
    return found
