"""The streams of a GPU: one that computes, one for each lane of copies, and pinned memory.

Copies begin behind an event of compute, and compute waits for theirs: see
`fxzero.runtime.streams`. Memory that a copy fills or reads on the device is allocated on the stream
that computes, and held until that has waited for the copy, so that the caching allocator, which
hands it out again on that stream, need not be told of another one. What no wait may follow is
(`outlives`).
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from fxzero._compat import return_pinned_memory
from fxzero.graph.stamps import Lane
from fxzero.sharding import host

_PORTABLE = 1
"""cudaHostRegisterPortable: pinned for whichever thread's context."""


class CudaStreams:
    """Those of one GPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._of: dict[Lane, torch.cuda.Stream] = {}
        self._making = threading.Lock()

    def current(self) -> torch.cuda.Stream:
        """The stream on which the calling thread computes."""
        return torch.cuda.current_stream(self.device)

    def of(self, lane: Lane) -> torch.cuda.Stream:
        """A lane's own."""
        with self._making:
            if lane not in self._of:
                self._of[lane] = torch.cuda.Stream(self.device)
            return self._of[lane]

    def made(self) -> list[torch.cuda.Stream]:
        """Those of lanes, as far as there are any."""
        return list(self._of.values())

    def using(self, stream: torch.cuda.Stream | None) -> AbstractContextManager[Any]:
        """A context whose operators go to a stream; with None, to the host beside this GPU."""
        if stream is None:  # pinned memory is of the GPU that is the thread's own
            return torch.cuda.device(self.device)
        return torch.cuda.stream(stream)

    def record(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        """An event where a stream is now. Who waits for it sleeps: the cores have work to do."""
        event = torch.cuda.Event(blocking=True)
        stream.record_event(event)
        return event

    def outlives(self, tensor: Tensor, stream: torch.cuda.Stream) -> None:
        """Keep a tensor's memory for what a stream has been given, however soon it is let go of."""
        tensor.record_stream(stream)

    def pinned_like(self, tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
        """Memory of the host that the GPU reads and writes by itself. Torch hands out the same
        again and again, once the copies that use it are over."""
        return host.pinned_like(tensor, dtype)

    def return_pinned(self) -> None:
        """Give back what torch keeps of pinned memory for others to use."""
        return_pinned_memory()

    def pin(self, memory: Tensor) -> Callable[[], None]:
        """Let the GPU read and write some memory of the host by itself; return what ends that.

        Torch's own pinned memory comes in powers of two: of a large block up to half would be
        unused, and nobody else's.

        Raises:
            RuntimeError: the system gives no such memory.
        """
        if not memory.nbytes:
            return lambda: None
        with torch.cuda.device(self.device):
            register = torch.cuda.cudart().cudaHostRegister
            failed = int(register(memory.data_ptr(), memory.nbytes, _PORTABLE))
            if failed:
                # CUDA tells of it again at the next kernel: let that be this one.
                with contextlib.suppress(RuntimeError):
                    torch.zeros(1, device=self.device)
                raise RuntimeError(f"cudaHostRegister: CUDA error {failed}")
        return functools.partial(_unpin, memory.data_ptr())


def _unpin(address: int) -> None:
    torch.cuda.cudart().cudaHostUnregister(address)
