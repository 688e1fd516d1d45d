"""What a pass chose for one graph, as frozen data that JSON can hold.

    Prefetch.decide(graph) → Order(kept=…, order=("gather.forward.0", "blocks.0 forward", …), …)
    Prefetch.apply(graph, order)

A decision names nodes, buckets and tasks as the graph's text does, and carries the numbers that
decided. All ranks take the first one's where ranks must decide alike; a plan file replays it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

from fxzero.graph import StepGraph
from fxzero.passes.base import Context, Notes, Pass
from fxzero.settings import build, plain


@dataclass(frozen=True)
class Decision:
    """What a pass chose."""

    def to_json(self) -> dict[str, Any]:
        """The same as what `json` can write."""
        found: dict[str, Any] = plain(self)
        return found

    @classmethod
    def from_json(cls, data: Mapping[str, Any], where: str) -> Any:
        """Read what `to_json` gave.

        Args:
            where: the path of the mapping, for messages.

        Raises:
            ConfigError: an unknown key, or a value of another type.
        """
        return build(cls, data, where)


D = TypeVar("D", bound=Decision)


@dataclass(frozen=True)
class DecidingPass(Pass, Generic[D]):
    """A pass that chooses: it reads a graph, and rewrites it by what it found."""

    decides: ClassVar[type[Any]]
    """The type of its decisions."""

    @abstractmethod
    def decide(self, graph: StepGraph, ctx: Context) -> D:
        """Choose. The graph stays as it is.

        Raises:
            PassError: it was asked for something that it cannot do.
        """

    @abstractmethod
    def apply(self, graph: StepGraph, decision: D, ctx: Context) -> Notes:
        """Rewrite the graph in place by a decision, and say what was done.

        Raises:
            ConfigError: the decision, from a plan that somebody wrote, does not fit the graph.
        """

    def question(self, graph: StepGraph, ctx: Context) -> str:
        """What must be equal on two ranks for them to have to decide alike.

        Empty, the default: each decides for itself, because collectives do not depend on it.
        """
        return ""

    def run(self, graph: StepGraph, ctx: Context) -> Notes:
        """Decide, or take what a plan or another rank has decided, and apply it."""
        decision: D = ctx.decisions.make(self, graph, ctx)
        return self.apply(graph, decision, ctx)
