"""Settings of `examples/train.py`, for Hydra."""
