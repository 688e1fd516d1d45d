"""What the compiler decided, without the machines it was decided for."""

from fxzero.inspect.analysis import Analysis, PassRow, ScheduleRow, TransferRow
from fxzero.inspect.capture import Capture, capture

__all__ = ["Analysis", "Capture", "PassRow", "ScheduleRow", "TransferRow", "capture"]
