"""A plan: what every deciding pass chose for every graph of a compilation, in one file.

    fxzero inspect model.py:build --world-size 8 --plan plan.json        writes it
    torch.compile(model, backend="fxzero", options={"plan": "plan.json"})    replays it

A graph's decisions are found by its digest, taken before the first of them. A graph that the
file does not know is refused; a decision that somebody has taken out of it is made anew, one that
somebody has changed is taken as it stands, if it can be.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fxzero.errors import ConfigError, nearest
from fxzero.passes.decision import DecidingPass
from fxzero.passes.decisions import Decisions
from fxzero.settings import plain

FORMAT = 1
"""Of the file: files of another format are refused."""


class OtherGraphError(ConfigError):
    """A plan that does not know a graph."""


@dataclass(frozen=True)
class Plan:
    """The decisions of some graphs, and what they were made by."""

    graphs: Mapping[str, Mapping[str, Any]]
    """By a graph's digest, by pass: decisions as JSON."""
    source: str = ""
    """The file that it was read from."""
    costs: str = ""
    """What decided: the cost model and its cluster."""
    settings: Mapping[str, Any] = field(default_factory=dict)

    @staticmethod
    def of(compilations: Iterable[tuple[Decisions, str]], settings: Any) -> Plan:
        """The plan of some compilations.

        Args:
            compilations: their decisions, and the names of their cost models.
            settings: the compiler's.
        """
        graphs = {}
        costs = ""
        for decisions, name in compilations:
            if decisions.made:
                graphs[decisions.digest] = {k: d.to_json() for k, d in decisions.made.items()}
                costs = name
        return Plan(graphs, costs=costs, settings=plain(settings))

    @staticmethod
    def read(path: str, passes: Collection[str]) -> Plan:
        """Read a file.

        Args:
            passes: those that decide, by name.

        Raises:
            ConfigError: it cannot be read, or is no plan.
        """
        try:
            data = json.loads(Path(path).read_text())
        except OSError as error:
            raise ConfigError(f"plan={path!r} cannot be read: {error.strerror}") from None
        except ValueError as error:
            raise ConfigError(f"plan={path!r} is no JSON: {error}") from None
        form = data.get("format") if isinstance(data, dict) else None
        if form == FORMAT and not isinstance(data.get("graphs"), dict):
            raise ConfigError(f"plan={path!r}: graphs are no mapping from digests to decisions")
        if form != FORMAT:
            raise ConfigError(
                f"plan={path!r} is no plan of format {FORMAT} (found {form!r}). Write one with "
                "fxzero inspect TARGET --plan FILE."
            )
        for digest, decisions in data["graphs"].items():
            if not isinstance(decisions, dict):
                raise ConfigError(f"plan={path!r}: graph {digest} has no decisions by pass")
            for name in decisions:
                if name not in passes:
                    raise ConfigError(f"plan={path!r}: {digest}.{name}: {nearest(name, passes)}")
        return Plan(data["graphs"], path, str(data.get("costs", "")), data.get("settings", {}))

    def write(self, path: Path) -> None:
        """Write a file.

        Raises:
            ConfigError: it cannot be written.
        """
        data = {
            "format": FORMAT,
            "costs": self.costs,
            "settings": self.settings,
            "graphs": self.graphs,
        }
        try:
            path.write_text(json.dumps(data, indent=1) + "\n")
        except OSError as error:
            raise ConfigError(
                f"--plan {path}: {error.strerror}. Name a file in a folder that exists."
            ) from None

    @property
    def passes(self) -> frozenset[str]:
        """Whose decisions it holds, of any graph."""
        return frozenset(name for decisions in self.graphs.values() for name in decisions)

    def decision(self, digest: str, step: DecidingPass[Any]) -> Any:
        """What the plan says for a pass and a graph; None if that shall be decided anew.

        Raises:
            OtherGraphError: the plan is of another graph.
            ConfigError: this is no decision of the pass.
        """
        decisions = self.graphs.get(digest)
        if decisions is None:
            known = ", ".join(self.graphs) or "none"
            raise OtherGraphError(
                f"plan={self.source!r} is of other graphs ({known}) than this one ({digest}): "
                "another model, loss, batch, world size, ZeRO stage, norm to clip to or version. "
                "Write it again with fxzero inspect (--step --clip-grad-norm … for a compiled "
                "step), or drop the plan."
            )
        if step.name not in decisions:
            return None
        where = f"plan {self.source!r}: {digest}.{step.name}"
        return step.decides.from_json(decisions[step.name], where)
