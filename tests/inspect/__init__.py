"""Graph tests: no processes, no memory."""
