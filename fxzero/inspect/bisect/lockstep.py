"""Run the graphs of all ranks in one process, node by node in lockstep.

Collectives compute what they mean, on the list of all ranks' values, and are stricter
than any real backend: the result of a launch is NaN until its wait, a released tensor, or one that
left its place in a slab, is NaN from then on. A schedule that reads too early or too late gives
other numbers, and so do two results that have one place.

Markers mean what their documentation says, so a graph can be run before and after any pass.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxzero._compat import OpOverload, arguments_of, step_without_hooks
from fxzero.cost.own_step import at_its_first_step
from fxzero.errors import VerificationError
from fxzero.graph import StepGraph
from fxzero.graph.launch import wait
from fxzero.graph.node_text import node_line
from fxzero.graph.pieces import Piece
from fxzero.runtime import collectives
from fxzero.runtime.slab import Places, slab, vacate
from fxzero.runtime.updates import OwnStep, ready
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
    owns_inputs: bool = False
    """Whether inputs are changed in place, and not copies of them."""

    def run(self, inputs: Sequence[Sequence[Any]]) -> list[tuple[Any, ...]]:
        """Run all nodes and return what each rank returns."""
        environment: list[dict[fx.Node, Any]] = [{} for _ in self.graphs]
        feeds = [iter(values) for values in inputs]
        for nodes in zip(*(g.graph.nodes for g in self.graphs), strict=True):
            if len({(n.op, _called(n)) for n in nodes}) > 1:
                raise VerificationError(
                    "ranks call different things in one place: "
                    + "; ".join(node_line(node) for node in nodes)
                )
            if nodes[0].op == "placeholder":
                values = [next(feed) for feed in feeds]
                if not self.owns_inputs:
                    values = [_own(value) for value in values]
            else:
                arguments = [
                    arguments_of(n, env.__getitem__)
                    for n, env in zip(nodes, environment, strict=True)
                ]
                if nodes[0].op == "output":
                    if self.pending:
                        raise VerificationError("a collective was never waited for")
                    return [tuple(args[0]) for args, _ in arguments]
                values = self.call(nodes[0].target, arguments)
            for env, node, value in zip(environment, nodes, values, strict=True):
                env[node] = value
        raise AssertionError("the graph has no output")

    def call(self, target: Any, arguments: Sequence[tuple[Any, Any]]) -> Values:
        """One node on all ranks."""
        sent = [args[0] for args, _ in arguments]
        if target is _fxzero.unshard.default:
            spec = [g.specs[args[1]] for g, (args, _) in zip(self.graphs, arguments, strict=True)]
            return self.unshard(sent, spec)
        if target is _fxzero.reshard_grad.default:
            spec = [g.specs[args[1]] for g, (args, _) in zip(self.graphs, arguments, strict=True)]
            return self.reshard(sent, spec)
        if target is _c10d.all_gather_into_tensor_coalesced.default:
            return self.launch(sent, lambda parts: [torch.cat(parts)] * len(parts))
        if target is _c10d.reduce_scatter_tensor_coalesced.default:
            reduce = _REDUCTIONS[arguments[0][0][1]]
            return self.launch(sent, lambda full: list(reduce(full).chunk(len(full))))
        if target is _c10d.all_reduce_coalesced.default:
            reduce = _REDUCTIONS[arguments[0][0][1]]
            return self.launch(sent, lambda full: [reduce(full)] * len(full))
        if target in _OF_GLOO:
            return self.of_gloo(target, arguments)
        if target is wait:
            return [[self.arrived(buffer) for buffer in buffers] for buffers in sent]
        if target is slab:
            return [slab(*args).fill_(255) for args, _ in arguments]
        if target in (_fxzero.release.default, vacate):
            for tensors in sent:
                for tensor in tensors:
                    _spoil(tensor)
            return [None] * len(sent)
        if isinstance(target, OwnStep):
            for args, _ in arguments:
                _own_step(target, *args)
            return [None] * len(arguments)
        return [target(*args, **kwargs) for args, kwargs in arguments]

    def launch(self, sent: Sequence[Sequence[Tensor]], collective: Any) -> Values:
        """Start a coalesced collective: take what is sent now, deliver at the wait."""
        buffers: list[list[Tensor]] = [[] for _ in sent]
        for tensors in zip(*sent, strict=True):
            for rank, result in enumerate(collective(list(tensors))):
                buffer = _spoil(torch.empty_like(result))
                self.promise(buffer, result)
                buffers[rank].append(buffer)
        return buffers

    def promise(self, buffer: Tensor, result: Tensor) -> None:
        """Note what a wait shall deliver. Tensors without elements all have one address."""
        if buffer.numel():
            self.pending[buffer.data_ptr()] = result.clone()

    def arrived(self, buffer: Tensor) -> Tensor:
        """Deliver what a launch has promised."""
        if not buffer.numel():
            return buffer
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
        sent = self.owned.pop(buffer.data_ptr(), None)
        if sent is not None:
            _spoil(sent)
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
            self.means[buffer.data_ptr()] = _spoil(means.take(row, row.shape))
            for _ in range(args[1] - 2):
                _spoil(others.take(row, row.shape))

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
                buffer = _spoil(taken)
                self.promise(buffer, result)
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


def _own_step(
    step: OwnStep,
    params: list[Tensor],
    grads: list[Tensor],
    scale: Tensor | None,
    skip: Tensor | None,
) -> None:
    """An optimizer's own step on one rank's parts. The optimizer itself has parameters of a model
    that is laid out over ranks which are not there."""
    if skip is not None and skip.item():
        return
    parts = [nn.Parameter(param) for param in params]
    for part, grad in zip(parts, ready(grads, params, scale), strict=True):
        part.grad = grad
    step_without_hooks(at_its_first_step(step, parts))


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


_REDUCTIONS = {"sum": _sum, "avg": _mean}


def _called(node: fx.Node) -> Any:
    """What a node calls, equal on all ranks."""
    target = node.target
    if isinstance(target, Piece):
        return target.digest
    # What is made for one rank's graph, as a region or an update is, has a name alone.
    known = isinstance(target, (OpOverload, FunctionType, BuiltinFunctionType, str))
    return target if known else getattr(target, "__name__", type(target).__name__)


def _spoil(tensor: Tensor) -> Tensor:
    """Fill a tensor with what whoever reads it too early cannot overlook: NaN, or of integers the
    largest one."""
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        return tensor.fill_(math.nan)
    return tensor.fill_(True if tensor.dtype is torch.bool else torch.iinfo(tensor.dtype).max)
