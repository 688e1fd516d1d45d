"""The tests of fxzero."""
