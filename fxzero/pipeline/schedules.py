"""Schedules of a pipeline by name: one that is made here, or a CSV file of somebody's own."""

from __future__ import annotations

from pathlib import Path

from fxzero.errors import ConfigError, nearest
from fxzero.pipeline.replay import check, read_schedule
from fxzero.pipeline.tables import TABLES, Table


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
    """Whether a schedule runs the two halves of a backward apart."""
    table = TABLES[schedule](num_ranks, num_ranks) if schedule in TABLES else _from_file(schedule)
    return table.splits_backward


def places_of_stages(schedule: str, num_ranks: int) -> tuple[int, ...]:
    """By stage, the rank along the pipeline that has it, whatever the number of micro-batches.

    Raises:
        ConfigError: there is no schedule of that name, or it is for another number of ranks.
    """
    table = TABLES[schedule](num_ranks, num_ranks) if schedule in TABLES else _from_file(schedule)
    if table.num_ranks != num_ranks:
        raise ConfigError(
            f"schedule={schedule!r} is for {table.num_ranks} ranks, and the mesh has {num_ranks} "
            "along 'pipeline'"
        )
    return tuple(table.rank_of[stage] for stage in range(table.num_stages))


def _from_file(schedule: str) -> Table:
    if not schedule.endswith(".csv"):
        raise ConfigError(
            f"schedule={schedule!r}: {nearest(schedule, TABLES)}. Or name a file, x.csv."
        )
    return read_schedule(Path(schedule))
