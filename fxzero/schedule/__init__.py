"""When things run: tasks on lanes, their replay, and the search for a good order."""

from fxzero.schedule.search import Found, best_order, exact_order, fixed_order, list_order
from fxzero.schedule.tasks import Hold, Replay, Task, TaskGraph, replay

__all__ = [
    "Found",
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
