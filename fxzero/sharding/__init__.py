"""Shards: how parameters are marked, what they are to whoever holds them, and who shares them."""
