"""What ZeRO moves and holds inside of the stages of a pipeline that is only looked at.

    zero    gathers                              reduces
    0, 1    at 1 in a stage's first forward      in its last backward
    2       in its first forward                 in each backward
    3       in each forward and each backward    in each backward

They run beside the compute of the same action, which takes what the slower of both takes. So a
stage 3 that keeps nothing from one gather to the next is meant: what `prefetch` keeps is faster.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from fxzero.cost import CostModel
from fxzero.cost.model import TransferCost
from fxzero.graph import Lane
from fxzero.graph.step_graph import TransferNodes
from fxzero.inspect.capture import Capture
from fxzero.pipeline.tables import Action, Table, Work
from fxzero.schedule.stages import Stage, states_of

_MAKES = (Work.BACKWARD, Work.WEIGHT_GRADIENTS)
"""What makes gradients of parameters."""
_READS = (Work.FORWARD, Work.BACKWARD, Work.INPUT_GRADIENTS)
"""What reads parameters."""
_GATHERS_HELD, _REDUCES_HELD = 3, 2
"""Buckets: one that is read and two on their way, as `prefetch` allows by itself; two reduces."""


@dataclass(frozen=True)
class ZeroInside:
    """What the ranks that share a stage move, for all of the model."""

    zero: int
    num_shards: int
    num_parameters: int
    gather: TransferCost
    """Of every parameter once."""
    reduce: TransferCost
    """Of every gradient once."""
    bucket_bytes: int
    """The largest."""

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
            capture.world_size,
            capture.num_parameters,
            _sum(gathers, costs),
            _sum(reduces, costs),
            max((t.record.full_bytes for t in (*gathers, *reduces)), default=0),
        )

    @property
    def states(self) -> float:
        """What training holds of a parameter, in what a rank has of it from step to step."""
        return states_of(self.zero, self.num_shards) * self._shards

    @property
    def _shards(self) -> int:
        """In how many parts a parameter is: at stage 0 every rank has all of it."""
        return self.num_shards if self.zero else 1

    def held_bytes(self, stage: Stage) -> int:
        """Model states of a stage, and what is on its way."""
        full_bytes = stage.parameter_bytes * self._shards
        gathers = _GATHERS_HELD if self.zero == 3 else 0
        reduces = _REDUCES_HELD if self.zero >= 2 else 0
        # A stage is there once, however far its gathers are ahead; of two micro-steps gradients.
        on_way = min(gathers * self.bucket_bytes, full_bytes)
        on_way += reduces * min(self.bucket_bytes, full_bytes)
        return round(self.states * stage.parameter_bytes) + on_way * (self.num_shards > 1)

    def beside(
        self, compute_us: Callable[[Action], float], stages: Sequence[Stage], table: Table
    ) -> Callable[[Action], float]:
        """What actions take with the transfers beside their compute."""
        last = {a.stage: a for row in table.ranks for a in row if a.work in _MAKES}

        def action_us(action: Action) -> float:
            share = stages[action.stage].num_parameters / self.num_parameters
            transfers = [self.gather] if self._gathers(action) else []
            if action.work in _MAKES and (self.zero >= 2 or last[action.stage] == action):
                transfers.append(self.reduce)
            wire_us = share * sum(cost.wire_us for cost in transfers)
            host_us = share * sum(cost.host_us for cost in transfers)
            return max(compute_us(action) + host_us, wire_us)

        return action_us

    def _gathers(self, action: Action) -> bool:
        if self.zero == 3:
            return action.work in _READS
        return self.zero > 0 and action.work is Work.FORWARD and action.micro_step == 0


def _once(transfers: Iterable[TransferNodes]) -> list[TransferNodes]:
    """The first of those that carry the same parameters."""
    found: dict[str, TransferNodes] = {}
    for transfer in transfers:
        if not found.keys() & {*transfer.stamp.params}:
            found |= dict.fromkeys(transfer.stamp.params, transfer)
    return list({transfer.launch: transfer for transfer in found.values()}.values())


def _sum(transfers: Sequence[TransferNodes], costs: CostModel) -> TransferCost:
    each = [costs.transfer(transfer.record) for transfer in transfers]
    return TransferCost(sum(c.wire_us for c in each), sum(c.host_us for c in each))
