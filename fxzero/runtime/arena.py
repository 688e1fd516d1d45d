"""The host's memory for what does not stay on the device: one block, handed out by offset.

    homes      parameters and optimizer state: ``p``'s own tensor, ``optimizer.state[p]``'s own,
               whose memory is here; whoever reads, saves or loads them sees nothing of that
    staging    where gradients arrive

Where copies go to a GPU the block is pinned. A tensor that does not come home costs little: it is
the host's all the same, and its copies are slower, or, where the device is a CPU, not even that.
ZeRO-Offload's parameters are its masters: there is no second copy of them on the host, so that
whatever somebody writes to a parameter between two steps is what the next one begins with.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Mapping

import torch
from torch import Tensor
from torch.optim import Optimizer

from fxzero._compat import shares_memory
from fxzero.graph.lanes import aligned
from fxzero.runtime.pinned import block
from fxzero.sharding.host import HOST
from fxzero.transfer import Form

Home = tuple[str, str]
"""A parameter's key, and the name of one of its optimizer state's tensors; "" for itself."""


class HostArena:
    """The block of one optimizer's step.

    Args:
        homes: what lives in it.
        staging_bytes: what gradients need on their way.
        device: where they come from.

    Raises:
        HostMemoryError: a GPU has to reach it, and the system does not let it.
    """

    def __init__(
        self, homes: Mapping[Home, Form], staging_bytes: int, device: torch.device = HOST
    ) -> None:
        self.homes = dict(homes)
        self.device = device
        offsets, total = {}, 0
        for home, layout in self.homes.items():
            offsets[home] = total
            total += aligned(layout.num_bytes)
        self.num_bytes = total + staging_bytes
        """All of it."""
        what = "what the step holds on the host"
        self.memory = block(self, self.num_bytes, device, what, _HOLD_LESS)
        self.staging = self.memory[total:]
        buffer = memoryview(self.memory.numpy())  # type: ignore[arg-type]
        self._tensors = {}
        for home, layout in self.homes.items():
            begin = offsets[home]
            own = whole(buffer[begin : begin + layout.num_bytes])
            # Not a view: it would keep what it is a view of, which looks like another user.
            tensor = torch.empty(0, dtype=layout.dtype)
            self._tensors[home] = tensor.set_(own.untyped_storage(), 0, layout.shape, layout.stride)

    def fits(self, homes: Mapping[Home, Form], staging_bytes: int) -> bool:
        """Whether it has room for a graph."""
        known = all(self.homes.get(home) == layout for home, layout in homes.items())
        return known and self.staging.nbytes >= staging_bytes

    def leave(self) -> None:
        """Hold nothing for those who live here: another arena takes its place."""
        self._tensors.clear()

    def bring_home(self, home: Home, tensor: Tensor) -> bool:
        """Let a tensor's memory be here: somebody may have given it other memory since.

        Not where somebody else looks at the one memory or at the other: a backup that was taken by
        reference stays what it is, and what was an alias of a parameter goes on being one.

        Returns:
            Whether it is here now.
        """
        own = self._tensors[home]
        if tensor.data_ptr() == own.data_ptr() or not own.numel():
            return True
        if shares_memory(tensor) or shares_memory(own):
            return False
        own.copy_(tensor)
        tensor.data = own
        return True


_HOLD_LESS = (
    "hold less there: a smaller offload_states.share or offload_activations.share, or a "
    "host_budget, beyond which is the disk"
)


def whole(buffer: memoryview) -> Tensor:
    """Some bytes as a tensor that knows of no others: ``torch.save`` writes all that a tensor's
    storage has, and would write the arena for each of its tensors."""
    return (
        torch.frombuffer(buffer, dtype=torch.uint8)
        if len(buffer)
        else torch.empty(0, dtype=torch.uint8)
    )


_arenas: weakref.WeakKeyDictionary[Optimizer, HostArena] = weakref.WeakKeyDictionary()


def arena_of(optimizer: Optimizer) -> HostArena | None:
    """The arena of an optimizer's steps: one for all graphs, of whatever shapes of batches."""
    return _arenas.get(optimizer)


def let_go(optimizer: Optimizer, homes: Collection[Home]) -> None:
    """Let some of what lives in an optimizer's arena live elsewhere, once its memory has moved: the
    arena would be another one that looks at it. What stays moves too, with the next step."""
    arena = arena_of(optimizer)
    if arena is None or arena.homes.keys().isdisjoint(homes):
        return
    rest = {home: layout for home, layout in arena.homes.items() if home not in homes}
    del _arenas[optimizer]
    if rest:
        _arenas[optimizer] = HostArena(rest, arena.staging.nbytes, arena.device)
    arena.leave()


def arena_for(
    optimizer: Optimizer,
    homes: Mapping[Home, Form],
    staging_bytes: int,
    device: torch.device = HOST,
) -> HostArena:
    """An arena with room for what a graph wants, and for what other graphs wanted before.

    A new one takes the place of one that has no room: what lives there moves with the next step.

    Raises:
        HostMemoryError: a GPU has to reach it, and the system does not let it.
    """
    arena = arena_of(optimizer)
    if arena is not None and arena.fits(homes, staging_bytes):
        return arena
    known = {} if arena is None else arena.homes
    most = max(staging_bytes, 0 if arena is None else arena.staging.nbytes)
    made = _arenas[optimizer] = HostArena({**known, **homes}, most, device)
    if arena is not None:
        arena.leave()
    return made
