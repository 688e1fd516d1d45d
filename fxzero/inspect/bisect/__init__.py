"""Which pass broke the numbers, and which one costs the time."""

from fxzero.inspect.bisect.recorded import Case
from fxzero.inspect.bisect.search import Check, Finding, bisect
from fxzero.inspect.bisect.slow import Timed, slow

__all__ = ["Case", "Check", "Finding", "Timed", "bisect", "slow"]
