"""Memory: what tensors lie in, what Python's collector walks through, what the system gets back."""

from __future__ import annotations

import contextlib
import ctypes
import gc
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor


def storage_identity(value: torch.Tensor) -> int:
    """A number of a tensor's storage; a DTensor's is that of its local tensor."""
    local = value._local_tensor if isinstance(value, DTensor) else value
    return int(local.untyped_storage()._cdata)


def shares_memory(tensor: torch.Tensor) -> bool:
    """Whether a tensor's storage has other users: views, arrays, tensors that were detached.

    Each tensor counts one, and so does the storage's own Python object, which this makes.
    """
    storage = tensor.untyped_storage()
    return int(torch._C._storage_Use_Count(storage._cdata)) > 2


def free_storage(tensor: torch.Tensor) -> None:
    """Free a tensor's memory, whoever else still refers to it.

    Not by ``untyped_storage().resize_(0)``: that makes a Python object for the storage,
    whose end races with gloo's worker thread dropping its own reference to the storage,
    and corrupts the heap (seen after some tens of steps of small gathers).
    """
    torch.ops.inductor.resize_storage_bytes_(tensor, 0)


def allocations_on(device: str, call: Callable[[], Any]) -> tuple[Any, list[int]]:
    """What a call returns, and by how many bytes each of its allocations on a kind of device
    changed what is held there, in order: those of this thread and of what it calls.

    By torch's older profiler, whose records are in order of the calls, and which starts at once.

    Raises:
        RuntimeError: somebody is profiling already.
    """
    profiler: Any = torch.autograd
    experimental = torch._C._profiler._ExperimentalConfig()
    with_memory = False, True, False, False, False
    config = profiler.ProfilerConfig(profiler.ProfilerState.CPU, *with_memory, experimental)
    profiler._enable_profiler_legacy(config)
    try:
        result = call()
    finally:
        threads = profiler._disable_profiler_legacy()
    records = [record for thread in threads for record in thread]
    records = [record for record in records if record.kind() == "memory_alloc"]
    if device == "cpu":
        return result, [record.cpu_memory_usage() for record in records]
    return result, [record.cuda_memory_usage() for record in records]


_NEW_OBJECTS = 10_000
"""How many objects to make before the collector looks at them; Python's own number is 700."""
_collects_only_new = False


@contextlib.contextmanager
def collecting_only_new_objects() -> Iterator[None]:
    """Trace without the collector walking the some 400,000 objects that imports left.

    It also comes less often: of 96 layers it walked through what a compilation makes, and keeps,
    eleven times, for 1.8 s. Pausing it is faster still, but what it then leaves to the end
    fragments Python's memory for good: measured 16 MB of a six-layer GPT's resident size.
    """
    global _collects_only_new
    # To count what is frozen takes 0.1 s where much is: nested uses know without.
    if _collects_only_new or gc.get_freeze_count():  # the caller's own
        yield
        return
    youngest, *older = gc.get_threshold()
    gc.freeze()
    _collects_only_new = True
    if 0 < youngest < _NEW_OBJECTS:
        gc.set_threshold(_NEW_OBJECTS, *older)
    try:
        yield
    finally:
        _collects_only_new = False
        gc.set_threshold(youngest, *older)
        gc.unfreeze()


def collect_only_new_objects_in_dynamo() -> None:
    """Let it be so from the beginning of Dynamo's tracing on, before it calls a backend.

    Asked for again and again: ``torch._dynamo.reset()`` forgets it.
    """
    from torch._dynamo.callback import callback_handler as handler

    if _begin_tracing not in handler.start_callbacks:
        handler.register_start_callback(_begin_tracing)
        handler.register_end_callback(_end_tracing)


_tracing = contextlib.ExitStack()


def _begin_tracing(_: Any) -> None:
    _tracing.enter_context(collecting_only_new_objects())


def _end_tracing(_: Any) -> None:
    _tracing.close()


def return_free_memory() -> None:
    """Give what a compilation, or a full model, left behind back to the system.

    glibc keeps freed memory in its heap; after a compilation that is some hundred MiB.
    """
    gc.collect()
    trim_heap()
    keep_freed_memory()


def keep_freed_memory() -> None:
    """Let glibc keep what a step frees for what it allocates next.

    Its heap gives back what is free at its end beyond twice the largest block that was ever freed
    and had been mapped by itself, up to 32 MiB: a step of small tensors gives memory back and has
    it again, page by page, many times over. To free one large block is what raises that, and has
    blocks up to its size come from the heap, in the whole process. Who has set
    MALLOC_TRIM_THRESHOLD_ or another of its variables has what they say.
    """
    torch.empty(_LARGEST_MAPPED_BYTES, dtype=torch.uint8)


_LARGEST_MAPPED_BYTES = 31 << 20
"""Less than glibc's 32 MiB, a header and a page included; nothing of it is touched."""


def return_pinned_memory() -> None:
    """Give back the pinned memory that torch keeps for others to use, once nobody does (torch 2.6
    to 2.13)."""
    torch._C._host_emptyCache()


def trim_heap() -> None:
    """Give free memory back to the system, also what lies between memory that is used."""
    with contextlib.suppress(AttributeError, OSError):  # other libraries have no malloc_trim
        ctypes.CDLL(None).malloc_trim(0)
