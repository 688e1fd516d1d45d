"""Make a checkout importable as what it is when installed.

    checkout/fxzero/      fxzero            installed: site-packages/fxzero/
    checkout/passes/      fxzero.passes                site-packages/fxzero/passes/
    checkout/kernels/     fxzero.kernels               site-packages/fxzero/kernels/
    checkout/conf/        fxzero.conf                  site-packages/fxzero/conf/

A folder that runs Python has its own `fxzero/` found first, whether or not another one is
installed. That one must then be completed from its own siblings, never from what is installed,
which may be of another day. In a wheel there is nothing to do.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import EntryPoint, entry_points
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType

SIBLINGS = ("passes", "kernels", "conf")
"""Folders beside `fxzero/` that install below it, as pyproject.toml says."""


class SiblingFinder(MetaPathFinder):
    """Finds ``fxzero.passes`` and the others beside the package that asks for them."""

    def __init__(self, folders: dict[str, Path]) -> None:
        self.folders = folders

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The package's spec; None for every other module."""
        folder = self.folders.get(fullname)
        if folder is None:
            return None
        return spec_from_file_location(
            fullname, folder / "__init__.py", submodule_search_locations=[str(folder)]
        )


def find_siblings(package: Path) -> dict[str, Path]:
    """The folders that belong below `package` and lie beside it."""
    return {
        f"fxzero.{name}": package.parent / name
        for name in SIBLINGS
        if not (package / name).exists() and (package.parent / name / "__init__.py").is_file()
    }


def install(package: Path) -> None:
    """Let imports find what lies beside `package`; first, before an editable install's finder."""
    if folders := find_siblings(package):
        sys.meta_path.insert(0, SiblingFinder(folders))


def register_backend() -> None:
    """Let ``backend="fxzero"`` be found in a checkout that was never installed."""
    if not any(isinstance(finder, SiblingFinder) for finder in sys.meta_path):
        return
    group = "torch_dynamo_backends"
    if not entry_points(group=group, name="fxzero"):
        from fxzero import _compat

        _compat.register_entry_point(EntryPoint("fxzero", "fxzero.backend:fxzero", group))


install(Path(__file__).resolve().parent)
