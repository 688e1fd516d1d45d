"""Generating with a sharded model: as many forwards on every rank, operator by operator.

    model.generate(…)     on all ranks, by whoever: `predict_with_generate`, a callback, a script

A rank whose rows have ended goes on until all have: each holds what others need. Each new token has
a shape of its own, for which nothing is compiled.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch


def generate_together(
    model: Any, context: Callable[[], AbstractContextManager[Any]], *, synced: bool
) -> None:
    """Change a model's ``generate`` so.

    Args:
        context: what its forwards run in: autocast, where training does.
        synced: whether ranks need each other.
    """
    if not hasattr(model, "generate"):
        return
    plain = model.generate

    @functools.wraps(plain)
    def generate(*args: Any, **kwargs: Any) -> Any:
        if synced and kwargs.get("synced_gpus") is None:
            kwargs["synced_gpus"] = True
        with torch.compiler.set_stance("force_eager"), context():
            return plain(*args, **kwargs)

    model.generate = generate
