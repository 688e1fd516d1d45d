"""Levels from everything kept to the least that can be."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fxzero.schedule import repetition_levels
from fxzero.schedule.repetition import Closure, Value, closure
from fxzero.schedule.repetition_levels import Levels, crossers, fences_for, levels


def at(found: Levels, level: int) -> Closure:
    """What a level comes to."""
    chosen = found.at(level)
    return closure(found.values, chosen.repeated, chosen.in_parts)


def chain_of_layers(depth: int) -> list[Value]:
    """Layers of a residual stream (1), a wide product (8), what a cheap operator makes of it (8),
    and a narrow product (1); backward reads all but the last."""
    values = [Value("x", 10, 1.0, (), is_needed=True)]
    for layer in range(depth):
        x = len(values) - 1
        values += [
            Value(f"{layer}.up", 80, 100.0, (x,), is_needed=True),
            Value(f"{layer}.gelu", 80, 5.0, (x + 1,), is_needed=True),
            Value(f"{layer}.down", 10, 100.0, (x + 2,)),
            Value(f"{layer}.add", 10, 1.0, (x, x + 3), is_needed=True),
        ]
    return values


def test_levels_of_equal_layers() -> None:
    """Cheap values go first, those of the first layer before the others'; the end keeps what
    crosses from layer to layer."""
    values = chain_of_layers(6)
    found = levels(values)
    kept = [found.kept_bytes(level) for level in range(len(found))]
    assert kept == sorted(kept, reverse=True)
    assert len(set(kept)) == len(found)
    assert kept[0] == closure(values, ()).kept_bytes
    first = at(found, 1)
    assert [values[i].name for i in first.repeated] == ["0.gelu"]
    segments = len(found.fences)
    assert [values[i].name for i in at(found, segments).repeated] == [
        f"{layer}.gelu" for layer in range(segments)
    ]
    assert all(
        i < found.fences[-1] for i in found.at(found.main).repeated
    )  # the last backward comes at once
    last = at(found, len(found) - 1)
    assert last.kept_bytes < 6 * 20
    times = [at(found, level).us for level in range(len(found))]
    assert times == sorted(times)


def test_levels_keep_what_crosses_a_fence() -> None:
    """So that backward never repeats more than a segment at once."""
    values = chain_of_layers(12)
    found = levels(values)
    crossing = crossers(values, found.fences)
    assert crossing
    assert crossing.isdisjoint(found.at(found.last).repeated)


def test_longer_segments_come_last() -> None:
    """Less and less crosses, until nothing does and everything is repeated."""
    values = chain_of_layers(12)
    found = levels(values)
    longer = range(found.last + 1, len(found))
    assert len(longer) > 1
    crossing = [len(values) - len(found.at(level).repeated) for level in longer]
    assert crossing == sorted(crossing, reverse=True)
    assert crossing[0] < len(crossers(values, found.fences))
    assert crossing[-1] == 0


def test_what_somebody_could_choose_by_hand_comes_last() -> None:
    """Once: everything repeated is what the longest of segments comes to."""
    values = chain_of_layers(6)
    some, every = {2, 6}, set(range(len(values)))
    alone, found = levels(values), levels(values, by_hand=[some, every])
    assert len(found) == len(alone) + 1
    assert all(found.at(level) == alone.at(level) for level in range(len(alone)))
    assert found.at(len(found) - 1).repeated == some
    assert found.at(len(found) - 1).in_parts == every - some


def test_what_is_cheap_may_cross_but_by_hand() -> None:
    """Repeated at every level, whatever it crosses; what somebody chooses is as they would have
    it, also where the same is a level of longer segments."""
    values = chain_of_layers(6)
    base = {i for i, value in enumerate(values) if value.name.endswith("add")}
    by_hand = set(range(len(values))) - base
    found = levels(values, base, [by_hand], crosses=True)
    assert base & crossers(values, found.fences)
    assert all(base <= found.at(level).repeated for level in range(found.by_hand))
    assert found.by_hand == len(found) - 1
    assert found.at(found.by_hand).repeated == by_hand
    longer = levels(values, base).longer[0].repeated
    again = levels(values, base, [longer], crosses=True)
    assert again.at(again.by_hand).repeated == longer


def test_some_of_a_level_is_kept_again() -> None:
    """As far as bytes to spare go; with enough of them all of it."""
    values = chain_of_layers(6)
    found = levels(values)
    last = found.last
    kept, us = found.kept_bytes(last), found.us(last)
    for spare in (0, 100, 300):
        at = found.closure_at(last, spare)
        assert kept <= at.kept_bytes <= kept + spare
        assert at.us <= us
        us = at.us
    assert us < found.us(last)
    every = found.kept_bytes(0) - kept
    assert found.closure_at(last, every).us == 0


def test_fences_stand_where_little_crosses() -> None:
    """Behind a layer, not within."""
    values = chain_of_layers(8)
    for fence in fences_for(values, 2 * 180):
        crossing = crossers(values, [fence])
        assert sum(values[i].num_bytes for i in crossing) <= 20


def test_equal_layers_are_solved_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred cost what four do."""
    solved = []
    original = repetition_levels.pareto

    def count(*arguments: object) -> object:
        solved.append(1)
        return original(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(repetition_levels, "pareto", count)
    repetition_levels._points.cache_clear()
    levels(chain_of_layers(96))
    assert 1 <= len(solved) <= 4


def test_what_is_cheap_is_repeated_at_every_level() -> None:
    """The base of all levels stays."""
    values = chain_of_layers(3)
    base = {i for i, value in enumerate(values) if value.name.endswith("gelu")}
    found = levels(values, base)
    assert base == set(found.at(0).repeated)
    repeated = set(at(found, len(found) - 1).repeated)
    assert base <= repeated
    crossing = crossers(values, found.fences)
    assert crossing
    assert found.at(0) == levels(values, base | crossing).at(0)  # but what crosses is kept


def test_what_crosses_is_cut_into_parts() -> None:
    """A block's input that all ranks have is never repeated: keeping a part of it holds less."""
    values = [
        replace(value, part_bytes=value.num_bytes // 8, part_us=1000.0)
        if value.num_bytes == 10
        else value
        for value in chain_of_layers(6)
    ]
    whole, parts = levels(chain_of_layers(6)), levels(values)
    assert parts.kept_bytes(0) == whole.kept_bytes(0)
    assert parts.kept_bytes(parts.last) < whole.kept_bytes(whole.last) / 2
    end = at(parts, parts.last)
    assert crossers(values, parts.fences) <= end.in_parts
    assert not at(parts, 1).in_parts  # repeating is cheaper
