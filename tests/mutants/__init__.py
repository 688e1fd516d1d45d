"""Deliberate faults, and what catches each: see `tests.mutants.faults` and docs/mutants.md."""
