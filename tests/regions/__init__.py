"""What runs of compute become: `fxzero.regions`."""
