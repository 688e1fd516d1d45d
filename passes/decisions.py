"""Who decides for a graph: a plan, the first rank, or the pass itself.

Every decision of a compilation goes through here, so that ranks agree in one place, a plan is
replayed in one place, and what was decided is known afterwards.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from fxzero._compat import default_store
from fxzero.graph import StepGraph
from fxzero.graph.digest import graph_digest
from fxzero.schedule.agreement import agree
from fxzero.settings import Auto, plain

if TYPE_CHECKING:
    from fxzero.passes.base import Context
    from fxzero.passes.decision import DecidingPass, Decision


class Planned(Protocol):
    """What holds decisions that were made before: see `fxzero.compiler.plan.Plan`."""

    @property
    def settings(self) -> Mapping[str, Any]:
        """The compiler's, when the decisions were made."""
        ...

    @property
    def passes(self) -> frozenset[str]:
        """Whose decisions it holds, of any graph."""
        ...

    def decision(self, digest: str, step: DecidingPass[Any]) -> Any:
        """What a pass shall do to the graph of a digest; None if that is to be decided."""
        ...


def _differs(step: DecidingPass[Any], before: Mapping[str, Any]) -> bool:
    """Whether a pass is told otherwise than before, but for what was left to be decided."""
    now = plain(step)
    said = {name: value for name, value in before.items() if value != Auto.AUTO}
    return {name: now.get(name) for name in said} != said


@dataclass
class Decisions:
    """The decisions of one compilation: made here, by another rank, or by a plan."""

    plan: Planned | None = None
    """What to replay."""
    keep_digest: bool = False
    """Whether somebody will write a plan."""
    setup: str = ""
    """The passes that do not choose, with their options: decisions are made for them."""
    digest: str = ""
    """Of the graph before the first decision; empty if nobody needs it."""
    made: dict[str, Decision] = field(default_factory=dict)
    """By pass."""
    replayed: set[str] = field(default_factory=set)
    """The passes whose decisions are the plan's."""

    @property
    def planned(self) -> frozenset[str]:
        """The passes that a plan decides for."""
        return self.plan.passes if self.plan is not None else frozenset()

    def make(self, step: DecidingPass[Any], graph: StepGraph, ctx: Context) -> Any:
        """The decision of a pass: the plan's, the first rank's, or its own.

        Raises:
            ConfigError: the plan is of another graph, or holds something that is no decision.
        """
        if not self.digest and (self.plan is not None or self.keep_digest):
            self.digest = graph_digest(graph, self.setup)
        planned = self.plan.decision(self.digest, step) if self.plan is not None else None
        if planned is not None and self.plan is not None:
            self.replayed.add(step.name)
            before = self.plan.settings.get(step.name)
            if before is not None and _differs(step, before) and step != type(step)():
                ctx.warnings.append(
                    f"{step} has no effect: the plan decides, which was made with {before}. Drop "
                    f"{step.name} from the plan to decide it anew, or the setting."
                )
        decision = planned if planned is not None else step.decide(graph, ctx)
        question = step.question(graph, ctx) if default_store() is not None else ""
        if question:
            mine = decision.to_json()
            # Ranks that are told the same decide the same: other options are another question,
            # and so is a plan.
            told = f"{step} by {ctx.costs.name}" if planned is None else json.dumps(mine)
            agreed = agree(graph.identity, f"{step.name} {told}\n{question}", mine)
            if agreed != mine:
                decision = step.decides.from_json(agreed, f"the first rank's {step.name}")
        self.made[step.name] = decision
        return decision
