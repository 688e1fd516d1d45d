"""What ZeRO moves and holds inside of the stages of a pipeline that is only looked at.

    zero    gathers                              reduces
    0, 1    at 1 in a stage's first forward      in its last backward
    2       in its first forward                 in each backward
    3       in each forward and each backward    in each backward

They run beside the compute of the same action, which takes what the slower of both takes. So a
stage 3 that keeps nothing from one gather to the next is meant: what `prefetch` keeps is faster.
Casts in front of a gather and behind a reduce, and the sums of micro-batches' gradients, compute.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from fxzero.cost import CostModel
from fxzero.cost.model import TransferCost
from fxzero.graph import Lane, Phase, Role, StepGraph
from fxzero.graph.stamps import BESIDE_COMPUTE, stamp_of
from fxzero.graph.steady import runs_of
from fxzero.graph.step_graph import TransferNodes
from fxzero.inspect.capture import Capture
from fxzero.inspect.model_states import ModelStates
from fxzero.pipeline.tables import Action, Table, Work
from fxzero.schedule.stages import Stage, Stages, states_of
from fxzero.transfer import sent_share

_MAKES = (Work.BACKWARD, Work.WEIGHT_GRADIENTS)
"""What makes gradients of parameters."""
_READS = (Work.FORWARD, Work.BACKWARD, Work.INPUT_GRADIENTS)
"""What reads parameters."""
_CASTS = (Role.PREPARE, Role.FINISH, Role.ACCUMULATE)
_GATHERS_HELD, _REDUCES_HELD = 3, 2
"""Buckets: one that is read and two on their way, as `prefetch` allows by itself; two reduces."""


@dataclass(frozen=True)
class Moved:
    """What some transfers take and send, of all of the model's parameters once."""

    cost: TransferCost
    sent_bytes: float

    @staticmethod
    def by(transfers: Sequence[TransferNodes], costs: CostModel) -> Moved:
        """One after the other."""
        each = [costs.transfer(transfer.record) for transfer in transfers]
        records = [transfer.record for transfer in transfers]
        return Moved(
            TransferCost(sum(c.wire_us for c in each), sum(c.host_us for c in each)),
            sum(r.full_bytes * sent_share(r.kind, r.size) for r in records),
        )


@dataclass(frozen=True)
class ZeroInside:
    """What the ranks that share a stage move, for all of the model."""

    zero: int
    num_shards: int
    num_parameters: int
    gather: Moved
    """Every parameter."""
    reduce: Moved
    """Every gradient, over replicas too."""
    bucket_bytes: int
    """The largest."""
    states_by_name: Mapping[str, ModelStates]
    """What a rank of a parameter's stage holds of it."""
    casts_us: Mapping[Phase, float] = field(default_factory=dict)
    """By phase, what a step computes for its transfers of every parameter, and to sum gradients."""

    @classmethod
    def of(cls, capture: Capture, costs: CostModel) -> ZeroInside:
        """From the step of the whole model on the ranks of one stage."""
        (compilation,) = capture.compilations
        assert compilation.joint is not None
        moved = [t for t in compilation.joint.transfers() if t.is_placed and t.of_parameters]
        gathers = _once(t for t in moved if t.stamp.lane is Lane.GATHER)
        reduces = _once(t for t in moved if t.stamp.lane is Lane.REDUCE)
        return cls(
            capture.zero,
            capture.num_shards,
            capture.num_parameters,
            Moved.by(gathers, costs),
            Moved.by(reduces, costs),
            max((t.record.full_bytes for t in (*gathers, *reduces)), default=0),
            ModelStates.by_parameter([compilation.joint], capture.trained),
            _casts_us(compilation.joint, costs),
        )

    @property
    def states(self) -> float:
        """What training holds of a parameter, in what a rank has of it from step to step: by which
        stages are cut that have room."""
        return states_of(self.zero, self.num_shards) * self._shards

    @property
    def _shards(self) -> int:
        """In how many parts a parameter is: at stage 0 every rank has all of it."""
        return self.num_shards if self.zero else 1

    def states_of_stages(self, found: Stages) -> tuple[ModelStates, ...]:
        """By stage, what a rank holds of its parameters. Those that nothing reads are of the first,
        where `fxzero.shard` puts them."""
        held = [ModelStates() for _ in found.stages]
        for name, states in self.states_by_name.items():
            for stage in found.holders.get(name, (0,)):
                held[stage] += states
        return tuple(held)

    def gathered_bytes(self, stage: Stage) -> int:
        """Full parameters of a stage that are gathered to be read, and gone again: it is there
        once, however far its gathers are ahead. What has been gathered for all of a step, at stages
        1 and 2, is among the model states."""
        gathers = _GATHERS_HELD if self.zero == 3 and self.gather.sent_bytes else 0
        return min(gathers * self.bucket_bytes, stage.parameter_bytes * self._shards)

    def reduced_bytes(self, stage: Stage) -> int:
        """Full gradients of a stage on their way, of two micro-steps."""
        reduces = _REDUCES_HELD if self.zero >= 2 and self.reduce.sent_bytes else 0
        return reduces * min(self.bucket_bytes, stage.parameter_bytes * self._shards)

    def casting(
        self, compute_us: Callable[[Action], float], stages: Sequence[Stage], table: Table
    ) -> Callable[[Action], float]:
        """What actions compute, with what they do for transfers."""
        forward_us, backward_us = (
            self.casts_us.get(phase, 0.0) / self.num_parameters / table.num_micro_steps
            for phase in (Phase.FORWARD, Phase.BACKWARD)
        )

        def action_us(action: Action) -> float:
            num_parameters = stages[action.stage].num_parameters
            casts_us = forward_us * (action.work is Work.FORWARD)
            casts_us += backward_us * (action.work in _MAKES)
            return compute_us(action) + num_parameters * casts_us

        return action_us

    def beside(
        self, compute_us: Callable[[Action], float], stages: Sequence[Stage], table: Table
    ) -> Callable[[Action], float]:
        """What actions take with the transfers beside their compute."""
        moved_by = self.moved_by(table)

        def action_us(action: Action) -> float:
            share = stages[action.stage].num_parameters / self.num_parameters
            costs = [moved.cost for moved in moved_by(action)]
            wire_us = share * sum(cost.wire_us for cost in costs)
            host_us = share * sum(cost.host_us for cost in costs)
            return max(compute_us(action) + host_us, wire_us)

        return action_us

    def moved_by(self, table: Table) -> Callable[[Action], list[Moved]]:
        """What runs beside an action, as if its stage were all of the model."""
        last = {a.stage: a for row in table.ranks for a in row if a.work in _MAKES}

        def moved(action: Action) -> list[Moved]:
            found = [self.gather] if self._gathers(action) else []
            if action.work in _MAKES and (self.zero >= 2 or last[action.stage] == action):
                found.append(self.reduce)
            return found

        return moved

    def _gathers(self, action: Action) -> bool:
        if self.zero == 3:
            return action.work in _READS
        return self.zero > 0 and action.work is Work.FORWARD and action.micro_step == 0


def _casts_us(graph: StepGraph, costs: CostModel) -> dict[Phase, float]:
    found: dict[Phase, float] = {}
    for node in graph.graph.nodes:
        stamp = stamp_of(node) if node.op == "call_function" else None
        if stamp is not None and stamp.role in _CASTS and stamp.lane not in BESIDE_COMPUTE:
            us = costs.compute_us([node]) * runs_of(graph, stamp)
            found[stamp.phase] = found.get(stamp.phase, 0.0) + us
    return found


def _once(transfers: Iterable[TransferNodes]) -> list[TransferNodes]:
    """The first of those that carry the same parameters in the same group."""
    found: dict[tuple[str, str], TransferNodes] = {}
    for transfer in transfers:
        carried = [(transfer.record.group, name) for name in transfer.stamp.params]
        if not found.keys() & {*carried}:
            found |= dict.fromkeys(carried, transfer)
    return list({transfer.launch: transfer for transfer in found.values()}.values())
