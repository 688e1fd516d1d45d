"""The stages of a pipeline, read from a joint graph: what each computes, holds and sends.

    forward    embed ─ blocks.0 ─ blocks.1 ┊ blocks.2 ─ blocks.3 ─ head      ┊ the cut
    backward   what has come of a forward's node runs where that one does

What depends on no parameter (masks, positions, rotary tables) is computed where it is read instead
of being sent. What a later stage reads travels through those between, and its gradient comes back
the same way. A parameter that several stages read is held by each of them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
import torch
from torch import fx

from fxzero.cost.model import CostModel
from fxzero.errors import ConfigError
from fxzero.graph import StepGraph
from fxzero.graph.assign_stages import operator_of
from fxzero.graph.operators import num_bytes
from fxzero.graph.stamps import stamp_of
from fxzero.pipeline.tables import Table, in_flight
from fxzero.schedule.stage_cuts import Positions, best_cuts, reads_nothing
from fxzero.schedule.stage_memory import StageMemory
from fxzero.schedule.stage_operators import Operator, Operators
from fxzero.transfer import Transfer, TransferKind

MOST_POSITIONS = 400
"""Of more places to cut at, those where least crosses, one in each stretch of equal time."""
MODEL_STATES = 4
"""A parameter, its gradient and two moments: what training with AdamW holds, in parameters."""
_STATES = {0: (4, 0), 1: (2, 3), 2: (1, 4), 3: (0, 4)}
"""By ZeRO stage: of how many of these a rank has all, and of how many its part. At stages 1 and 2
it has what was gathered beside its part; gradients are parts once reduced, at 2 and 3."""


def states_of(zero: int, num_shards: int) -> float:
    """What a rank's training with AdamW holds of a parameter, in parameters of the master's dtype:
    section 5 of the ZeRO paper (Rajbhandari et al. 2020), and what is gathered.

    Args:
        zero: the ZeRO stage.
        num_shards: how many ranks share a stage of the pipeline.
    """
    whole, parts = _STATES[zero]
    return whole + parts / num_shards


_KEPT = (1.0, 0.5, 0.25, 0.0)
"""Shares of what a stage saves that are tried to be kept within a budget."""


@dataclass(frozen=True)
class Limit:
    """What a stage may hold: model states, and what micro-steps in flight have saved."""

    budget_bytes: float
    in_flight: tuple[int, ...]
    """By stage, of how many micro-steps it keeps what is saved."""
    states: float = MODEL_STATES
    """What training holds of a parameter, in parameters."""

    @staticmethod
    def of(table: Table, rank_bytes: float, states: float = MODEL_STATES) -> Limit:
        """What a stage may hold if a rank may hold so many bytes: its stages have equal parts."""
        each = table.num_stages // table.num_ranks
        return Limit(rank_bytes / each, tuple(in_flight(table)), states)


@dataclass(frozen=True)
class Crossing:
    """What travels from one stage to the next, for one micro-step."""

    values: tuple[str, ...]
    num_bytes: int
    gradient_bytes: int
    """What comes back."""
    us: float
    """Both ways."""


@dataclass(frozen=True)
class Stage:
    """What one stage does, for one micro-step, and what it holds."""

    layers: tuple[str, ...]
    num_operators: int
    num_parameters: int
    parameter_bytes: int
    saved_bytes: int
    """What one micro-step's forward keeps for its backward."""
    temporary_bytes: int
    """What its forward, or its backward, holds beside that while it runs."""
    forward_us: float
    input_us: float
    """Of backward: what the stage before waits for."""
    weight_us: float
    repeated: int
    """Operators of other stages that it computes for itself, as they need no parameter."""

    @property
    def us(self) -> float:
        """Forward and backward."""
        return self.forward_us + self.input_us + self.weight_us


@dataclass(frozen=True)
class Stages:
    """A micro-step in stages."""

    stages: tuple[Stage, ...]
    crossings: tuple[Crossing, ...]
    """Between two stages, the first one first."""
    shared: tuple[str, ...]
    """Names of parameters that several stages hold."""
    us: float
    """What the objective says that all micro-steps take: see `fxzero.schedule.stage_cuts`."""
    holders: dict[str, tuple[int, ...]] = field(default_factory=dict, repr=False)
    """By name of a parameter, the stages that read it, and hold it therefore."""

    @property
    def imbalance(self) -> float:
        """The slowest stage over the mean."""
        times = [stage.us for stage in self.stages]
        return max(times) / (sum(times) / len(times))


def stages_of(
    graph: StepGraph,
    costs: CostModel,
    num_stages: int,
    num_micro_steps: int,
    *,
    limit: Limit | None = None,
    ranks_per_stage: int = 1,
    fuses: bool = False,
) -> Stages:
    """Cut a micro-step into stages, for the least time of all micro-steps.

    Args:
        graph: stamped, with all layers in it.
        limit: what a stage may hold.
        ranks_per_stage: how far apart in the world neighbours along the pipeline are.
        fuses: whether runs of compute will be compiled regions.

    Raises:
        ConfigError: there are more stages than places to cut at, or none fit the budget.
    """
    order = Order(Operators(graph, costs), ranks_per_stage)
    borders, us = _borders(order, num_stages, num_micro_steps, limit)
    memory = StageMemory(order.operators, fuses=fuses)
    stages = [order.stage(first, until, memory) for first, until in pairwise(borders)]
    crossings = [order.crossing(at) for at in borders[1:-1]]
    holders = _holders(order, borders)
    shared = sorted(name for name, held in holders.items() if len(held) > 1)
    return Stages(tuple(stages), tuple(crossings), tuple(shared), us, holders)


def holders_of(
    graph: StepGraph,
    costs: CostModel,
    num_stages: int,
    num_micro_steps: int,
    *,
    limit: Limit | None = None,
    ranks_per_stage: int = 1,
) -> dict[str, tuple[int, ...]]:
    """By name of a parameter, the stages that read it if a micro-step is cut for the least time.

    Args: see `stages_of`.

    Raises:
        ConfigError: there are more stages than places to cut at, or none fit the budget.
    """
    order = Order(Operators(graph, costs), ranks_per_stage)
    borders, _ = _borders(order, num_stages, num_micro_steps, limit)
    return _holders(order, borders)


def _holders(order: Order, borders: Sequence[int]) -> dict[str, tuple[int, ...]]:
    found: dict[str, list[int]] = {}
    for stage, (first, until) in enumerate(pairwise(borders)):
        keys = {key for op in order.own[first:until] for key in op.params}
        for key in sorted(keys):
            found.setdefault(order.operators.graph.specs[key].name, []).append(stage)
    return {name: tuple(held) for name, held in found.items()}


def _borders(
    order: Order, num_stages: int, num_micro_steps: int, limit: Limit | None
) -> tuple[list[int], float]:
    """Before which operators stages begin, the end among them, and what all micro-steps take.

    What is saved may be repeated instead: where no stages have room for all of it, they are cut
    with room for a part.
    """
    positions, ends = order.positions(MODEL_STATES if limit is None else limit.states)
    for kept in (1.0,) if limit is None else _KEPT:
        cut = functools.partial(
            best_cuts,
            replace(positions, saved_bytes=kept * positions.saved_bytes),
            num_stages,
            num_micro_steps,
            budget_bytes=float("inf") if limit is None else limit.budget_bytes,
            in_flight=() if limit is None else limit.in_flight,
        )
        cuts = cut()
        if cuts is not None and reads_nothing(positions, cuts):
            # Of a small model the loss takes as long as a layer; a stage of its own has nothing to
            # hold, and no rank can be without parameters.
            cuts = cut(each_reads=True) or cuts
        if cuts is not None:
            return [0, *(ends[p] for p in cuts.positions), len(order.own)], cuts.us
    if len(ends) < num_stages + 1 or limit is None:
        raise ConfigError(
            f"{num_stages} stages: the graph has {len(order.own)} operators in its forward, "
            f"and {max(len(ends) - 2, 0)} places to cut at. Take fewer stages."
        )
    raise ConfigError(
        f"no {num_stages} stages of this graph hold {limit.budget_bytes:.0f} bytes or less each: "
        f"parameters, their gradients and AdamW's moments take {positions.state_bytes[-1]:.0f} "
        "bytes of all of them, and a parameter that is read in two places is in one stage or in "
        "both. Allow more, shard them within the stages (zero=3, mesh axis 'shard'), or take more "
        "stages."
    )


class Order:
    """Operators one behind the other, and what crosses between two of them."""

    def __init__(self, operators: Operators, ranks_per_stage: int = 1) -> None:
        self.operators = operators
        self.ranks_per_stage = ranks_per_stage
        self.own = operators.own
        self.last = operators.last_read()
        self.saved = operators.saved()

    def positions(self, states: float) -> tuple[Positions, list[int]]:
        """Where cuts can be, and by position how many operators are in front of it.

        Args:
            states: what training holds of a parameter, in parameters.
        """
        count = len(self.own)
        crossing = np.zeros(count + 1)
        for value, last in self.last.items():
            made = self.operators.place[value]
            is_tensor = isinstance(value.meta.get("val"), torch.Tensor)
            own = num_bytes(value) + gradient_bytes(value) if is_tensor else np.inf
            crossing[made + 1 : last + 1] += own
        us = np.concatenate([[0.0], np.cumsum([_us(op) for op in self.own])])
        ends = self._candidates(crossing, us)
        held = states * self._parameter_bytes(ends)
        saved = np.concatenate([[0.0], np.cumsum([self.saved.get(op.node, 0) for op in self.own])])
        cut_us = [self._travel_us(crossing[end]) if 0 < end < count else 0.0 for end in ends]
        nested = np.triu(np.ones((len(ends), len(ends)), dtype=np.bool_), 1)
        reads = np.concatenate([[0.0], np.cumsum([len(op.params) for op in self.own])])
        found = Positions(us[ends], np.array(cut_us), held, saved[ends], nested, reads[ends])
        return found, ends

    def _candidates(self, crossing: np.ndarray, us: np.ndarray) -> list[int]:
        """All places where time has passed, of each stretch of time the one where least crosses."""
        count = len(self.own)
        inside = self._inside_of_operators()
        inner = [end for end in range(1, count) if 0 < us[end] < us[count]]
        inner = [end for end in inner if np.isfinite(crossing[end]) and not inside[end]]
        if len(inner) > MOST_POSITIONS:
            stretches = np.minimum((us * MOST_POSITIONS / us[count]).astype(int), MOST_POSITIONS)
            best: dict[int, int] = {}
            for end in inner:
                known = best.get(stretches[end])
                if known is None or crossing[end] < crossing[known]:
                    best[stretches[end]] = end
            inner = sorted(best.values())
        else:
            by_time: dict[float, int] = {}
            for end in inner:  # views take no time: of several places at one time the narrowest
                known = by_time.get(us[end])
                if known is None or crossing[end] < crossing[known]:
                    by_time[us[end]] = end
            inner = sorted(by_time.values())
        return [0, *inner, count]

    def _inside_of_operators(self) -> np.ndarray:
        """By place, whether an operator of the model's has parts on both sides: where it is not
        taken apart it is on one stage, and so are its parameters."""
        first: dict[tuple[object, ...], int] = {}
        last: dict[tuple[object, ...], int] = {}
        for place, op in enumerate(self.own):
            operator = operator_of(op.node)
            if None not in operator[1:]:
                first.setdefault(operator, place)
                last[operator] = place
        inside = np.zeros(len(self.own) + 1, dtype=np.bool_)
        for operator, place in first.items():
            inside[place + 1 : last[operator] + 1] = True
        return inside

    def _parameter_bytes(self, ends: Sequence[int]) -> np.ndarray:
        """What is held in front of each position; a parameter is counted where it is read first."""
        seen: set[str] = set()
        sums = [0.0]
        for op in self.own:
            new = op.params - seen
            seen |= new
            sums.append(sums[-1] + sum(map(self._bytes_of, new)))
        return np.array(sums)[list(ends)]

    def _bytes_of(self, key: str) -> int:
        spec = self.operators.graph.specs[key]
        return math.prod(spec.local_shape) * spec.dtype.itemsize

    def _travel_us(self, both_bytes: float) -> float:
        record = Transfer(
            TransferKind.ALL_GATHER, int(2 * both_bytes), size=2, stride=self.ranks_per_stage
        )
        return self.operators.costs.transfer(record).wire_us  # half of it crosses: what is sent

    def crossing(self, at: int) -> Crossing:
        """What travels across the place before an operator."""
        values = [
            value for value, last in self.last.items() if self.operators.place[value] < at <= last
        ]
        sent, back = sum(map(num_bytes, values)), sum(map(gradient_bytes, values))
        names = tuple(sorted(value.name for value in values))
        return Crossing(names, sent, back, self._travel_us(sent + back))

    def stage(self, first: int, until: int, memory: StageMemory) -> Stage:
        """The operators between two places as a stage."""
        own = self.own[first:until]
        keys = {key for op in own for key in op.params}
        specs = [self.operators.graph.specs[key] for key in keys]
        nodes = {op.node for op in own}
        backward = [part for op in own for part in op.backward]
        saved = memory.saved_bytes(first, until)
        return Stage(
            layers=tuple(dict.fromkeys(stamp_of(op.node).layer for op in own)),
            num_operators=len(own),
            num_parameters=sum(math.prod(spec.shape) for spec in specs),
            parameter_bytes=sum(map(self._bytes_of, keys)),
            saved_bytes=saved,
            temporary_bytes=memory.temporary_bytes(first, until, saved),
            forward_us=sum(op.forward_us for op in own),
            input_us=sum(us for us, reach in backward if reach < first),
            weight_us=sum(us for us, reach in backward if reach >= first),
            repeated=len(self._free_for(nodes)),
        )

    def _free_for(self, nodes: set[fx.Node]) -> set[fx.Node]:
        """What needs no parameter, and some operators read."""
        found: set[fx.Node] = set()
        queue = [source for node in nodes for source in node.all_input_nodes]
        while queue:
            node = queue.pop()
            if node in self.operators.free and node not in found:
                found.add(node)
                queue += node.all_input_nodes
        return found


def gradient_bytes(value: fx.Node) -> int:
    """What comes back for a value that was sent: as much, if it is differentiated."""
    tensor = value.meta.get("val")
    differentiable = isinstance(tensor, torch.Tensor) and tensor.is_floating_point()
    return num_bytes(value) if differentiable else 0


def _us(op: Operator) -> float:
    return op.forward_us + sum(us for us, _ in op.backward)
