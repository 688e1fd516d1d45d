"""Tests of `fxzero.runtime`."""
