"""What needs a CUDA device."""
