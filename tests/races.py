"""Who has used which memory, and what of it nothing orders: a race detector by vector clocks.

    clock    by who acts (a thread of the host, a stream): up to which act of his another one knows
    access   some bytes, read or written by somebody in an act of his
    race     two accesses of the same bytes, a write among them, neither of which knows of the other

Clocks go on where somebody hands something over (an event, a queue, a future) and are joined where
somebody takes it. Whether two accesses race does not depend on which of them came first in this
run: one run finds what others would meet.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Who = str
Clock = dict[Who, int]


def thread() -> Who:
    """The calling thread, as one who acts."""
    return f"thread {threading.current_thread().name}"


@dataclass(frozen=True)
class Access:
    """Some bytes, used by somebody."""

    who: Who
    act: int
    begin: int
    end: int
    writes: bool
    where: str
    is_users: bool = False
    """Whether it comes between two steps, from whoever trains."""
    is_checked: bool = False
    """Of a read: whether what was read is compared later with what is there."""

    def races_with(self, other: Access) -> bool:
        """Whether it matters which of two comes first, of which neither knows of the other."""
        apart = other.end <= self.begin or self.end <= other.begin
        is_found_out = (self.is_checked and other.is_users) or (self.is_users and other.is_checked)
        return not apart and (self.writes or other.writes) and not is_found_out

    def __str__(self) -> str:
        return f"{self.who} {'writes' if self.writes else 'reads'} in {self.where}"


@dataclass
class Memory:
    """Bytes that are somewhere."""

    name: str
    on_host: bool
    accesses: dict[tuple[object, ...], Access] = field(default_factory=dict)
    kept_for: set[Who] = field(default_factory=set)
    """Whose accesses whoever hands it out again waits for."""
    let_go: Clock = field(default_factory=dict)
    """What those knew who have let go of it: whoever hands it out again comes behind them."""


class Races:
    """What is known by whom, and what was found."""

    def __init__(self) -> None:
        self.found: list[str] = []
        self.num_accesses = 0
        self.lock = threading.RLock()
        self._clocks: dict[Who, Clock] = {}

    def _clock(self, who: Who) -> Clock:
        return self._clocks.setdefault(who, {who: 1})

    def hand_over(self, who: Who) -> Clock:
        """What somebody knows now, for others; what he does next they do not know of."""
        with self.lock:
            clock = self._clock(who)
            known = dict(clock)
            clock[who] += 1
            return known

    def learn(self, who: Who, known: Mapping[Who, int]) -> None:
        """Let somebody know what another one has handed over."""
        with self.lock:
            clock = self._clock(who)
            for other, act in known.items():
                clock[other] = max(clock.get(other, 0), act)

    def use(
        self, memory: Memory, who: Who, span: tuple[int, int], *, writes: bool, **more: Any
    ) -> None:
        """Note an access, and what it races with.

        Args:
            more: other fields of `Access`.
        """
        with self.lock:
            self.num_accesses += 1
            mine = Access(who, self._clock(who)[who], *span, writes, **more)
            for other in memory.accesses.values():
                if mine.races_with(other) and not self._knows(who, other):
                    self._tell(f"of {memory.name}: {other}; {mine}: nothing orders them")
            memory.accesses[who, span, writes] = mine

    def let_go(self, memory: Memory, who: Who) -> None:
        """Somebody no longer holds some memory."""
        with self.lock:
            for other, act in self._clock(who).items():
                memory.let_go[other] = max(memory.let_go.get(other, 0), act)

    def hand_out(self, memory: Memory, who: Who) -> None:
        """Memory that nobody holds any more is somebody's to fill."""
        with self.lock:
            for other in memory.accesses.values():
                is_over = memory.let_go.get(other.who, 0) >= other.act
                if is_over or other.who in memory.kept_for or self._knows(who, other):
                    continue
                self._tell(f"of {memory.name}: {other}; it was let go of before {who} waited")

    def forbid(self, access: str) -> None:
        """Note what must not be, whatever orders it."""
        with self.lock:
            self._tell(access)

    def _knows(self, who: Who, access: Access) -> bool:
        return access.who == who or self._clock(who).get(access.who, 0) >= access.act

    def _tell(self, what: str) -> None:
        if what not in self.found:
            self.found.append(what)
