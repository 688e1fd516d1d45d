"""Orders of tasks: fixed distances, list scheduling by critical path, and exact for a few tasks.

List scheduling (Graham 1969) goes through time. At each moment it issues the compute task that
can start first, unless the link would stand idle meanwhile: then the ready transfer with the
longest path behind it goes first. How far gathers may run ahead of their use is a window of
bytes; the search tries several and takes the order that holds least among the fast ones.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice

from fxzero.graph.stamps import Lane
from fxzero.schedule.engine import Clock, Replay, TaskGraph, replay
from fxzero.transfer import Pool

EXACT_TASKS = 8
"""Up to so many tasks, every order is looked at."""
SLACK = 0.005
"""How much slower than the best an order may be if it holds less."""
WINDOWS = (0, 1, 2, 3, 4, 6, 8, 16, 64)
"""How far gathers may run ahead, in sizes of the largest one."""


@dataclass(frozen=True)
class FoundOrder:
    """An order, and what it comes to."""

    order: tuple[int, ...]
    replay: Replay
    by: str
    """How it was found."""


def list_order(graph: TaskGraph, window_bytes: float, *, joins_first: bool) -> list[int] | None:
    """Order tasks by list scheduling; None if the budget leaves no room to go on.

    Args:
        window_bytes: how many bytes gathers may hold before compute can use them.
        joins_first: whether a reduce that has arrived is joined before compute goes on, which
            holds less, or only when compute has to wait anyway.
    """
    return _ListScheduler(graph, window_bytes, joins_first).run()


class _ListScheduler:
    def __init__(self, graph: TaskGraph, window_bytes: float, joins_first: bool) -> None:
        self.graph = graph
        self.tasks = graph.tasks
        self.window_bytes = window_bytes
        self.joins_first = joins_first
        self.clock = Clock(graph)
        self.missing = [len(task.after) for task in graph.tasks]
        self.order: list[int] = []
        self.compute: list[int] = []
        self.transfers: dict[Lane, list[tuple[float, int]]] = {}
        self.ahead_bytes = 0
        self.unread: set[int] = set()
        """Gathers that were issued and that nothing has read yet."""
        self.is_bound = False
        """Whether the window was ever too small: otherwise a larger one gives the same order."""
        self.is_join = [
            task.lane is Lane.COMPUTE
            and any(graph.tasks[b].lane is Lane.REDUCE for b in task.after)
            for task in graph.tasks
        ]
        for i, count in enumerate(self.missing):
            if not count:
                self._ready(i)

    def _ready(self, index: int) -> None:
        task = self.tasks[index]
        if task.is_transfer:
            heap = self.transfers.setdefault(task.lane, [])
            heapq.heappush(heap, (-self.graph.urgency_us[index], index))
        else:
            self.compute.append(index)

    def _issue(self, index: int) -> None:
        self.clock.issue(index)
        self.order.append(index)
        task = self.tasks[index]
        if task.lane is Lane.GATHER:
            self.unread.add(index)
            self.ahead_bytes += self.graph.num_bytes[index]
        else:
            for before in task.after:
                if before in self.unread:
                    self.unread.discard(before)
                    self.ahead_bytes -= self.graph.num_bytes[before]
        for later in self.graph.needed_by[index]:
            self.missing[later] -= 1
            if not self.missing[later]:
                self._ready(later)

    def _fits(self, index: int) -> bool:
        held, budgets = self.clock.held, self.graph.budgets
        return all(
            held[pool] + num_bytes <= budgets[pool]
            for pool, num_bytes in self.graph.begins[index]
            if pool in budgets
        )

    def _is_next(self, gather: int) -> bool:
        """Whether something waits for nothing but gathers, this one among them."""
        ended = self.clock.ended
        return any(
            all(b in ended or self.tasks[b].lane is Lane.GATHER for b in self.tasks[f].after)
            for f in self.graph.needed_by[gather]
        )

    def _best_compute(self) -> int | None:
        """The compute task that can start first."""

        def preference(index: int) -> tuple[float, bool, float, int]:
            late = self.is_join[index] != self.joins_first
            return (self.clock.start_us(index), late, -self.graph.urgency_us[index], index)

        return min(filter(self._fits, self.compute), key=preference, default=None)

    def _best_transfer(self) -> int | None:
        """The transfer with the longest path behind it, of those that may be issued."""
        best: tuple[float, int] | None = None
        for lane, heap in self.transfers.items():
            if not heap:
                continue
            first = heap[0]
            index = first[1]
            if not self._fits(index):
                continue
            ahead_bytes = self.ahead_bytes + self.graph.num_bytes[index]
            if lane is Lane.GATHER and ahead_bytes > self.window_bytes:
                self.is_bound = True
                if not self._is_next(index):
                    continue
            best = first if best is None else min(best, first)
        return best[1] if best is not None else None

    def run(self) -> list[int] | None:
        """Issue everything."""
        while len(self.order) < len(self.tasks):
            compute, transfer = self._best_compute(), self._best_transfer()
            if transfer is not None:
                start = self.clock.start_us(transfer)
                if compute is None or start < self.clock.start_us(compute) + self.tasks[compute].us:
                    heapq.heappop(self.transfers[self.tasks[transfer].lane])
                    self._issue(transfer)
                    continue
            if compute is None:
                return None
            self.compute.remove(compute)
            self._issue(compute)
        return self.order


def fixed_order(graph: TaskGraph, distance: int, reduce_distance: int) -> list[int]:
    """Keep compute as it is, gathers `distance` ahead of their use, and as many reduces in flight.

    A reduce is launched where its source has run, and joined after `reduce_distance` further
    ones.
    """
    return _FixedDistance(graph, distance, reduce_distance).run()


class _FixedDistance:
    def __init__(self, graph: TaskGraph, distance: int, reduce_distance: int) -> None:
        self.graph = graph
        self.tasks = graph.tasks
        self.distance = distance
        self.reduce_distance = reduce_distance
        self.order: list[int] = []
        self.issued: set[int] = set()
        self.missing = [len(task.after) for task in graph.tasks]
        self.ready = [
            i
            for i, task in enumerate(graph.tasks)
            if task.lane is Lane.REDUCE and not self.missing[i]
        ]
        """A heap of reduces whose sources have run."""
        self.in_flight: deque[int] = deque()

    def _issue(self, index: int) -> None:
        if index in self.issued:
            return
        for before in self.tasks[index].after:
            self._issue(before)
        self.issued.add(index)
        self.order.append(index)
        for later in self.graph.needed_by[index]:
            self.missing[later] -= 1
            if not self.missing[later] and self.tasks[later].lane is Lane.REDUCE:
                heapq.heappush(self.ready, later)

    def _join(self, count: int) -> None:
        """Join reduces until so many are left in flight."""
        while len(self.in_flight) > count:
            for later in self.graph.needed_by[self.in_flight.popleft()]:
                if not self.tasks[later].is_transfer and not self.missing[later]:
                    self._issue(later)

    def _launch(self) -> None:
        """Launch what has become ready to be reduced; a join may make more ready."""
        while self.ready:
            index = heapq.heappop(self.ready)
            self._join(max(self.reduce_distance - 1, 0))
            self._issue(index)
            self.in_flight.append(index)
            self._join(self.reduce_distance)

    def run(self) -> list[int]:
        """Issue everything."""
        tasks, graph = self.tasks, self.graph
        first_use = {
            i: min(graph.needed_by[i], default=len(tasks))
            for i, task in enumerate(tasks)
            if task.lane is Lane.GATHER
        }
        waiting = deque(sorted(first_use, key=lambda i: (first_use[i], i)))
        for index, task in enumerate(tasks):
            if task.is_transfer or index in self.issued:
                continue
            if any(tasks[b].lane is Lane.REDUCE for b in task.after):
                continue  # a join: when it is its turn
            while waiting and first_use[waiting[0]] <= index:
                self._issue(waiting.popleft())
            for gather in islice(waiting, self.distance):
                if not self.missing[gather]:
                    self._issue(gather)
            self._issue(index)
            self._launch()
        for index in range(len(tasks)):
            self._issue(index)
        return self.order


def exact_order(graph: TaskGraph) -> list[int] | None:
    """The fastest order of a few tasks, and of those the one that holds least; None if the budget
    allows none. Every order is looked at, but for those that have already lost."""
    best: tuple[float, int] = (float("inf"), 0)
    found: list[int] | None = None
    count = len(graph.tasks)
    least_left = graph.urgency_us

    def search(clock: Clock, order: list[int], left: set[int]) -> None:
        nonlocal best, found
        figures = (clock.makespan_us, clock.peaks[Pool.DEVICE])
        if figures >= best:
            return
        if not left:
            best, found = figures, list(order)
            return
        for index in sorted(left, key=lambda i: -least_left[i]):
            if any(before in left for before in graph.tasks[index].after):
                continue
            following = clock.copy()
            following.issue(index)
            if not graph.fits(following.peaks):
                continue
            search(following, [*order, index], left - {index})

    search(Clock(graph), [], set(range(count)))
    return found


def best_order(
    graph: TaskGraph, prefer: Callable[[Sequence[int]], bool] = lambda _: True
) -> FoundOrder | None:
    """The order that holds least among those that are about as fast as the fastest found.

    Never slower than gathers one ahead of their use, if the budget allows those and they are what
    is preferred.

    Args:
        prefer: what is asked of an order, if any that was found can do it.

    Returns:
        None if no order was found within the budget.
    """
    found: list[FoundOrder] = []

    def consider(order: list[int] | None, by: str) -> FoundOrder | None:
        if order is None:
            return None
        key = tuple(order)
        result = FoundOrder(key, replay(graph, order), by)
        if not graph.fits(result.replay.peaks):
            return None
        found.append(result)
        return result

    if len(graph) <= EXACT_TASKS:
        return consider(exact_order(graph), "exact")
    gathers = (i for i, task in enumerate(graph.tasks) if task.lane is Lane.GATHER)
    largest = max((graph.num_bytes[i] for i in gathers), default=0)
    for joins_first in (True, False):
        for factor in WINDOWS if largest else (0,):
            scheduler = _ListScheduler(graph, factor * largest, joins_first)
            consider(scheduler.run(), f"list, {factor} ahead")
            if not scheduler.is_bound:
                break
    fixed = consider(fixed_order(graph, 1, 1), "distance 1")
    consider(fixed_order(graph, 0, 0), "distance 0")
    if not found:
        return None
    found = list(filter(lambda f: prefer(f.order), found)) or found
    fixed = fixed if fixed in found else None
    best_us = min(f.replay.makespan_us for f in found)
    limit_us = best_us * (1 + SLACK)
    if fixed is not None:
        limit_us = max(best_us, min(limit_us, fixed.replay.makespan_us))
    fast = [f for f in found if f.replay.makespan_us <= limit_us]
    return min(fast, key=lambda f: f.replay.peak_bytes)
