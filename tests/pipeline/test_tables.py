"""Schedules of pipelines: what they come to, against closed forms, and what is no schedule."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxzero.errors import ConfigError
from fxzero.pipeline.replay import (
    check,
    read_schedule,
    replay_table,
    unit_us,
    waits_of,
    weights_last,
)
from fxzero.pipeline.tables import TABLES, Action, Table, Work, one_f_one_b

SIZES = [(1, 1), (2, 4), (3, 9), (4, 8), (4, 16), (8, 16), (8, 64)]


def text(table: Table) -> list[str]:
    """A line a rank."""
    return [" ".join(map(str, row)) for row in table.ranks]


def test_1f1b_of_two_ranks() -> None:
    """As everybody draws it."""
    assert text(one_f_one_b(2, 3)) == ["0F0 0F1 0B0 0F2 0B1 0B2", "1F0 1B0 1F1 1B1 1F2 1B2"]


def test_interleaved_of_two_ranks() -> None:
    """In rounds of two micro-steps."""
    assert text(TABLES["interleaved"](2, 4))[0] == (
        "0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3"
    )


def test_zbv_of_two_ranks() -> None:
    """There and back: the first rank has the last stage."""
    table = TABLES["zbv"](2, 4)
    assert table.rank_of == {0: 0, 3: 0, 1: 1, 2: 1}
    assert table.splits_backward


def idle_share(name: str, ranks: int, micro_steps: int) -> float:
    """By the papers, if forward, input gradients and gradients of weights take as long."""
    p, m = ranks, micro_steps
    return {
        "gpipe": (p - 1) / (m + p - 1),
        "1f1b": (p - 1) / (m + p - 1),
        "interleaved": (p - 1) / (2 * m + p - 1),
        "breadth_first": (p - 1) / (2 * m + p - 1),
        "zb_h1": (p - 1) / (3 * m + p - 1),
        "zbv": (p - 1) / (6 * m + p - 1),
    }[name]


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize(("ranks", "micro_steps"), SIZES)
def test_idle_time_is_that_of_the_closed_form(name: str, ranks: int, micro_steps: int) -> None:
    """Of four ranks and eight micro-steps 27.3, 15.8, 11.1 and 5.9 %."""
    found = replay_table(TABLES[name](ranks, micro_steps), unit_us)
    assert max(found.idle_shares) == pytest.approx(idle_share(name, ranks, micro_steps), abs=1e-12)


@pytest.mark.parametrize(("ranks", "micro_steps"), SIZES)
def test_how_many_micro_steps_are_in_flight(ranks: int, micro_steps: int) -> None:
    """gpipe all, 1f1b as many as there are ranks to the end, zero bubble as 1f1b's first."""
    p, m = ranks, micro_steps
    most = {name: replay_table(make(p, m), unit_us).in_flight for name, make in TABLES.items()}
    assert most["gpipe"] == (m,) * p
    assert most["1f1b"] == tuple(p - rank for rank in range(p))
    assert most["interleaved"][0] == min(2 * m, 2 * p + p - 1)
    assert most["breadth_first"] == (2 * m,) * p
    assert max(most["zb_h1"]) <= p
    assert max(most["zbv"]) <= 2 * p


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(TABLES)), st.integers(1, 9), st.integers(1, 20))
def test_every_table_can_be_run(name: str, ranks: int, micro_steps: int) -> None:
    """Whatever the numbers: each action once, and nobody waits for himself."""
    table = TABLES[name](ranks, micro_steps)
    check(table)
    assert table.num_ranks == ranks
    assert table.num_micro_steps == micro_steps


def test_what_travels_takes_time() -> None:
    """From rank to rank, and not within one."""
    table = one_f_one_b(2, 1)
    found = replay_table(table, unit_us, lambda before, action: 10.0)
    assert [found.start_us[a] for row in table.ranks for a in row] == [0, 24, 11, 12]


def test_what_leaves_before_an_action_ends() -> None:
    """1F1B that sends input gradients before it makes those of weights: idle for a unit to fill
    and one to drain, where it is three for a backward that sends at its end."""
    table = one_f_one_b(2, 8)
    assert replay_table(table, unit_us).makespan_us == 8 * 3 + 3
    found = replay_table(table, unit_us, early_us=weights_last(unit_us))
    assert found.makespan_us == 8 * 3 + 2
    # On one rank nothing is early: an action waits for the one before.
    alone = one_f_one_b(1, 4)
    assert replay_table(alone, unit_us, early_us=weights_last(unit_us)).makespan_us == 4 * 3
    # Halves that are apart send at their ends.
    for name in ("zb_h1", "zbv"):
        halves = TABLES[name](4, 8)
        early = replay_table(halves, unit_us, early_us=weights_last(unit_us))
        assert early.end_us == replay_table(halves, unit_us).end_us


def test_a_picture() -> None:
    """A line a rank, to scale."""
    found = replay_table(one_f_one_b(2, 3), unit_us)
    assert found.picture(12) == "rank 0 |01··aa2bb·cc|\nrank 1 |·0aa1bb2cc··|"


def test_a_file_there_and_back(tmp_path: Path) -> None:
    """Cells of idle time are left out."""
    path = tmp_path / "mine.csv"
    table = TABLES["zb_h1"](3, 4)
    table.write(path)
    assert read_schedule(path).ranks == table.ranks
    path.write_text("0F0,0F1,,0B0,0B1\n,1F0,1B0,1F1,1B1\n")
    assert text(read_schedule(path))[1] == "1F0 1B0 1F1 1B1"


def changed(**rows: str) -> Table:
    """Two ranks' rows as text, those of 1f1b where none is given."""
    given = {f"r{i}": line for i, line in enumerate(text(one_f_one_b(2, 2)))} | rows
    parse = {str(a): a for s in range(4) for w in Work for m in range(4) for a in [Action(s, w, m)]}
    return Table("mine", tuple(tuple(parse[w] for w in line.split()) for line in given.values()))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ({"r1": "1F0 1B0 1F1"}, r"'mine' lacks 1B1\. Each of 2 stages does F, B of each of 2"),
        ({"r0": "0F0 0F1 0B0 0F1 0B1"}, "has twice 0F1"),
        ({"r0": "0F0 0F1 0B0 0B1 1F0"}, r"stage 1 is on ranks \[0, 1\]"),
        ({"r0": "0F0 0F1 0B0 0B1 0W0"}, "cannot have 0W0"),
        ({"r0": "0F0 0B0 0F1 0B1", "r1": "1F0 1F1 1B0 1B1"}, "waits for itself: .*0F1 behind 0B0"),
        ({"r0": "", "r1": ""}, "has no actions"),
        ({"r0": "0F0 0B0 0F1 0B1", "r1": "3F0 3B0 3F1 3B1"}, "lacks 1F0, 1F1, 1B0"),
    ],
)
def test_what_is_no_table(rows: dict[str, str], message: str) -> None:
    """What is wrong with it is named."""
    with pytest.raises(ConfigError, match=message):
        check(changed(**rows))


def test_a_file_that_is_none(tmp_path: Path) -> None:
    """Row and cell are named."""
    path = tmp_path / "mine.csv"
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_schedule(path)
    path.write_text("0F0,0X0\n")
    with pytest.raises(ConfigError, match="row 0, cell 1: '0X0' is no action"):
        read_schedule(path)


def test_every_action_waits_for_the_one_before() -> None:
    """And for what it needs."""
    waits = waits_of(one_f_one_b(2, 1))
    edges = sorted(f"{a} {b}" for a, b in waits.edges)
    assert edges == ["0F0 0B0", "0F0 1F0", "1B0 0B0", "1F0 1B0"]
