"""A copy of the state in the host's memory, which is written while training goes on.

    parameters, states ──copy──► host memory, kept from save to save ──thread──► files
    └ the step waits for this ┘

Only this rank's parts are copied. On CUDA the memory is pinned, and all copies are under way at
once; without a GPU they are copies within the host's memory.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fxzero._compat import local_tensor
from fxzero.errors import HostMemoryError

_Form = tuple[torch.Size, torch.dtype, bool]


def local_part(tensor: Tensor) -> Tensor:
    """What this rank has of a tensor, outside of autograd."""
    return local_tensor(tensor) if isinstance(tensor, DTensor) else tensor.detach()


class Staging:
    """Memory of the host for tensors by name: as much as was ever copied at once."""

    def __init__(self) -> None:
        self._copies: dict[str, Tensor] = {}
        self._forms: dict[str, _Form] = {}

    def copy(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copy this rank's parts of some tensors, dense and in the order of their dims.

        Returns:
            Copies by name, until the next call.

        Raises:
            HostMemoryError: the host has no memory for them.
        """
        parts = {name: local_part(tensor) for name, tensor in tensors.items()}
        for name in [name for name in self._copies if name not in parts]:
            del self._copies[name], self._forms[name]
        for name, part in parts.items():
            form = part.shape, part.dtype, part.is_cuda
            if self._forms.get(name) != form:
                self._copies[name], self._forms[name] = _empty(name, part), form
        with torch.no_grad():
            for name, part in parts.items():
                self._copies[name].copy_(part, non_blocking=True)
        if any(part.is_cuda for part in parts.values()):
            torch.cuda.synchronize()
        return self._copies


def _empty(name: str, like: Tensor) -> Tensor:
    try:
        return torch.empty(like.shape, dtype=like.dtype, device="cpu", pin_memory=like.is_cuda)
    except RuntimeError as error:
        raise HostMemoryError(
            f"a checkpoint is copied to the host's memory before it is written, and there are no "
            f"{like.nbytes} bytes for {name} ({error}). Save with asynchronous=False, which needs "
            "no copy."
        ) from error
