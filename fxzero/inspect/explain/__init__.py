"""Why something is as it is: the numbers that decided, the next best choice, what would change it.

Everything is read from an `Analysis`, of a capture or of a dump: nothing is compiled for it.
"""

from fxzero.inspect.explain.explanation import Answer, Explanation, Setting
from fxzero.inspect.explain.find import explain

__all__ = ["Answer", "Explanation", "Setting", "explain"]
