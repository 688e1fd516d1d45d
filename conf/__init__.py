"""Settings for Hydra."""
