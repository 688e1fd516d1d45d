"""fxzero on real gloo processes, against the same model run eagerly."""
