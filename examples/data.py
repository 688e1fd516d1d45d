"""Bytes to learn from, in batches that do not depend on how many ranks read them.

A batch is a function of the seed and the step: where its rows start in the text is
drawn for the whole batch, and each rank reads only its own rows. So one rank and two
train on the same rows in the same order, and a run can be resumed at any step.

    rows of step s:   0 1 2 3 4 5 6 7
    2 ranks:         ╰─ 0 ──╯╰─ 1 ──╯
"""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from examples.failures import SettingsError

Text = npt.NDArray[np.uint8]

# Tests, other people's packages, and two folders of generated tables.
SKIPPED = frozenset(
    {"test", "tests", "idle_test", "site-packages", "dist-packages", "encodings", "pydoc_data"}
)


def stdlib_text(max_bytes: int) -> Text:
    """The source of the running Python's standard library, files by name, cut at `max_bytes`."""
    root = Path(sysconfig.get_path("stdlib"))
    text = bytearray()
    for path in sorted(root.rglob("*.py")):
        if len(text) >= max_bytes:
            break
        if SKIPPED.isdisjoint(path.relative_to(root).parts):
            text += path.read_bytes()
    return np.frombuffer(bytes(text[:max_bytes]), dtype=np.uint8)


def file_text(path: str | Path, max_bytes: int) -> Text:
    """A file's first `max_bytes` bytes, mapped: only what a batch needs is ever read.

    Raises:
        SettingsError: there is no such file, or it is empty.
    """
    path = Path(path)
    if not path.is_file():
        raise SettingsError(
            f"data.path={path}: no such file (looked for {path.resolve()}). "
            "Give the path of a text file, or train on data=stdlib, which needs none."
        )
    if path.stat().st_size == 0:
        raise SettingsError(f"data.path={path}: the file is empty. Give a text to learn from.")
    return np.memmap(path, dtype=np.uint8, mode="r")[:max_bytes]


def split(text: Text, val_fraction: float) -> tuple[Text, Text]:
    """The text's beginning to train on, its end to validate on."""
    boundary = round(len(text) * (1 - val_fraction))
    return text[:boundary], text[boundary:]


@dataclass(frozen=True)
class Batches:
    """Random rows of a text: this rank's part of each batch.

    Raises:
        SettingsError: the text is shorter than a row, or the ranks cannot share a batch evenly.
    """

    text: Text
    block_size: int
    """Tokens per row."""
    batch_size: int
    """Rows per step, over all ranks."""
    seed: int
    rank: int = 0
    world_size: int = 1

    def __post_init__(self) -> None:
        if len(self.text) <= self.block_size:
            raise SettingsError(
                f"a row needs block_size + 1 = {self.block_size + 1} bytes, this part of the text "
                f"has {len(self.text)}. Use a longer text, another data.val_fraction, or a model "
                "with a smaller block_size."
            )
        if self.batch_size % self.world_size:
            raise SettingsError(
                f"trainer.batch_size={self.batch_size} rows cannot be shared evenly by "
                f"{self.world_size} ranks: choose a multiple of {self.world_size}."
            )

    def __getitem__(self, step: int) -> tuple[Tensor, Tensor]:
        """Tokens and targets of a step, each (batch_size / world_size, block_size)."""
        rng = np.random.default_rng((self.seed, step))
        starts = rng.integers(len(self.text) - self.block_size, size=self.batch_size)
        rows = self.batch_size // self.world_size
        own = starts[self.rank * rows : (self.rank + 1) * rows]
        block = self.text[own[:, None] + np.arange(self.block_size + 1)]
        tokens = torch.from_numpy(block.astype(np.int64))
        return tokens[:, :-1], tokens[:, 1:]
