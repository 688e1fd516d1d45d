"""Collections that do not walk through what outlives a test."""

from __future__ import annotations

import gc


def freeze() -> None:
    """Take what is alive now out of every later collection.

    `fxzero.shard` and every compilation ask for collections, which would walk through all of torch.
    They also ask whether anything is frozen, and Python counts hundreds of thousands of objects
    to answer: from here on the answer is that something is.
    """
    gc.collect()
    gc.freeze()
    gc.get_freeze_count = _something  # type: ignore[assignment]


def _something() -> int:
    return 1
