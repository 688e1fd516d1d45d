"""The ``fxzero`` command."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line; its libraries come with ``pip install 'fxzero[cli]'``."""
    try:
        from fxzero.cli.app import app
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        sys.exit(f"the fxzero command needs {error.name}: pip install 'fxzero[cli]'")
    app()
