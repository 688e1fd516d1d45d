"""Groups of processes, and what they agree on: `fxzero.ranks`."""
