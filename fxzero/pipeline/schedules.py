"""Schedules of a pipeline by name: one that is made here, or a CSV file of somebody's own.

``auto`` is the one that ends first when it is replayed with what the actions of stages take.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from fxzero.errors import ConfigError, nearest
from fxzero.pipeline.replay import check, read_schedule, replay_table, weights_last
from fxzero.pipeline.tables import TABLES, Action, Table

AUTO = "auto"
_FIRST = "1f1b"
"""Whose stages lie as those of ``auto`` do where nothing else says how."""


def fastest(
    place_of: Sequence[int], num_micro_batches: int, action_us: Callable[[Action], float]
) -> Table:
    """The schedule that ends first, of those whose stages lie in given places; of equally fast ones
    the one with the fewest micro-steps in flight.

    Args:
        place_of: by stage, the rank along the pipeline.
        action_us: what an action takes; that of a backward is the sum of its halves.
    """
    num_ranks = len(set(place_of))
    found: list[tuple[float, int, Table]] = []
    for name in TABLES:
        if places_of_stages(name, num_ranks) != tuple(place_of):
            continue
        table = table_of(name, num_ranks, num_micro_batches)
        replayed = replay_table(table, action_us, early_us=weights_last(action_us))
        found.append((replayed.makespan_us, max(replayed.in_flight), replayed.table))
    least_us = min(makespan_us for makespan_us, _, _ in found)
    equal = [row for row in found if row[0] <= least_us * (1 + 1e-9)]
    return min(equal, key=lambda row: row[1])[2]


def table_of(schedule: str, num_ranks: int, num_micro_batches: int) -> Table:
    """The table of a schedule: one of `TABLES`, or a CSV file.

    Raises:
        ConfigError: there is none of that name, or it is for other numbers.
    """
    if schedule in TABLES:
        table = TABLES[schedule](num_ranks, num_micro_batches)
        check(table)
        return table
    table = _from_file(schedule)
    if (table.num_ranks, table.num_micro_steps) != (num_ranks, num_micro_batches):
        raise ConfigError(
            f"schedule={schedule!r} is for {table.num_ranks} ranks and {table.num_micro_steps} "
            f"micro-batches, and there are {num_ranks} and {num_micro_batches}"
        )
    return table


def splits_backward(schedule: str, num_ranks: int) -> bool:
    """Whether a schedule runs the two halves of a backward apart; not for ``auto``."""
    return example_table(schedule, num_ranks, num_ranks).splits_backward


def places_of_stages(schedule: str, num_ranks: int) -> tuple[int, ...]:
    """By stage, the rank along the pipeline that has it, whatever the number of micro-batches.

    Raises:
        ConfigError: there is no schedule of that name, or it is for another number of ranks.
    """
    table = example_table(schedule, num_ranks, num_ranks)
    if table.num_ranks != num_ranks:
        raise ConfigError(
            f"schedule={schedule!r} is for {table.num_ranks} ranks, and the mesh has {num_ranks} "
            "along 'pipeline'"
        )
    return tuple(table.rank_of[stage] for stage in range(table.num_stages))


def example_table(schedule: str, num_ranks: int, num_micro_batches: int) -> Table:
    """A table of a schedule, for somebody who does not run it: where stages lie, and how many
    micro-steps are in flight. A file's is for its own number of them."""
    schedule = _FIRST if schedule == AUTO else schedule
    if schedule in TABLES:
        return TABLES[schedule](num_ranks, num_micro_batches)
    return _from_file(schedule)


def _from_file(schedule: str) -> Table:
    if not schedule.endswith(".csv"):
        raise ConfigError(
            f"schedule={schedule!r}: {nearest(schedule, [*TABLES, AUTO])}. Or name a file, x.csv."
        )
    return read_schedule(Path(schedule))
