"""Run a script where a warning of fxzero is an error: ``python strict.py SCRIPT ARGUMENTS``.

``python -W error::fxzero.errors.FxZeroWarning`` is read before Python can import fxzero.
"""

import runpy
import sys
import warnings

import fxzero
from fxzero.ranks.groups import leave

if __name__ == "__main__":
    warnings.filterwarnings("error", category=fxzero.FxZeroWarning)
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
    leave()  # under DDP nobody does, and gloo's threads abort some exits
