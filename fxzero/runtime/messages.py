"""Messages between two stages of a pipeline: what one computes, the other receives.

    flight = send([y], [(4, 512)], "7", 1, tag); …; sent(flight)
    flight = receive([Form((8, 4, 512), (2048, 512, 1), float32)], device, "7", 0, tag); …
    y, = received(flight)

Over the process group of the two. Both sides launch the messages of a link in one order. A tensor
travels as it lies in memory, in the strides that both sides were compiled for; whoever sends one
that an operator has laid out otherwise sends a copy of it.
"""

from __future__ import annotations

import torch
from torch import Tensor, fx

from fxzero._compat import is_fake, resolve_process_group
from fxzero.graph.messages import KIND
from fxzero.ranks.agree import now, settle
from fxzero.runtime.collectives import InFlight
from fxzero.transfer import Form, TransferKind


def send(tensors: list[Tensor], forms: list[Form], group: str, peer: int, tag: int) -> InFlight:
    """Start sending tensors to the other rank of a group."""
    process_group = resolve_process_group(group)
    flat = [_flat(_laid_out(tensor, form)) for tensor, form in zip(tensors, forms, strict=True)]
    if any(map(is_fake, tensors)):
        return InFlight([], [])
    handles = [process_group.send([part], peer, tag) for part in flat if part.numel()]
    return InFlight([], handles, sources=list(flat))


def receive(forms: list[Form], device: torch.device, group: str, peer: int, tag: int) -> InFlight:
    """Start receiving tensors from the other rank of a group."""
    process_group = resolve_process_group(group)
    made = [torch.empty_strided(f.shape, f.stride, dtype=f.dtype, device=device) for f in forms]
    if any(map(is_fake, made)):
        return InFlight(made, [])
    handles = [process_group.recv([_flat(part)], peer, tag) for part in made if part.numel()]
    return InFlight(made, handles)


def sent(flight: InFlight) -> list[Tensor]:
    """Wait until what was sent may be overwritten."""
    _wait(flight)
    return []


def received(flight: InFlight) -> list[Tensor]:
    """Wait for what was sent to this rank."""
    _wait(flight)
    return flight.tensors


def _wait(flight: InFlight) -> None:
    if now.announcement is not None:
        settle()
    now.num_waits += 1
    for handle in flight.handles:
        handle.wait()
    flight.sources = None


def _laid_out(tensor: Tensor, form: Form) -> Tensor:
    if tuple(tensor.stride()) == form.stride:
        return tensor
    copy = torch.empty_strided(form.shape, form.stride, dtype=form.dtype, device=tensor.device)
    return copy.copy_(tensor)


def _flat(tensor: Tensor) -> Tensor:
    """A tensor in one piece, as its memory lies."""
    return tensor.as_strided((tensor.numel(),), (1,))


setattr(send, KIND, TransferKind.SEND)  # what `verify` knows them by
setattr(receive, KIND, TransferKind.RECEIVE)
for _function in (send, receive, sent, received):
    fx.node.has_side_effect(_function)
