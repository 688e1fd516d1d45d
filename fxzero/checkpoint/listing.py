"""What is in a folder of checkpoints, by their manifests and the lengths of their files alone."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fxzero.checkpoint.folder import PUBLISHED, is_of_others, is_ours, published, read_manifest
from fxzero.checkpoint.manifest import Manifest
from fxzero.errors import CheckpointError, ConfigError

UNFINISHED = ".writing-"


@dataclass(frozen=True)
class ListedCheckpoint:
    """One of them."""

    path: Path
    manifest: Manifest | None
    """None where it cannot be read, and in a checkpoint of others."""
    fault: str
    """What is wrong; empty if every file is there, and as long as it was."""

    @property
    def step_text(self) -> str:
        """The number that it was saved under, as far as anything says it."""
        if self.manifest is not None:
            return str(self.manifest.step)
        match = PUBLISHED.fullmatch(self.path.name)
        return str(int(match[1])) if match is not None else ""

    def to_json(self) -> dict[str, Any]:
        """As docs/checkpoint.md says."""
        m = self.manifest
        return {
            "path": str(self.path),
            "step": int(self.step_text) if self.step_text else None,
            "written": None if m is None else m.written,
            "tensor_bytes": None if m is None else m.tensor_bytes,
            "layout": None if m is None else m.layout,
            "world_size": None if m is None else m.world_size,
            "versions": None if m is None else dict(m.versions),
            "fault": self.fault or None,
        }


@dataclass(frozen=True)
class Listed:
    """A folder."""

    folder: Path
    rows: tuple[ListedCheckpoint, ...]
    """Oldest first."""
    unfinished: tuple[str, ...]
    """Folders that are being written, or that a job which ended has left."""

    @property
    def are_whole(self) -> bool:
        """Nothing is wrong with any of them."""
        return not any(row.fault for row in self.rows)

    def to_json(self) -> dict[str, Any]:
        """As docs/checkpoint.md says."""
        return {
            "folder": str(self.folder),
            "checkpoints": [row.to_json() for row in self.rows],
            "unfinished": list(self.unfinished),
        }


def list_checkpoints(folder: Path) -> Listed:
    """Look at all checkpoints of a folder; or at one, if it is one.

    Raises:
        ConfigError: there is no such folder.
    """
    if not folder.is_dir():
        raise ConfigError(f"{folder} is no folder. Name one with checkpoints in it.")
    if is_ours(folder):
        return Listed(folder, (_listed(folder),), ())
    if is_of_others(folder):
        return Listed(folder, (ListedCheckpoint(folder, None, ""),), ())
    rows = tuple(_listed(item.path) for item in published(folder))
    names = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir())
    return Listed(folder, rows, tuple(name for name in names if name.startswith(UNFINISHED)))


def _listed(path: Path) -> ListedCheckpoint:
    try:
        return ListedCheckpoint(path, read_manifest(path), "")
    except CheckpointError as error:
        return ListedCheckpoint(path, _manifest_alone(path), str(error))


def _manifest_alone(path: Path) -> Manifest | None:
    """A manifest whose files are not all there."""
    try:
        return read_manifest(path, sizes=False)
    except CheckpointError:
        return None
