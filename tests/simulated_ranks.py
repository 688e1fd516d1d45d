"""Run the graphs of all ranks in one process, node by node in lockstep.

Collectives compute what they mean, on the list of all ranks' values, and are stricter
than any real backend: the result of a launch is NaN until its wait, a released tensor, or one that
left its place in a slab, is NaN from then on. A schedule that reads too early or too late gives
other numbers, and so do two results that have one place.

Markers mean what their documentation says, so a graph can be run before and after any pass.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from fxzero.graph import StepGraph
from fxzero.graph.launch import wait
from fxzero.graph.pieces import Piece
from fxzero.runtime import collectives
from fxzero.runtime.slab import Places, slab, vacate
from fxzero.sharding.params import ParamSpec

_c10d = torch.ops._c10d_functional
_fxzero = torch.ops.fxzero

_OF_GLOO = {
    collectives.gather,
    collectives.exchange,
    collectives.all_reduce,
    collectives.join,
    collectives.join_sum,
    collectives.join_exchange,
}

Values = list[Any]
"""One value per rank."""


def run(graphs: Sequence[StepGraph], inputs: Sequence[Sequence[Any]]) -> list[tuple[Any, ...]]:
    """What each rank's graph returns; `inputs` by rank, in the order of the placeholders."""
    return Lockstep(graphs).run(inputs)


def random_inputs(graphs: Sequence[StepGraph], seed: int = 0) -> list[list[Any]]:
    """Small whole numbers: shards of the same parameters, and data of each rank's own.

    Sums and products of small whole numbers are exact in float64, in any order.
    """
    generator = torch.Generator().manual_seed(seed)
    fulls: dict[str, Tensor] = {}
    inputs: list[list[Any]] = []
    for graph in graphs:
        values: list[Any] = []
        for node in graph.graph.find_nodes(op="placeholder"):
            fake = node.meta["val"]
            if not isinstance(fake, Tensor):
                values.append(None)  # a mesh
                continue
            key = graph.inputs.get(node)
            if key is None:
                values.append(_integers(fake.shape, fake.dtype, generator))
                continue
            spec = graph.specs[key]
            if spec.name not in fulls:
                fulls[spec.name] = _integers(spec.shape, spec.dtype, generator)
            full = fulls[spec.name]
            values.append(full.clone() if spec.shard_group is None else full[spec.local_rows])
        inputs.append(values)
    return inputs


def _integers(shape: Sequence[int], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    return torch.randint(-2, 3, tuple(shape), generator=generator).to(dtype)


@dataclass
class Lockstep:
    """One graph per rank of a one-axis world; equal but for the sizes of shards."""

    graphs: Sequence[StepGraph]
    pending: dict[int, Tensor] = field(default_factory=dict)
    """What a wait will find, by the address of the launch's buffer."""
    owned: dict[int, Tensor | None] = field(default_factory=dict)
    """What was sent and ends at the wait."""
    means: dict[int, Tensor] = field(default_factory=dict)
    """Where in a slab the mean of what arrives shall be."""

    def run(self, inputs: Sequence[Sequence[Any]]) -> list[tuple[Any, ...]]:
        """Run all nodes and return what each rank returns."""
        environment: list[dict[fx.Node, Any]] = [{} for _ in self.graphs]
        feeds = [iter(values) for values in inputs]
        for nodes in zip(*(g.graph.nodes for g in self.graphs), strict=True):
            assert len({(n.op, _called(n)) for n in nodes}) == 1, [n.format_node() for n in nodes]
            if nodes[0].op == "placeholder":
                values = [_own(next(feed)) for feed in feeds]
            else:
                arguments = [
                    fx.map_arg((n.args, n.kwargs), env.__getitem__)
                    for n, env in zip(nodes, environment, strict=True)
                ]
                if nodes[0].op == "output":
                    assert not self.pending, "a collective was never waited for"
                    return [tuple(args[0]) for args, _ in arguments]
                values = self.call(nodes[0].target, arguments)
            for env, node, value in zip(environment, nodes, values, strict=True):
                env[node] = value
        raise AssertionError("the graph has no output")

    def call(self, target: Any, arguments: Sequence[tuple[Any, Any]]) -> Values:
        """One node on all ranks."""
        sent = [args[0] for args, _ in arguments]
        if "reduce" in str(target) and isinstance(target, torch._ops.OpOverload):
            assert arguments[0][0][1] == "avg", "gradients are averaged over the ranks"
        if target is _fxzero.unshard.default:
            spec = [g.specs[args[1]] for g, (args, _) in zip(self.graphs, arguments, strict=True)]
            return self.unshard(sent, spec)
        if target is _fxzero.reshard_grad.default:
            spec = [g.specs[args[1]] for g, (args, _) in zip(self.graphs, arguments, strict=True)]
            return self.reshard(sent, spec)
        if target is _c10d.all_gather_into_tensor_coalesced.default:
            return self.launch(sent, lambda parts: [torch.cat(parts)] * len(parts))
        if target is _c10d.reduce_scatter_tensor_coalesced.default:
            return self.launch(sent, lambda full: list(_mean(full).chunk(len(full))))
        if target is _c10d.all_reduce_coalesced.default:
            return self.launch(sent, lambda full: [_mean(full)] * len(full))
        if target in _OF_GLOO:
            return self.of_gloo(target, arguments)
        if target is wait:
            return [[self.arrived(buffer) for buffer in buffers] for buffers in sent]
        if target is slab:
            return [slab(*args).fill_(255) for args, _ in arguments]
        if target in (_fxzero.release.default, vacate):
            for tensors in sent:
                for tensor in tensors:
                    tensor.fill_(math.nan)
            return [None] * len(sent)
        known = (torch._ops.OpOverload, Piece)
        assert target is operator.getitem or isinstance(target, known), target
        return [target(*args, **kwargs) for args, kwargs in arguments]

    def launch(self, sent: Sequence[Sequence[Tensor]], collective: Any) -> Values:
        """Start a coalesced collective: take what is sent now, deliver at the wait."""
        buffers: list[list[Tensor]] = [[] for _ in sent]
        for tensors in zip(*sent, strict=True):
            for rank, result in enumerate(collective(list(tensors))):
                buffer = torch.full_like(result, math.nan)
                self.pending[buffer.data_ptr()] = result.clone()
                buffers[rank].append(buffer)
        return buffers

    def arrived(self, buffer: Tensor) -> Tensor:
        """Deliver what a launch has promised."""
        return buffer.copy_(self.pending.pop(buffer.data_ptr()))

    def of_gloo(self, target: Any, arguments: Sequence[tuple[Any, Any]]) -> Values:
        """fxzero's own collectives: memory that ends with the join."""
        first = [args[0] for args, _ in arguments]
        if target is collectives.gather:
            fulls = [Places(*args[3:]) if args[3:] else None for args, _ in arguments]
            return self.start(first, torch.cat, places=fulls)
        if target is collectives.exchange:
            own = [args[3] for args, _ in arguments]
            started = self.start(first, _all_to_all, own)
            for buffers, (args, _) in zip(started, arguments, strict=True):
                self.reserve(buffers, args)
            return started
        if target is collectives.all_reduce:
            return self.start(first, _sum)
        return [
            [self.joined(target, buffer, args) for buffer in buffers]
            for buffers, (args, _) in zip(first, arguments, strict=True)
        ]

    def joined(self, target: Any, buffer: Tensor, args: Sequence[Any]) -> Tensor:
        """One tensor of what is joined."""
        value = self.arrived(buffer)
        if target is collectives.join_sum:
            value = value.div_(args[1])
        elif target is collectives.join_exchange:
            value = value.view(args[1], -1, *value.shape[1:]).mean(0)
        sent = self.owned.pop(buffer.data_ptr())
        if sent is not None:
            sent.fill_(math.nan)
        mean = self.means.pop(buffer.data_ptr(), None)
        return value if mean is None else mean.copy_(value)

    def reserve(self, buffers: list[Tensor], args: Sequence[Any]) -> None:
        """Let what arrives of gradients take its places in a slab, if there is one."""
        memory, (for_means, for_others) = args[4:] or (None, (0, 0))
        if memory is None:
            return
        means, others = Places(memory, for_means), Places(memory, for_others)
        for buffer in buffers:
            row = buffer.chunk(args[1])[0]
            self.means[buffer.data_ptr()] = means.take(row, row.shape).fill_(math.nan)
            for _ in range(args[1] - 2):
                others.take(row, row.shape).fill_(math.nan)

    def start(
        self,
        sent: Values,
        collective: Any,
        own: Values | None = None,
        places: Values | None = None,
    ) -> Values:
        """Start a collective on each rank's tensors; those that are `own` end at the join.

        Args:
            places: where each rank's results shall be, for those in a slab.
        """
        buffers: Values = [[] for _ in sent]
        for index, tensors in enumerate(zip(*sent, strict=True)):
            results = collective(list(tensors))
            results = results if isinstance(results, list) else [results] * len(sent)
            for rank, result in enumerate(results):
                found = None if places is None else places[rank]
                taken = (
                    torch.empty_like(result) if found is None else found.take(result, result.shape)
                )
                buffer = taken.fill_(math.nan)
                self.pending[buffer.data_ptr()] = result.clone()
                ends = own is not None and own[rank][index]
                self.owned[buffer.data_ptr()] = tensors[rank] if ends else None
                buffers[rank].append(buffer)
        return buffers

    def unshard(self, shards: Sequence[Tensor], specs: Sequence[ParamSpec]) -> Values:
        """The full parameter in its compute dtype, or the columns that a block is."""
        if (block := specs[0].block) is not None:
            shards = [shard[:, block.start : block.stop] for shard in shards]
        parts = [part.to(specs[0].compute_dtype) for part in shards]
        if specs[0].shard_group is None:
            return [part.clone() for part in parts]
        return [torch.cat(parts) for _ in parts]

    def reshard(self, grads: Sequence[Tensor], specs: Sequence[ParamSpec]) -> Values:
        """Each rank's rows of the mean gradient."""
        mean = _mean([grad.to(specs[0].reduce_dtype) for grad in grads]).to(specs[0].dtype)
        return [mean.clone() if s.shard_group is None else mean[s.local_rows] for s in specs]


def _own(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _all_to_all(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Each rank's rows of every tensor, in rank order."""
    rows = [tensor.chunk(len(tensors)) for tensor in tensors]
    return [torch.cat(parts) for parts in zip(*rows, strict=True)]


def _sum(tensors: Sequence[Tensor]) -> Tensor:
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        total += tensor
    return total


def _mean(tensors: Sequence[Tensor]) -> Tensor:
    return _sum(tensors) / len(tensors)


def _called(node: fx.Node) -> Any:
    """What a node calls, equal on all ranks."""
    return node.target.digest if isinstance(node.target, Piece) else node.target
