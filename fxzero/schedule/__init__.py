"""When things run: tasks on resources, their replay, and the search for a good order."""

from fxzero.schedule.engine import Hold, Replay, Task, TaskGraph, replay
from fxzero.schedule.search import FoundOrder, best_order, exact_order, fixed_order, list_order

__all__ = [
    "FoundOrder",
    "Hold",
    "Replay",
    "Task",
    "TaskGraph",
    "best_order",
    "exact_order",
    "fixed_order",
    "list_order",
    "replay",
]
