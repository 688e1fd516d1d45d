"""Which pass broke the numbers, and which one costs the time."""

from fxzero.inspect.bisect.recorded import Case
from fxzero.inspect.bisect.search import Check, Finding, bisect

__all__ = ["Case", "Check", "Finding", "bisect"]
