"""``python -m fxzero``: the ``fxzero`` command, where its script is not on the path."""

from fxzero.cli import main

main()
