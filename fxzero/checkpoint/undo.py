"""What a run was before a checkpoint was loaded into it, should another rank not take its own.

    before    copies of this rank's parts, where the host has room for them
    restore   back into the tensors that are there now, below every hook, as those may have refused

A run that has not begun has nothing to lose: what it was made of is made again.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fxzero.checkpoint import by_name, large_pages
from fxzero.checkpoint.staging import local_part
from fxzero.checkpoint.state import TrainState

_MEMINFO = Path("/proc/meminfo")
_NAMES = ("params",)


class Before:
    """A model and its optimizer as they are now.

    Args:
        state: of which the parts are left alone.
        ranks_here: how many ranks share this host's memory at most.
    """

    def __init__(self, state: TrainState, ranks_here: int) -> None:
        self._state = state
        self._copies: dict[str, Tensor] | None = None
        parts = {name: local_part(tensor) for name, tensor in self._tensors().items()}
        num_bytes = sum(part.nbytes for part in parts.values())
        if 2 * num_bytes * ranks_here < _available_bytes():
            self._copies = {name: _copy_of(part) for name, part in parts.items()}
        self._extra = {
            name: copy.deepcopy(value)
            for name, value in by_name.model_state(state.model).items()
            if not isinstance(value, Tensor)
        }
        optimizer = state.optimizer
        self._groups: list[dict[str, Any]] = [
            {key: value for key, value in group.items() if key not in _NAMES}
            for group in (optimizer.param_groups if optimizer is not None else [])
        ]
        known: Mapping[Any, Any] = optimizer.state if optimizer is not None else {}
        self._values = {
            parameter: {k: v for k, v in own.items() if not isinstance(v, Tensor)}
            for parameter, own in known.items()
        }

    def restore(self) -> bool:
        """Let everything be as it was; false if there was no room to keep it."""
        if self._copies is None:
            return False
        optimizer = self._state.optimizer
        if optimizer is not None:
            for parameter in [p for p in optimizer.state if p not in self._values]:
                del optimizer.state[parameter]
            for parameter, values in self._values.items():
                optimizer.state[parameter].update(values)
            for group, before in zip(optimizer.param_groups, self._groups, strict=True):
                for key in [k for k in group if k not in before and k not in _NAMES]:
                    del group[key]
                group.update(before)
        for name, value in self._extra.items():
            self._state.model.get_submodule(name.rpartition(".")[0]).set_extra_state(value)
        with torch.no_grad():
            for name, tensor in self._tensors().items():
                if name in self._copies:
                    local_part(tensor).copy_(self._copies[name])
        return True

    def _tensors(self) -> dict[str, Tensor]:
        """The tensors of the model and of the optimizer, those that are there now."""
        model, optimizer = self._state.model, self._state.optimizer
        found = {f"model.{name}": value for name, value in by_name.model_state(model).items()}
        if optimizer is not None:
            for name, own in by_name.optimizer_state(model, optimizer)["state"].items():
                found.update({f"optimizer.{name}.{key}": value for key, value in own.items()})
        return {name: value for name, value in found.items() if isinstance(value, Tensor)}


def _copy_of(part: Tensor) -> Tensor:
    return large_pages.empty(part.shape, part.dtype).copy_(part.detach())


def _available_bytes() -> float:
    """What the host could still give away; without end where the system does not tell."""
    try:
        lines = _MEMINFO.read_text().splitlines()
    except OSError:
        return float("inf")
    found = [int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")]
    return found[0] * 1024 if found else float("inf")
