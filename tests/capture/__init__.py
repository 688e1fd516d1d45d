"""Towards a joint graph: `fxzero.capture`."""
