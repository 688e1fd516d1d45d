"""Memory of the host that a device reads and writes by itself: blocks that are there once."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from fxzero.disk.scratch import pages
from fxzero.errors import HostMemoryError
from fxzero.runtime.streams import streams_of


def pin(owner: object, memory: Tensor, device: torch.device, what: str, advice: str) -> None:
    """Pin a block for as long as its owner lives, where copies go to a device with streams.

    Args:
        what: is held there, for people.
        advice: how to hold less.

    Raises:
        HostMemoryError: the system does not let it be pinned.
    """
    streams = streams_of(device)
    if streams is None:
        return
    try:
        end = streams.pin(memory)
    except RuntimeError as error:
        raise HostMemoryError(
            f"{what} takes {memory.nbytes} bytes of pool host, which {device} has to read and "
            f"write by itself, and the system does not let them be pinned ({error}). Nothing was "
            f"moved there. Raise the limit of locked memory (ulimit -l), or {advice}."
        ) from error
    # Before the memory is: whoever still looks at it has ordinary memory then. The end of the
    # process ends all of it.
    weakref.finalize(owner, end).atexit = False


def block(owner: object, num_bytes: int, device: torch.device, what: str, advice: str) -> Tensor:
    """So many bytes of the host, pinned where `pin` pins: (bytes,). Then they are pages of their
    own, as only whole pages are pinned, and each by one owner."""
    if streams_of(device) is None:
        return torch.empty(num_bytes, dtype=torch.uint8)
    memory = torch.frombuffer(pages(max(num_bytes, 1)), dtype=torch.uint8)[:num_bytes]
    pin(owner, memory, device, what, advice)
    return memory
