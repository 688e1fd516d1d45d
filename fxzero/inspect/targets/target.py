"""A model by what somebody calls it on a command line."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from fxzero.errors import ConfigError, nearest
from fxzero.inspect.targets import transformers_models
from fxzero.inspect.targets.factory import factory_of
from fxzero.inspect.targets.presets import PRESETS
from fxzero.inspect.targets.transformers_models import PREFIX


@dataclass(frozen=True)
class Target:
    """How a model is made, and what is usual for it."""

    name: str
    build: Callable[[], Any]
    """Returns a model, or ``(model, inputs)``. It is called where tensors have no memory."""
    param_dtype: torch.dtype | None = None
    """What it is usually computed in; None is the dtype of its parameters."""
    seq_len: int | None = None
    """Tokens of a row that it is usually trained on; None leaves that to its batch."""

    def usual(
        self, param_dtype: torch.dtype | None, seq_len: int | None, inputs: str | None
    ) -> dict[str, Any]:
        """Settings of a capture: what was asked for, and what is usual where nothing was."""
        asked_by_hand = seq_len is not None or inputs is not None
        return {
            "param_dtype": self.param_dtype if param_dtype is None else param_dtype,
            "seq_len": seq_len if asked_by_hand else self.seq_len,
            "inputs": inputs,
        }


def load(name: str) -> Target:
    """Find a factory, a preset or a configuration of transformers.

    Raises:
        ConfigError: there is none of that name.
    """
    if name.startswith(PREFIX):
        config = transformers_models.config_of(name.removeprefix(PREFIX))
        build = functools.partial(transformers_models.model_of, config)
        return Target(name, build, transformers_models.compute_dtype(config))
    if name in PRESETS:
        preset = PRESETS[name]
        transformers_models.imported()
        build = functools.partial(transformers_models.of_preset, preset)
        return Target(name, build, torch.bfloat16, preset.seq_len)
    if ":" not in name:
        raise ConfigError(
            f"{name!r} names no factory. Write package.module:factory, or file.py:factory; or "
            "hf:org/name, a configuration of transformers. And it is no preset: "
            f"{nearest(name, PRESETS)}"
        )
    return Target(name, factory_of(name))
