"""Triton kernels for hot operators, one family per file."""
