"""Repeat forward and backward for every micro-batch of a step, and add up the gradients.

    x = micro_batch(batch, 0, 2)              x = batch[:2];   loss = …; dw = …
    loss = …; dw = …                      →   x1 = batch[2:];  loss1 = …; dw1 = …
    return loss, dw                           return mean(loss, loss1), dw + dw1

The gradients are added in the order in which an eager loop would. A buffer that the forward
changes (BatchNorm's statistics) goes from each micro-batch to the next. Of more than five
micro-batches the graph holds five: see `fxzero.graph.steady`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import fx

from fxzero._compat import copy_node
from fxzero.errors import ConfigError
from fxzero.graph import Phase, Role, Stamp, StepGraph
from fxzero.graph.stamps import set_stamp, stamp_of
from fxzero.graph.steady import UNROLLED, steady_runs
from fxzero.passes.base import Context, Door, Fact, Notes
from fxzero.passes.decision import DecidingPass, Decision

_aten = torch.ops.aten
_MICRO_BATCH = torch.ops.fxzero.micro_batch.default


def take_rows(graph: StepGraph, unrolled: int) -> None:
    """Let each micro-batch be a view of the whole batch.

    The views are no part of any region, which would be another one for every micro-batch.

    Args:
        unrolled: how many micro-steps the graph holds. The last one is the step's last.
    """
    for node in list(graph.graph.find_nodes(op="call_function", target=_MICRO_BATCH)):
        batch, index, count = node.args
        if index == unrolled - 1:
            index = count - 1
        rows = batch.meta["val"].shape[0] // count
        with graph.graph.inserting_before(node), graph.made_for(node):
            view = graph.call(
                _aten.slice.Tensor,
                (batch, 0, index * rows, (index + 1) * rows),
                stamp=stamp_of(node).but(role=Role.ROWS, made_by="accumulate"),
            )
        node.replace_all_uses_with(view)
        graph.graph.erase_node(node)


def repeat_micro_step(
    graph: StepGraph, nodes: list[fx.Node], micro_step: int, known: dict[fx.Node, fx.Node]
) -> dict[fx.Node, fx.Node]:
    """Copy a micro-step's nodes to the end of the graph, for another micro-batch.

    Args:
        known: what stands for nodes that are not copied.

    Returns:
        What stands for each node.
    """
    copies = dict(known)
    with graph.graph.inserting_before(graph.output):
        for node in nodes:
            if node.op == "get_attr":
                continue
            copy = copy_node(graph.graph, node, lambda n: copies.get(n, n))
            if node.target is _MICRO_BATCH:
                copy.args = (copy.args[0], micro_step, copy.args[2])
            set_stamp(copy, stamp_of(node).but(micro_step=micro_step))
            copies[node] = copy
    return copies


def add_up(graph: StepGraph, terms: list[fx.Node]) -> fx.Node:
    """Say that a gradient is the sum of what the micro-steps give; see `shard_grads`."""
    total = terms[0]
    for term in terms[1:]:
        stamp = stamp_of(term).but(role=Role.ACCUMULATE, made_by="accumulate")
        with graph.graph.inserting_before(graph.output), graph.made_for(term):
            total = graph.call(_aten.add.Tensor, (total, term), stamp=stamp)
    return total


def mean(graph: StepGraph, losses: list[fx.Node]) -> fx.Node:
    """The mean of the micro-batches' losses, once the last one is there."""
    stamp = Stamp(Phase.OPTIMIZER, made_by="accumulate")
    with graph.graph.inserting_before(graph.output), graph.made_for(losses[0]):
        stacked = graph.call(_aten.stack.default, (losses,), stamp=stamp)
        return graph.call(_aten.mean.default, (stacked,), stamp=stamp)


@dataclass(frozen=True)
class Held(Decision):
    """How much of a step its graph holds."""

    micro_steps: int
    """All of the step's, or five, of which the fourth stands for several."""


@dataclass(frozen=True)
class Accumulate(DecidingPass[Held]):
    """Run several micro-batches in one step."""

    name: ClassVar[str] = "accumulate"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.STAMPED, Fact.RECOMPUTED})
    provides: ClassVar[frozenset[Fact]] = frozenset({Fact.ACCUMULATED})
    decides: ClassVar[type[Any]] = Held
    doors: ClassVar[frozenset[Door]] = frozenset({Door.STEP})

    micro_batches: int = 1
    """Into how many equal parts a batch is split along dim 0."""
    unroll: str = field(default="", repr=False)
    """Why the graph shall hold all of them, however many there are; empty if five may do."""

    def __post_init__(self) -> None:
        """A batch has one part or more."""
        super().__post_init__()
        if self.micro_batches < 1:
            raise ConfigError(f"micro_batches={self.micro_batches} must be 1 or more")

    def decide(self, graph: StepGraph, ctx: Context) -> Held:
        """Five, unless there are fewer or a schedule has shown that it does not repeat."""
        most = self.micro_batches if self.unroll else UNROLLED
        return Held(min(self.micro_batches, most))

    def apply(self, graph: StepGraph, decision: Held, ctx: Context) -> Notes:
        """See the module's docstring.

        Raises:
            ConfigError: the graph of such a step cannot hold so many.
        """
        unrolled = decision.micro_steps
        allowed = {self.micro_batches, min(self.micro_batches, UNROLLED)}
        if unrolled not in allowed:
            raise ConfigError(
                f"the plan's accumulate.micro_steps={unrolled}: of {self.micro_batches} "
                f"micro-batches the graph holds {' or '.join(map(str, sorted(allowed)))}"
            )
        nodes = list(graph.nodes())
        first = list(graph.output_values)
        changed, loss = graph.changed, graph.loss
        assert loss is not None
        values = [list(first)]
        if unrolled < self.micro_batches:
            graph.steady_runs = steady_runs(self.micro_batches)
        for micro_step in range(1, unrolled):
            before = {source: values[-1][position] for position, source in changed.items()}
            copies = repeat_micro_step(graph, nodes, micro_step, before)
            values.append([copies.get(v, v) if isinstance(v, fx.Node) else v for v in first])
        result = list(values[-1])
        if self.micro_batches > 1:
            result[loss] = mean(graph, [v[loss] for v in values])
            for position in graph.gradients:
                if isinstance(first[position], fx.Node):
                    result[position] = add_up(graph, [v[position] for v in values])
        graph.set_output_values(result)
        take_rows(graph, unrolled)
        why = {"because": self.unroll} if self.unroll else {}
        return Notes(micro_batches=self.micro_batches, unrolled=unrolled, nodes=len(nodes), **why)
