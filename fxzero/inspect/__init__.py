"""What the compiler decided, without the machines it was decided for."""

from fxzero.inspect.analysis import Analysis, PassRow, ScheduleRow, TransferRow
from fxzero.inspect.capture import Capture, capture
from fxzero.inspect.joint import joint_graph
from fxzero.inspect.memory import MemoryReport, MemoryRow

__all__ = [
    "Analysis",
    "Capture",
    "MemoryReport",
    "MemoryRow",
    "PassRow",
    "ScheduleRow",
    "TransferRow",
    "capture",
    "joint_graph",
]
