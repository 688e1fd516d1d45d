"""What `fxzero doctor` finds out."""
