"""What a pass is: a frozen dataclass whose fields are its options.

The dataclass is the pass's configuration, its log line and its Hydra node; its file,
its name, its key in the configuration and its test file are one word.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, ClassVar

from fxzero.cost import AnalyticCosts, CostModel, load_cluster
from fxzero.cost.throttle import Throttle
from fxzero.graph import StepGraph
from fxzero.passes.decisions import Decisions
from fxzero.runtime.optimizers import OptimizerLayout
from fxzero.schedule.repetition_levels import Levels
from fxzero.settings import check_types


class Fact(StrEnum):
    """Something that is true of a graph from one pass on."""

    STAMPED = "stamped"
    """Every node has a stamp."""
    RECOMPUTED = "recomputed"
    """Backward repeats what it shall not read from forward."""
    OUTLINED = "outlined"
    """Layers are calls of pieces."""
    ACCUMULATED = "accumulated"
    """Every micro-batch of the step has its forward and backward."""
    GATHERED = "gathered"
    """Full parameters come from physical gathers and end in releases."""
    REDUCED = "reduced"
    """Gradients leave the graph reduced."""
    EXPANDED = "expanded"
    """Every layer is there."""
    BUCKETED = "bucketed"
    """Transfers carry buckets of parameters."""
    SCHEDULED = "scheduled"
    """Node order is launch order."""
    UPDATED = "updated"
    """Gradients end in updates of the parameters, and nothing else."""
    CUT = "cut"
    """The graph is what will be called: one side of the step, or all of it."""
    RELEASED = "released"
    """Saved activations end at their last use in backward."""
    LOWERED = "lowered"
    """Compute runs in regions."""


class Door(StrEnum):
    """How a model is compiled."""

    LOOP = "loop"
    """By torch.compile: the user's loop calls forward and backward apart, and updates."""
    STEP = "step"
    """By compile_step: the update is part of the graph."""


class Notes(Mapping[str, object]):
    """What a pass has to say of what it did: counts, bytes, words."""

    def __init__(self, **values: object) -> None:
        self._values = values

    def __getitem__(self, key: str) -> object:
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __str__(self) -> str:
        return ", ".join(f"{k}={v}" for k, v in self._values.items()) or "nothing to do"


class Room(StrEnum):
    """How much memory transfers may take, from most to least: under a `memory_budget`, where
    neither `prefetch` nor `bucket` was told otherwise."""

    ALL = "all"
    """As without a budget, and whatever is gathered stays until it is gathered next."""
    HALF = "half"
    """And half of it does."""
    USUAL = "usual"
    """As without a budget."""
    LEAST = "least"
    """Gathers right before their use, reduces at once, and buckets of a quarter."""


KEPT_SHARE = {Room.ALL: 1.0, Room.HALF: 0.5}
"""By room, how much of what would be gathered again is kept instead."""


@dataclass
class Level:
    """How much of its speed a step gives up for its memory: what `memory_budget` looks for."""

    number: int = 0
    """Of `levels`: how much is repeated."""
    room: Room = Room.USUAL
    parts: tuple[tuple[str, str], ...] | None = None
    """What is kept in parts, and along which ranks, if others have decided on that already."""
    levels: Levels | None = None
    """What could be repeated; found for the first of the levels that are tried."""
    spare_bytes: int = 0
    """What may be kept again of what the level repeats."""


@dataclass
class Context:
    """What all passes of one compilation share."""

    optimizer: OptimizerLayout | None = None
    """What updates the parameters, in a whole step."""
    costs: CostModel = field(default_factory=lambda: AnalyticCosts(load_cluster("laptop")))
    """What things take, by which all ranks decide alike."""
    on_cpu: bool = False
    """Whether it is a CPU's costs: its ranks talk over gloo."""
    fuses: bool = True
    """Whether runs of compute will be compiled regions."""
    replays: bool = False
    """Whether the whole step will be one CUDA graph: it cannot ask a generator for its state."""
    throttle: Throttle = field(default_factory=Throttle)
    """What copies between pools are held back to."""
    host_budget_bytes: int | None = None
    """Most bytes that the step may hold in the host's memory; None if there is no bound."""
    params_on_host: bool = False
    """Whether parameters live on the host whoever updates them, as they are brought where they are
    used."""
    level: Level | None = None
    """How much is given up for a memory budget, where there is one."""
    decompositions: dict[Any, Callable[..., Any]] = field(default_factory=dict)
    """What the capture took apart: patterns are traced as the graph was."""
    decisions: Decisions = field(default_factory=Decisions)
    """What was decided, and what a plan says to decide."""
    scratch: dict[str, object] = field(default_factory=dict)
    """By pass: what deciding and applying both need, and is dear to make twice."""
    warnings: list[str] = field(default_factory=list)
    """Settings that could not take effect; errors under ``strict=True``."""


@dataclass(frozen=True)
class Pass(ABC):
    """One decision about a step graph."""

    name: ClassVar[str]
    requires: ClassVar[frozenset[Fact]] = frozenset()
    provides: ClassVar[frozenset[Fact]] = frozenset()
    doors: ClassVar[frozenset[Door]] = frozenset(Door)
    """Where it has a meaning."""
    for_regions: ClassVar[bool] = False
    """Whether it has one only where runs of compute are compiled."""

    def __post_init__(self) -> None:
        """See that options hold what their types say; a pass with ranges adds them.

        Raises:
            ConfigError: an option that cannot hold what it was given.
        """
        check_types(self, self.name)

    @abstractmethod
    def run(self, graph: StepGraph, ctx: Context) -> Notes:
        """Rewrite the graph in place and say what was done.

        Raises:
            PassError: it was asked for something that it cannot do.
        """
