"""A step of `examples.benchmarks.megatron`'s GPT, predicted: what is captured, priced and replayed.

    one layer's joint graph     embedding ─ layer ─ head ┊ head ─ layer ─ embedding
    priced on a cluster         us of each, with the collectives that compute waits for
    a pipeline's table          forwards and backwards of stages of many layers, and messages

The graph is that of one micro-step, as fxzero's passes have it before anything is sharded. What is
repeated in backward is a forward once more, as Megatron-LM's checkpoints run it: a layer's, with
its collectives, or attention's core. fxzero's recomputation would leave out what nobody reads.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from examples.benchmarks.megatron import GPT, UPDATE, Flat, Shape
from fxzero.cost import AnalyticCosts, CostModel
from fxzero.cost.cluster import ClusterSpec
from fxzero.graph import Phase, Role, Stamp, StepGraph
from fxzero.graph.modules import module_path
from fxzero.graph.stamps import set_stamp, stamp_of
from fxzero.inspect.capture import fake_ranks
from fxzero.inspect.pipeline import collecting_micro_steps
from fxzero.pipeline.replay import replay_table
from fxzero.pipeline.tables import Action, Table, Work, interleaved, one_f_one_b
from fxzero.regions.region import regions_to_look_at
from fxzero.schedule.simulate import tasks_of
from fxzero.transfer import Transfer, TransferKind

OPTIONS = {"cost": {"cluster": "dgx_a100"}, "recompute": {"max_nodes": 0}}
"""Nothing is repeated but what is said here."""


@dataclass(frozen=True)
class Case:
    """A model, how it is split, and what its step took."""

    name: str
    shape: Shape
    """With sequence parallelism attention's core is repeated in backward, without it all layers."""
    pipeline: int
    """Ranks along it."""
    chunks: int
    """Stages of each of them."""
    micro_batches: int
    published_s: float

    @property
    def gpus(self) -> int:
        """Of all stages."""
        return self.pipeline * self.shape.tensor_parallel

    @property
    def layers_of_stage(self) -> int:
        """As many in each."""
        return self.shape.num_layers // (self.pipeline * self.chunks)

    @functools.cached_property
    def table(self) -> Table:
        """1F1B, interleaved where a rank has several stages."""
        if self.chunks == 1:
            return one_f_one_b(self.pipeline, self.micro_batches)
        return interleaved(self.pipeline, self.micro_batches, self.chunks)


@functools.cache
def micro_step(shape: Shape) -> StepGraph:
    """The joint graph of one micro-step of one layer between embedding and head."""
    with (
        fake_ranks(shape.tensor_parallel),
        FakeTensorMode(),
        regions_to_look_at(),
        collecting_micro_steps() as seen,
    ):
        model = GPT(replace(shape, num_layers=1))
        for parameter in model.parameters():
            parameter.data = parameter.data.half()
        ids = torch.zeros(shape.seq_len, shape.micro_batch, dtype=torch.int64)
        torch.compile(model, backend="fxzero", options=OPTIONS)(ids, ids).backward()
    ((graph, _),) = seen
    return graph


@dataclass(frozen=True)
class Part:
    """What one micro-batch takes in the embedding, in a layer, or in the head."""

    forward_us: float
    backward_us: float
    num_parameters: int
    """Of one rank."""


@dataclass(frozen=True)
class Parts:
    """A model's parts, priced."""

    embedding: Part
    layer: Part
    head: Part
    repeated_us: float
    """Of a layer's forward, in its backward again."""
    exposed_us: float
    """How long compute waits for collectives in a layer's forward and backward."""


def parts_of(shape: Shape, costs: CostModel) -> Parts:
    """Replay the micro-step's tasks, and take the time between the first tasks of two parts."""
    graph = micro_step(shape)
    program = tasks_of(graph, costs, fuses=True)
    simulation = program.run()
    phases = {group[0].name: stamp_of(group[0]).phase for group in program.groups}
    begins: dict[tuple[Phase, str], float] = {}
    for span in simulation.spans:
        begins.setdefault((phases[span.node], span.layer), span.start_us)
    there = [(Phase.FORWARD, part) for part in ("embedding", "layers.0", "head")]
    order = [*there, *((Phase.BACKWARD, part) for _, part in reversed(there))]
    us = {
        key: until - begin
        for key, (begin, until) in zip(
            order, pairwise([*(begins[key] for key in order), simulation.makespan_us]), strict=True
        )
    }
    sizes = {name: 0 for _, name in there}
    for spec in graph.specs.values():
        sizes[next(name for name in sizes if spec.name.startswith(name))] += spec.num_elements
    embedding, layer, head = (
        Part(us[Phase.FORWARD, name], us[Phase.BACKWARD, name], sizes[name]) for name in sizes
    )
    core = [
        node
        for node in graph.nodes(phase=Phase.FORWARD, role=Role.COMPUTE)
        if (module_path(node) or "").endswith("attention.core")
    ]
    exposed_us = sum(
        stall.us
        for stall in simulation.stalls
        if any(
            begins[key] < stall.start_us + stall.us <= begins[key] + us[key]
            for key in ((Phase.FORWARD, "layers.0"), (Phase.BACKWARD, "layers.0"))
        )
    )
    repeated_us = costs.compute_us(core) if shape.sequence_parallel else layer.forward_us
    return Parts(embedding, layer, head, repeated_us, exposed_us)


def update_us(num_parameters: int, costs: CostModel) -> float:
    """What the optimizer takes for a rank's parameters."""
    return sum(costs.compute_us(nodes) for nodes in _update(num_parameters))


@functools.cache
def _update(num_parameters: int) -> list[Sequence[fx.Node]]:
    with FakeTensorMode():
        flat = Flat(*(torch.empty(num_parameters) for _ in Flat._fields))
        traced = [make_fx(function)(flat).graph for function in UPDATE]
    found = [[n for n in graph.nodes if n.op == "call_function"] for graph in traced]
    for node in (node for graph in traced for node in graph.nodes):
        set_stamp(node, Stamp(Phase.OPTIMIZER))
    return found


@dataclass(frozen=True)
class Step:
    """A predicted step, of the pipeline's rank that has most to do, in seconds."""

    layers_s: float
    """Forwards and backwards."""
    repeated_s: float
    """Forwards once more, in backward."""
    ends_s: float
    """Embedding, or head and loss."""
    idle_s: float
    """Waiting for other ranks of the pipeline, messages on their way included."""
    update_s: float
    parts: Parts

    @property
    def seconds(self) -> float:
        """All of it."""
        return self.layers_s + self.repeated_s + self.ends_s + self.idle_s + self.update_s


def step_of(case: Case, cluster: ClusterSpec) -> Step:
    """Predict a step."""
    shape, last = case.shape, case.pipeline * case.chunks - 1
    nodes = -(-case.gpus // cluster.devices_per_node)
    costs = AnalyticCosts(replace(cluster, num_nodes=nodes))
    parts = parts_of(shape, costs)
    layers = case.layers_of_stage

    def ends(stage: int) -> list[Part]:
        return [parts.embedding] * (stage == 0) + [parts.head] * (stage == last)

    def action_us(action: Action) -> float:
        if action.work is Work.FORWARD:
            others = sum(end.forward_us for end in ends(action.stage))
            return layers * parts.layer.forward_us + others
        others = sum(end.backward_us for end in ends(action.stage))
        return layers * (parts.layer.backward_us + parts.repeated_us) + others

    message_us = _message_us(shape, costs)
    replayed = replay_table(case.table, action_us, lambda before, action: message_us)
    runs = case.micro_batches * case.chunks * layers
    layers_us = runs * (parts.layer.forward_us + parts.layer.backward_us)
    repeated_us = runs * parts.repeated_us
    ends_us = [0.0] * case.pipeline
    for stage, rank in case.table.rank_of.items():
        us = sum(end.forward_us + end.backward_us for end in ends(stage))
        ends_us[rank] += case.micro_batches * us
    idle_us = max(replayed.makespan_us - layers_us - repeated_us - max(ends_us), 0.0)
    # Where a rank has both ends they read one weight.
    largest = max(parts.embedding.num_parameters, parts.head.num_parameters)
    num_parameters = case.chunks * layers * parts.layer.num_parameters + largest
    every_us = (layers_us, repeated_us, max(ends_us), idle_us, update_us(num_parameters, costs))
    return Step(*(us * 1e-6 for us in every_us), parts)


def _message_us(shape: Shape, costs: AnalyticCosts) -> float:
    """What a stage gives to the next one: each rank of the node sends its part over its own port,
    and where the next one's layers need all of it they gather it (Narayanan et al. 2021, arXiv
    2104.04473, section 4.1)."""
    num_bytes = shape.seq_len * shape.micro_batch * shape.hidden * 2
    sent = costs.transfer(Transfer(TransferKind.SEND, num_bytes)).wire_us
    if shape.sequence_parallel:
        return sent
    gather = Transfer(TransferKind.ALL_GATHER, num_bytes, shape.tensor_parallel)
    return sent + costs.transfer(gather).wire_us
