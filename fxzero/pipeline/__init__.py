"""Schedules of a pipeline as data, and what they come to: no graph and no rank is in here."""
