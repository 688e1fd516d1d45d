"""What a pipeline's table comes to, and whether it is one.

    rank 0 |01··aa2bb·cc|      idle 25 %, at most 2 micro-steps begun
    rank 1 |·0aa1bb2cc··|                at most 1

An action starts when its rank has ended the one before, and what it needs has ended and arrived.
Every table is checked before anybody runs it: each stage does each part of each micro-step once, on
one rank, and no rank waits for one that waits for it.
"""

from __future__ import annotations

import csv
import functools
import itertools
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import networkx as nx

from fxzero.errors import ConfigError
from fxzero.pipeline.tables import Action, Table, Work

_ACTION = re.compile(r"(\d+)([FBIW])(\d+)")


def read_schedule(path: Path) -> Table:
    """Read a CSV file: a row a rank, in each cell an action such as ``2F0``; empty cells are idle.

    Raises:
        ConfigError: it cannot be read, or is no table.
    """
    try:
        with path.open(newline="") as file:
            rows = list(csv.reader(file))
    except OSError as error:
        raise ConfigError(f"schedule={str(path)!r} cannot be read: {error.strerror}") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"schedule={str(path)!r} is no CSV file: {error}") from None
    found = []
    for number, row in enumerate(rows):
        actions = []
        for column, cell in enumerate(row):
            if not cell.strip():
                continue
            match = _ACTION.fullmatch(cell.strip())
            if match is None:
                raise ConfigError(
                    f"schedule={str(path)!r}, row {number}, cell {column}: {cell!r} is no action. "
                    "Write stage, F, B, I or W, and micro-step, as in 2F0."
                )
            actions.append(Action(int(match[1]), Work(match[2]), int(match[3])))
        found.append(tuple(actions))
    table = Table(str(path), tuple(found))
    check(table)
    return table


def check(table: Table) -> None:
    """See that a table can be run.

    Raises:
        ConfigError: it cannot; what is missing, twice there, or waits for itself is named.
    """
    where = f"schedule {table.name!r}"
    if not any(table.ranks):
        raise ConfigError(f"{where} has no actions")
    owners: dict[int, set[int]] = {}
    for rank, row in enumerate(table.ranks):
        for action in row:
            owners.setdefault(action.stage, set()).add(rank)
    for stage, ranks in sorted(owners.items()):
        if len(ranks) > 1:
            raise ConfigError(
                f"{where}: stage {stage} is on ranks {sorted(ranks)}: it can be on one"
            )
    seen = Counter(action for row in table.ranks for action in row)
    works = (Work.FORWARD, Work.BACKWARD)
    if table.splits_backward:
        works = (Work.FORWARD, Work.INPUT_GRADIENTS, Work.WEIGHT_GRADIENTS)  # type: ignore[assignment]
    wanted = (
        Action(stage, work, micro_step)
        for stage in range(table.num_stages)
        for work in works
        for micro_step in range(table.num_micro_steps)
    )
    # Some are enough: a file may name any micro-step, and lack more than can be counted.
    missing = list(itertools.islice((action for action in wanted if action not in seen), 7))
    strange = [action for action in seen if action.work not in works]
    twice = [action for action, count in seen.items() if count > 1]
    for what, actions in (("lacks", missing), ("has twice", twice), ("cannot have", strange)):
        if actions:
            some = ", ".join(map(str, actions[:6])) + (", …" if len(actions) > 6 else "")
            raise ConfigError(
                f"{where} {what} {some}. Each of {table.num_stages} stages does "
                f"{', '.join(works)} of each of {table.num_micro_steps} micro-steps once."
            )
    waits = waits_of(table)
    if not nx.is_directed_acyclic_graph(waits):
        cycle = [edge[0] for edge in nx.find_cycle(waits)]
        chain = " behind ".join(map(str, [*cycle[::-1], cycle[-1]]))
        raise ConfigError(f"{where} waits for itself: {chain}")


def waits_of(table: Table) -> nx.DiGraph:
    """Actions, and what each waits for: what it needs, and the one before on its rank."""
    graph = nx.DiGraph()
    for row in table.ranks:
        for before, action in zip((None, *row), row, strict=False):
            graph.add_node(action)
            if before is not None:
                graph.add_edge(before, action)
            graph.add_edges_from((need, action) for need in table.needs(action))
    return graph


@functools.lru_cache(maxsize=8)
def in_order(table: Table) -> tuple[Action, ...]:
    """A table's actions, each behind what it waits for; found once, as tables are replayed with
    several costs."""
    return tuple(nx.topological_sort(waits_of(table)))


@dataclass(frozen=True)
class PipelineReplay:
    """When a table's actions run."""

    table: Table
    start_us: dict[Action, float]
    end_us: dict[Action, float]

    @property
    def makespan_us(self) -> float:
        """Until the last one has ended."""
        return max(self.end_us.values())

    @property
    def idle_shares(self) -> tuple[float, ...]:
        """By rank, the part of the makespan in which it does nothing."""
        busy = (sum(self.end_us[a] - self.start_us[a] for a in row) for row in self.table.ranks)
        return tuple(1 - us / self.makespan_us for us in busy)

    @property
    def in_flight(self) -> tuple[int, ...]:
        """By rank, the most micro-steps that it has begun and not ended, over its stages."""
        last = Work.WEIGHT_GRADIENTS if self.table.splits_backward else Work.BACKWARD
        found = []
        for row in self.table.ranks:
            now = most = 0
            for action in row:
                now += (action.work is Work.FORWARD) - (action.work is last)
                most = max(most, now)
            found.append(most)
        return tuple(found)

    def picture(self, columns: int = 96) -> str:
        """A line a rank: forwards as digits, backwards as small letters, gradients of weights as
        capitals, idle time as dots."""
        scale = columns / self.makespan_us
        lines = []
        for rank, row in enumerate(self.table.ranks):
            line = ["·"] * columns
            for action in row:
                begin, end = (round(t[action] * scale) for t in (self.start_us, self.end_us))
                letter = _letter(action)
                line[begin:end] = letter * (end - begin)
            lines.append(f"rank {rank} |{''.join(line)}|")
        return "\n".join(lines)


def _letter(action: Action) -> str:
    number = action.micro_step
    match action.work:
        case Work.FORWARD:
            return str(number % 10)
        case Work.WEIGHT_GRADIENTS:
            return chr(ord("A") + number % 26)
        case _:
            return chr(ord("a") + number % 26)


def replay_table(
    table: Table,
    action_us: Callable[[Action], float],
    transfer_us: Callable[[Action, Action], float] = lambda before, action: 0.0,
    early_us: Callable[[Action], float] = lambda action: 0.0,
) -> PipelineReplay:
    """Run a table in time.

    Args:
        action_us: what an action takes.
        transfer_us: how long what another action, on another rank, needs of one is on its way.
        early_us: how long before an action's end that leaves: see `weights_last`. By default it
            leaves at the end, as in the closed forms of the literature.
    """
    start_us: dict[Action, float] = {}
    end_us: dict[Action, float] = {}
    rank_of = table.rank_of
    before = {action: previous for row in table.ranks for previous, action in pairwise(row)}
    for action in in_order(table):
        ready = [end_us[before[action]]] if action in before else [0.0]
        for need in table.needs(action):
            crosses = rank_of[need.stage] != rank_of[action.stage]
            way_us = transfer_us(need, action) - early_us(need) if crosses else 0.0
            ready.append(end_us[need] + way_us)
        start_us[action] = max(ready)
        end_us[action] = start_us[action] + action_us(action)
    return PipelineReplay(table, start_us, end_us)


def weights_last(action_us: Callable[[Action], float]) -> Callable[[Action], float]:
    """How long before an action's end its message leaves, where a backward in one makes the
    gradients of weights last, as `fxzero.passes.split_stages` has it."""

    def early_us(action: Action) -> float:
        if action.work is not Work.BACKWARD:
            return 0.0
        return action_us(action._replace(work=Work.WEIGHT_GRADIENTS))

    return early_us


def unit_us(action: Action) -> float:
    """Every half takes as long: a backward two units."""
    return 2.0 if action.work is Work.BACKWARD else 1.0
