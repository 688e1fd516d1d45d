"""A model's inputs, whoever made them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fxzero._compat import pytree
from fxzero.errors import ConfigError

_INTEGERS = (torch.int64, torch.int32)


@dataclass(frozen=True)
class Batch:
    """What a model is called with."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    @staticmethod
    def of(inputs: Any, where: str) -> Batch:
        """Read a tensor, a tuple or list, or a dict of keyword arguments.

        Raises:
            ConfigError: it is none of them.
        """
        if isinstance(inputs, Tensor):
            return Batch((inputs,))
        if isinstance(inputs, Mapping):
            strange = [key for key in inputs if not isinstance(key, str)]
            if strange:
                raise ConfigError(f"{where}: a dict of inputs has names, not {strange[0]!r}")
            return Batch((), dict(inputs))
        if isinstance(inputs, (tuple, list)):
            return Batch(tuple(inputs))
        raise ConfigError(
            f"{where}: found {type(inputs).__name__} for the model's inputs; give a tensor, a "
            "tuple of arguments, or a dict of keyword arguments"
        )

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors in it."""
        leaves = pytree.tree_leaves((self.args, dict(self.kwargs)))
        return [leaf for leaf in leaves if isinstance(leaf, Tensor)]

    @property
    def num_rows(self) -> int | None:
        """Rows of its first tensor that has some."""
        return next((t.shape[0] for t in self.tensors if t.dim()), None)

    @property
    def num_tokens(self) -> int | None:
        """Elements of the first tensor of whole numbers with a row of them for each sample; None
        of models that read something else."""
        integers = [t for t in self.tensors if t.dim() == 2 and t.dtype in _INTEGERS]
        return integers[0].numel() if integers else None

    def text(self) -> str:
        """``input_ids=int64[2,1024], labels=int64[2,1024]``: shapes and dtypes of its tensors."""
        paths = pytree.tree_leaves_with_path((list(self.args), dict(self.kwargs)))
        found = []
        for path, leaf in paths:
            name = getattr(path[1], "key", None) if len(path) > 1 else None
            prefix = f"{name}=" if name is not None else ""
            if isinstance(leaf, Tensor):
                shape = ",".join(map(str, leaf.shape))
                found.append(f"{prefix}{str(leaf.dtype).removeprefix('torch.')}[{shape}]")
            else:
                found.append(f"{prefix}{leaf!r}")
        return ", ".join(found)
