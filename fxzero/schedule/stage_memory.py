"""What a stage of a pipeline holds of a micro-step: saved for its backward, and while it runs.

    saved        what backward reads of what forward made, or received from the stage before
    temporary    by how much its forward, or its backward, holds more than that at its fullest

The storages are those of the whole micro-step (`fxzero.schedule.storage`), each with the stage that
its operator is of. Full parameters, gradients of parameters once they are made, and messages on
their way are counted elsewhere.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from torch import fx

from fxzero.graph import Phase, Role
from fxzero.graph.aliases import root
from fxzero.graph.operators import num_bytes
from fxzero.graph.stamps import stamp_of
from fxzero.schedule.stage_operators import Operators
from fxzero.schedule.storage import Storage, storages_of


@dataclass(frozen=True)
class _Span:
    """Bytes that live from one group of nodes to another."""

    place: int
    """The operator that they are of."""
    first: int
    last: int
    num_bytes: int


class StageMemory:
    """What stages hold, wherever a micro-step is cut."""

    def __init__(self, operators: Operators, *, fuses: bool) -> None:
        """
        Args:
            fuses: whether runs of compute will be compiled regions.
        """
        self.operators = operators
        found = storages_of(operators.graph, fuses=fuses)
        self.group_of = {node: i for i, group in enumerate(found.groups) for node in group}
        heads = [group[0] for group in found.groups]
        self.places = [self._place(node) for node in heads]
        """By group of nodes that run as one, the operator that it is of; -1 of none."""
        self.phases = [stamp_of(n).phase if n.op == "call_function" else None for n in heads]
        spans = [self._span(s) for s in found.every if s.begin is not None and self._counts(s)]
        for node, amount in found.temporary.items():
            at = self.group_of[node]
            spans.append(_Span(self.places[at], at, at, amount))
        self.spans = [span for span in spans if span.place >= 0 and span.num_bytes]
        self.reads = [
            (operators.place[twin.node], root(source))
            for node, twin in operators.twin.items()
            if twin is not None
            for source in node.all_input_nodes
            if source in operators.place
        ]
        """By read of backward, the operator whose backward it is, and what it reads."""

    def saved_bytes(self, first: int, until: int) -> int:
        """What the backward of the operators between two places reads of theirs, and of what they
        have received."""
        place = self.operators.place
        values = {v for at, v in self.reads if first <= at < until and place.get(v, until) < until}
        return sum(map(num_bytes, values))

    def temporary_bytes(self, first: int, until: int, saved: int) -> int:
        """By how much the operators between two places hold more than the `saved` bytes."""
        phases = (Phase.FORWARD, Phase.BACKWARD)
        return max(max(self._most(first, until, phase) for phase in phases) - saved, 0)

    def _most(self, first: int, until: int, phase: Phase) -> int:
        """The most that lives at one time while a phase of some operators runs."""
        own = [
            i
            for i, place in enumerate(self.places)
            if first <= place < until and self.phases[i] is phase
        ]
        if not own:
            return 0
        changes: dict[int, int] = defaultdict(int)
        for span in self.spans:
            if first <= span.place < until and span.first <= own[-1] and span.last >= own[0]:
                changes[max(span.first, own[0])] += span.num_bytes
                changes[span.last + 1] -= span.num_bytes
        held = most = 0
        for at in sorted(changes):
            held += changes[at]
            most = max(most, held)
        return most

    def _place(self, node: fx.Node) -> int:
        place = self.operators.place.get(node)
        if place is None:
            twin = self.operators.twin.get(node)
            place = self.operators.place[twin.node] if twin is not None else -1
        return place

    def _counts(self, storage: Storage) -> bool:
        """Whether operators make it: not a transfer that is still to be placed."""
        assert storage.begin is not None
        return stamp_of(storage.begin).role is Role.COMPUTE

    def _span(self, storage: Storage) -> _Span:
        assert storage.begin is not None
        first = self.group_of[storage.begin]
        ends = [self.group_of[node] for node in storage.until() if node in self.group_of]
        return _Span(self.places[first], first, max(ends, default=first), storage.num_bytes)
