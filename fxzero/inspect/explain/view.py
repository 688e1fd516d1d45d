"""One graph of an analysis, indexed by what explanations ask for."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from functools import cached_property
from typing import Any

from fxzero.inspect.analysis import Analysis, ScheduleRow, TransferRow
from fxzero.inspect.detail import GraphDetail, NodeRow, SpanRow
from fxzero.inspect.explain.explanation import Setting

_PART = re.compile(r"= getitem\((\w+), (\d+)\)")


class View:
    """An analysis' graph.

    Args:
        analysis: with details.
        detail: one of them.
    """

    def __init__(self, analysis: Analysis, detail: GraphDetail) -> None:
        self.analysis = analysis
        self.detail = detail
        self.graph = detail.graph
        self.spans: dict[str, SpanRow] = {span.node: span for span in detail.spans}
        self.stall_us = {stall.node: stall.us for stall in detail.stalls}

    @cached_property
    def outline(self) -> dict[str, NodeRow]:
        """Nodes of the step itself, by name; of a name that a region has as well, the node."""
        found: dict[str, NodeRow] = {}
        for row in self.detail.nodes:
            if not row.piece:
                found.setdefault(row.name, row)
        return found

    @cached_property
    def bodies(self) -> dict[str, dict[str, NodeRow]]:
        """Nodes of each piece, by name."""
        found: dict[str, dict[str, NodeRow]] = defaultdict(dict)
        for row in self.detail.nodes:
            if row.piece:
                found[row.piece][row.name] = row
        return dict(found)

    @cached_property
    def calls(self) -> dict[str, list[NodeRow]]:
        """By piece, the nodes that call it."""
        found: dict[str, list[NodeRow]] = defaultdict(list)
        for row in self.outline.values():
            if row.operator in self.bodies:
                found[row.operator].append(row)
        return dict(found)

    @cached_property
    def _readers(self) -> dict[tuple[str, str], list[NodeRow]]:
        found: dict[tuple[str, str], list[NodeRow]] = defaultdict(list)
        for row in self.detail.nodes:
            for source in row.inputs:
                found[row.piece, source].append(row)
        return dict(found)

    def readers(self, row: NodeRow) -> list[NodeRow]:
        """The nodes that read one, of the same body."""
        return self._readers.get((row.piece, row.name), [])

    @cached_property
    def transfers(self) -> dict[str, TransferRow]:
        """By bucket."""
        return {t.bucket: t for t in self.analysis.transfers if t.graph == self.graph and t.bucket}

    @cached_property
    def of_bucket(self) -> dict[str, list[NodeRow]]:
        """By bucket, its nodes."""
        found: dict[str, list[NodeRow]] = defaultdict(list)
        for row in self.outline.values():
            if row.bucket:
                found[row.bucket].append(row)
        return dict(found)

    @property
    def schedule(self) -> ScheduleRow | None:
        """What the graph takes and holds, by simulation."""
        rows = (row for row in self.analysis.schedules if row.graph == self.graph)
        return next(rows, None)

    def decision(self, name: str) -> dict[str, Any]:
        """What a pass chose; empty if it chose nothing here."""
        found = self.detail.decisions.get(name, {})
        return found if isinstance(found, dict) else {}

    @cached_property
    def repeated(self) -> dict[str, dict[str, Any]]:
        """What `recompute` chose, by the forward node whose value it is."""
        values = self.decision("recompute").get("values", [])
        return {value["value"]: value for value in values}

    @property
    def kept(self) -> list[str]:
        """The buckets that `prefetch` does not gather again."""
        return list(self.decision("prefetch").get("kept", []))

    def inside(self, module: str) -> list[NodeRow]:
        """The nodes of a module, one that equal layers share under the name that each gives it.

        A call is one node where all of its layer is asked for; else what its piece has of the
        module stands for it.
        """

        def has(name: str) -> bool:
            return not module or name == module or name.startswith(f"{module}.")

        found = []
        for row in self.outline.values():
            body = self.bodies.get(row.operator)
            if body is None or (module and has(row.layer)):
                if has(row.module) or has(row.layer):
                    found.append(row)
                continue
            example = next((r.layer for r in body.values() if r.layer), "")
            for part in body.values():
                if not part.role:
                    continue
                name = part.module
                if example and (name == example or name.startswith(f"{example}.")):
                    name = row.layer + name.removeprefix(example)
                if has(name):
                    found.append(replace(part, module=name, layer=row.layer))
        return found

    def part_of(self, row: NodeRow) -> tuple[NodeRow, NodeRow | None] | None:
        """Of a node that picks a call's output: the call, and the node in its piece that makes it;
        None of any other node."""
        match = _PART.search(row.text)
        call = self.outline.get(match[1]) if match is not None else None
        if match is None or call is None or call.operator not in self.bodies:
            return None
        body = self.bodies[call.operator]
        outputs = next((r.inputs for r in body.values() if r.text.startswith("return ")), ())
        index = int(match[2])
        made = body.get(outputs[index]) if index < len(outputs) else None
        if made is not None and made.num_bytes != row.num_bytes:
            made = None
        return call, made

    def setting(self, option: str, effect: str) -> Setting:
        """An option as it stands, and what another value would do."""
        value: Any = self.analysis.settings
        for word in option.split("."):
            value = value.get(word) if isinstance(value, dict) else None
        nothing = "none" if option.endswith(".share") else "by cost"
        known = {None: nothing, "": "not set"}
        shown = known.get(value) if not isinstance(value, list) else None
        return Setting(option, shown or (str(value) if value != [] else "none"), effect)

    def settings(self, options: Iterable[tuple[str, str]]) -> tuple[Setting, ...]:
        """Several of them."""
        return tuple(self.setting(option, effect) for option, effect in options)
