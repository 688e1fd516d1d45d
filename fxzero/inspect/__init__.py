"""What the compiler decided, without the machines it was decided for."""

from fxzero.inspect.capture import Capture, capture
from fxzero.inspect.plan import PassRow, Plan, ScheduleRow, TransferRow

__all__ = ["Capture", "PassRow", "Plan", "ScheduleRow", "TransferRow", "capture"]
