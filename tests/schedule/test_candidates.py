"""What backward holds for a choice, and the short list of choices."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from fxzero.schedule.candidates import MOST, Read, bytes_in_backward
from fxzero.schedule.repetition import Closure, Value, closure
from fxzero.schedule.repetition_levels import levels
from tests.schedule.test_repetition import random_values
from tests.schedule.test_repetition_levels import chain_of_layers


def reads_from_the_end(values: Sequence[Value]) -> list[Read]:
    """Backward reads what forward made last first."""
    count = len(values)
    return [
        Read(count - 1 - i, count - 1 - i) if v.is_needed else Read() for i, v in enumerate(values)
    ]


def held_by_walking(values: Sequence[Value], reads: Sequence[Read], choice: Closure) -> int:
    """The same, place by place: what is needed there, or later, and is there already."""
    count = max((read.last for read in reads), default=-1) + 1
    uses: list[set[int]] = [
        {p for p in (read.first, read.last) if p >= 0 and i in {*choice.kept, *choice.repeated}}
        for i, read in enumerate(reads)
    ]
    for i in reversed(choice.repeated):  # what it is made from is used when it is made
        for source in values[i].sources:
            if uses[i]:
                uses[source].add(min(uses[i]))
    most = sum(
        values[i].part_bytes if i in choice.in_parts else values[i].num_bytes for i in choice.kept
    )
    for place in range(count):
        held = 0
        for i in choice.kept:
            if not uses[i] or max(uses[i]) >= place:
                part = i in choice.in_parts
                held += values[i].part_bytes if part else values[i].num_bytes
        for i in (*choice.repeated, *choice.in_parts):
            if uses[i] and min(uses[i]) <= place <= max(uses[i]):
                held += values[i].repeat_bytes
        most = max(most, held)
    return most


def test_what_backward_holds() -> None:
    """Against a walk over all places, for random graphs and choices."""
    rng = random.Random(0)
    tried = 0
    for seed in range(200):
        values = [
            replace(
                value,
                may_keep=True,
                keep_us=rng.random(),
                repeat_bytes=value.num_bytes * rng.randint(0, 1),
            )
            for value in random_values(seed)
        ]
        chosen = {i for i in range(len(values)) if rng.random() < 0.6}
        choice = closure(values, chosen)
        reads = reads_from_the_end(values)
        assert bytes_in_backward(values, reads, choice) == held_by_walking(values, reads, choice)
        tried += bool(choice.repeated)
    assert tried > 100


def test_what_is_fused_holds_nothing_and_parts_are_gathered() -> None:
    """A repeated value that its readers swallow, and a part that is whole while it is read."""
    values = [
        Value("x", 8, 1.0, (), is_needed=True, part_bytes=2, part_us=1.0, repeat_bytes=8),
        Value("a", 16, 5.0, (0,), is_needed=True, repeat_bytes=16),
        Value("b", 16, 5.0, (1,), is_needed=True),
    ]
    reads = reads_from_the_end(values)
    assert bytes_in_backward(values, reads, closure(values, ())) == 40
    assert bytes_in_backward(values, reads, closure(values, {1, 2})) == 8 + 16
    assert bytes_in_backward(values, reads, closure(values, {2})) == 8 + 16
    assert bytes_in_backward(values, reads, closure(values, {1, 2}, {0})) == 2 + 8 + 16


def test_the_fastest_for_what_they_hold() -> None:
    """Few, the fastest first, with what somebody could choose by hand."""
    values = [replace(value, repeat_bytes=value.num_bytes) for value in chain_of_layers(8)]
    by_hand = [i for i, value in enumerate(values) if "add" not in value.name]
    found = levels(values, by_hand=[by_hand], reads=reads_from_the_end(values))
    candidates = found.candidates
    assert 8 <= len(candidates) <= 3 * MOST
    assert [candidate.us for candidate in candidates] == sorted(
        candidate.us for candidate in candidates
    )
    assert candidates[0].us == 0.0  # everything is kept
    for candidate in candidates:
        choice = found.closure_at(candidate.level, candidate.spare_bytes)
        assert (candidate.us, candidate.kept_bytes) == (
            choice.us + choice.keep_us,
            choice.kept_bytes,
        )
    hand = closure(values, by_hand)
    assert any(
        found.closure_at(r.level, r.spare_bytes).repeated == hand.repeated for r in candidates
    )


def test_keeping_may_take_longer_than_repeating() -> None:
    """Where a value would be fused into its readers, and is written only to be kept."""
    values = [
        Value("x", 8, 1.0, (), is_needed=True, may_repeat=False),
        Value("a", 8, 1.0, (0,), is_needed=True, keep_us=3.0),
    ]
    found = levels(values, by_hand=[(1,)], reads=reads_from_the_end(values))
    assert [(candidate.us, candidate.kept_bytes) for candidate in found.candidates] == [
        (1.0, 8),
        (3.0, 16),
    ]


def test_nobody_knows_when_backward_reads() -> None:
    """Then there are none."""
    assert levels(chain_of_layers(4)).candidates == ()
