"""Put a rank's forwards and backwards into the order of a pipeline's schedule.

    F0 B0 F1 B1 F2 B2   →   F0 F1 B0 F2 B1 B2            1f1b, the first of two ranks

An action is all that one stage does of one micro-step's forward or backward. What it receives is
asked for an action earlier, so that it arrives meanwhile; what it sends is on its way while the
next one runs. A send ends when its receiver has asked for it, so that a rank waits for one no
earlier than the schedule lets that receiver be there: see `fxzero.pipeline.messages`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from fxzero.errors import ConfigError
from fxzero.graph import Role, StepGraph
from fxzero.graph.messages import set_tags
from fxzero.graph.stamps import set_stamp, stamp_of
from fxzero.graph.step_graph import TransferNodes, segment_of, transfer_nodes
from fxzero.passes.base import Context, Door, Fact, Notes, Pass
from fxzero.pipeline.messages import Messages, sender_of
from fxzero.pipeline.schedules import AUTO, table_of
from fxzero.pipeline.tables import Table, Work
from fxzero.ranks.agree import digest_of
from fxzero.sharding.pipeline import Pipeline
from fxzero.transfer import TransferKind


def table_for(schedule: str, pipeline: Pipeline, micro_batches: int) -> Table:
    """The table that a step runs.

    Args:
        schedule: what it was told; empty for what `fxzero.shard` was told.

    Raises:
        ConfigError: its stages are on other ranks than those that hold their parameters.
    """
    table = table_of(schedule or pipeline.schedule, pipeline.group.size, micro_batches)
    places = tuple(table.rank_of[stage] for stage in range(table.num_stages))
    if places != pipeline.place_of:
        raise ConfigError(
            f"order_micro_batches.schedule={schedule!r} has its stages on ranks {places} of the "
            f"pipeline, and fxzero.shard(schedule={pipeline.schedule!r}) has laid their parameters "
            f"on {pipeline.place_of}. Shard with schedule={schedule!r}."
        )
    return table


class _Ordering:
    """The nodes of a step, by the action that they are part of."""

    def __init__(self, graph: StepGraph, table: Table) -> None:
        assert graph.pipeline is not None
        self.graph = graph
        self.row = table.ranks[graph.pipeline.place]
        self.index = {segment_of(action): i for i, action in enumerate(self.row)}
        self.messages = Messages(table)

    def run(self) -> None:
        """Order them."""
        self._order_sums()
        by_action: list[list[fx.Node]] = [[] for _ in self.row]
        constants = list(self.graph.graph.find_nodes(op="get_attr"))
        tail: list[fx.Node] = []
        for node in self.graph.nodes():
            if node.op == "get_attr":
                continue
            i = self.index.get(stamp_of(node).segment)
            (tail if i is None else by_action[i]).append(node)
        before: dict[int, list[fx.Node]] = defaultdict(list)
        """By action, what goes in front of it."""
        self._receives(by_action, before)
        self._sends(by_action, before)
        order = [node for i, own in enumerate(by_action) for node in (*before[i], *own)]
        self.graph.reorder([*constants, *order, *before[len(self.row)], *tail])

    def _order_sums(self) -> None:
        """Add up gradients of micro-steps in the order in which they come."""
        values = list(self.graph.output_values)
        for position in self.graph.gradients:
            node = values[position]
            if not isinstance(node, fx.Node) or stamp_of(node).role is not Role.ACCUMULATE:
                continue
            sums = []
            while stamp_of(node).role is Role.ACCUMULATE:
                sums.append(node)
                node = node.all_input_nodes[0]
            terms = [node, *(total.all_input_nodes[1] for total in reversed(sums))]
            wanted = sorted(terms, key=lambda term: self.index[stamp_of(term).segment])
            total = wanted[0]
            for node, term in zip(reversed(sums), wanted[1:], strict=True):
                node.args = (total, term)
                set_stamp(node, stamp_of(node).but(micro_step=stamp_of(term).micro_step))
                total = node

    def _receives(
        self, by_action: list[list[fx.Node]], before: Mapping[int, list[fx.Node]]
    ) -> None:
        """Ask for messages early, and over each link in the order in which they are sent."""
        placed: list[tuple[int, int, fx.Node]] = []
        for action, own in zip(self.row, by_action, strict=True):
            for launch in _launches(own, TransferKind.RECEIVE):
                _, sent = self.messages.place[sender_of(action)]
                placed.append((self.messages.asked_at[action], sent, launch))
                own.remove(launch)
        for at, _, launch in sorted(placed, key=lambda p: p[:2]):
            before[at].append(launch)

    def _sends(self, by_action: list[list[fx.Node]], before: Mapping[int, list[fx.Node]]) -> None:
        """Wait for a send when its receiver can have asked for it."""
        for action, own in zip(self.row, by_action, strict=True):
            for launch in _launches(own, TransferKind.SEND):
                wait = transfer_nodes(launch).wait
                own.remove(wait)
                before[self.messages.waits_before(action)].append(wait)


def _launches(nodes: Sequence[fx.Node], kind: TransferKind) -> list[fx.Node]:
    found = []
    for node in nodes:
        record = stamp_of(node).transfer
        if stamp_of(node).role is Role.LAUNCH and record is not None and record.kind is kind:
            found.append(node)
    return found


def refuse_other_orders(graph: StepGraph, table: Table) -> None:
    """A buffer that the forward changes goes from each micro-step to the next.

    Raises:
        ConfigError: the schedule runs the forwards of a stage in another order.
    """
    if not graph.changed:
        return
    for row in table.ranks:
        for stage in {action.stage for action in row}:
            steps = [a.micro_step for a in row if a.stage == stage and a.work is Work.FORWARD]
            if steps != sorted(steps):
                raise ConfigError(
                    f"schedule {table.name!r} runs the forwards of stage {stage} in the order "
                    f"{steps}, and the forward changes buffers, which go from each micro-step to "
                    "the next one. Order them."
                )


@dataclass(frozen=True)
class OrderMicroBatches(Pass):
    """Run micro-steps in the order of a pipeline's schedule."""

    name: ClassVar[str] = "order_micro_batches"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.ACCUMULATED})
    doors: ClassVar[frozenset[Door]] = frozenset({Door.STEP})

    schedule: str = ""
    """Of a pipeline: ``gpipe``, ``1f1b``, ``interleaved``, ``breadth_first``, ``zb_h1``, ``zbv``,
    a CSV file with a row for each rank, of actions such as ``2F0``, or ``auto``: the one that ends
    first, by what its replay says. Empty, the default, is what `fxzero.shard` was told. A schedule
    runs with the stages where that one has put them."""

    def run(self, graph: StepGraph, ctx: Context) -> Notes:
        """See the module's docstring.

        Raises:
            ConfigError: a schedule that this pipeline cannot run.
        """
        pipeline = graph.pipeline
        if pipeline is None:
            if self.schedule:
                ctx.warnings.append(
                    f"order_micro_batches.schedule={self.schedule!r} has no effect: the model was "
                    "sharded without an axis 'pipeline'"
                )
            return Notes()
        segments = graph.segments()
        micro_batches = 1 + max((segment.micro_step for segment in segments), default=0)
        schedule = pipeline.schedule if self.schedule == AUTO else self.schedule
        table = table_for(schedule, pipeline, micro_batches)
        refuse_other_orders(graph, table)
        ordering = _Ordering(graph, table)
        ordering.run()
        graph.table = table
        rows = "\n".join(" ".join(map(str, row)) for row in table.ranks)
        digest = digest_of(f"{graph.in_common}\n{rows}")
        graph.in_common = digest.hex()
        set_tags(graph, 0x2000_0000 | int.from_bytes(digest[:4], "little") & 0x1FFF_FFFF)
        messages: list[TransferNodes] = [t for t in graph.transfers() if t.is_message]
        return Notes(
            schedule=table.name,
            actions=len(graph.row),
            in_flight=ordering.messages.replayed.in_flight[pipeline.place],
            messages=len(messages),
            sent_bytes=sum(
                t.record.full_bytes for t in messages if t.record.kind is TransferKind.SEND
            ),
        )
