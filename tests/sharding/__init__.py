"""What becomes of a parameter: `fxzero.sharding`."""
