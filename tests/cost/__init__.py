"""Costs: `fxzero.cost`."""
