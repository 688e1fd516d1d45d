"""Of fxzero/checkpoint: what is written, what is read back, and what happens when either fails."""
