"""What the examples print and do."""
