"""Orders, simulation, memory: `fxzero.schedule`."""
