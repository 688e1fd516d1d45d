"""What lives on disk: `fxzero.disk`."""
