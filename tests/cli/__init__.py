"""The `fxzero` command: `fxzero.cli`."""
