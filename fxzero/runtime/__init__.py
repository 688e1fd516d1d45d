"""What runs at step time."""
