"""Memory in large pages: a tensor like every other."""

from __future__ import annotations

import copy
import io
import mmap
import re
import threading
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fxzero.checkpoint import large_pages

LARGE = (3, 1 << 20)


def empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """One tensor."""
    return large_pages.empty({"it": (torch.Size(shape), dtype)})["it"]


def test_small_ones_share_large_pages() -> None:
    """Each begins where torch's would, and is written by itself; they live without each other."""
    forms = {
        str(i): (torch.Size((i, 999)), (torch.float32, torch.bool, torch.bfloat16)[i % 3])
        for i in range(200)
    }
    found = large_pages.empty(forms)
    for i, tensor in enumerate(found.values()):
        assert tensor.data_ptr() % 64 == 0
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
        tensor.fill_(i % 2)
    for i, name in enumerate(forms):
        assert (found[name].shape, found[name].dtype) == forms[name]
        assert bool((found.pop(name) == i % 2).all())


def test_what_is_small_keeps_nothing_else() -> None:
    """A count of steps that stays, where all beside it is moved elsewhere."""
    found = large_pages.empty(
        {"step": (torch.Size(()), torch.float32), "moment": (torch.Size(LARGE), torch.float32)}
    )
    begin, end = found["moment"].data_ptr(), found["moment"].data_ptr() + found["moment"].nbytes
    assert not begin - 4096 <= found["step"].data_ptr() < end + 4096


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
@pytest.mark.parametrize("shape", [LARGE, (2, 3), (), (0, 4)])
def test_it_is_what_torch_makes(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """It holds what is written, is contiguous, and lives as long as somebody has it."""
    tensor = empty(shape, dtype)
    assert (tensor.shape, tensor.dtype, tensor.is_contiguous()) == (torch.Size(shape), dtype, True)
    wanted = torch.randint(0, 2, shape).to(dtype)
    tensor.copy_(wanted)
    row = tensor[-1:] if shape else tensor
    del tensor
    assert torch.equal(row, wanted[-1:] if shape else wanted)


def test_each_has_a_storage_of_its_own() -> None:
    """So that one of them that is saved, or copied, is saved alone."""
    found = large_pages.empty({name: (torch.Size(LARGE), torch.float32) for name in "ab"})
    first, second = (found[name].fill_(i) for i, name in enumerate("ab"))
    assert first.untyped_storage().nbytes() == first.nbytes
    assert first.untyped_storage().data_ptr() != second.untyped_storage().data_ptr()
    file = io.BytesIO()
    torch.save(first, file)
    assert file.tell() < 1.01 * first.nbytes
    assert torch.equal(copy.deepcopy(second), second)


def test_a_system_without_them_gives_the_usual_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel refuses, or Python does not know of them."""
    asked = []

    class Refuses(mmap.mmap):
        def madvise(self, *_: int) -> None:
            asked.append(True)
            raise OSError(22, "Invalid argument")

    monkeypatch.setattr(mmap, "mmap", Refuses)
    assert empty(LARGE, torch.float32).fill_(1).sum() == 3 << 20
    assert asked == [True]
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE")
    assert empty(LARGE, torch.float32).fill_(1).sum() == 3 << 20
    assert asked == [True]


@pytest.mark.skipif(
    "[never]" in Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
    if Path("/sys/kernel/mm/transparent_hugepage/enabled").exists()
    else True,
    reason="this system gives no large pages",
)
def test_the_system_gives_large_pages() -> None:
    """As it says of this process's memory."""

    def large_kib() -> int:
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
        (line,) = (line for line in lines if line.startswith("AnonHugePages:"))
        return int(line.split()[1])

    before = large_kib()
    tensor = empty((16 << 20,), torch.float32).fill_(1)
    assert large_kib() - before >= 60 << 10, tensor.shape


AHEAD = (17, 1 << 20)


def touched(shape: tuple[int, ...]) -> Tensor:
    """A tensor whose memory a thread has touched, all that it would."""
    tensor = empty(shape, torch.float32)
    for thread in threading.enumerate():
        if thread.name == "fxzero-touch":
            thread.join()
    return tensor


def resident_bytes(tensor: Tensor) -> int:
    """What of a tensor's memory the system has given."""
    begin, found = tensor.data_ptr(), 0
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        span = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if span is not None:
            inside = int(span[1], 16) <= begin < int(span[2], 16)
        elif inside and line.startswith("Rss:"):
            found = int(line.split()[1]) << 10
    return found


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="Linux alone has large pages")
def test_what_is_large_is_touched_ahead_and_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it, unless the system cannot, or there are no threads: then it comes by itself."""
    assert resident_bytes(touched(AHEAD)) >= 68 << 20
    monkeypatch.setattr(large_pages, "_MADV_POPULATE_WRITE", 12345)
    assert resident_bytes(touched(AHEAD)) < 1 << 20

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.undo()
    monkeypatch.setattr(threading.Thread, "start", refuse)
    tensor = touched(AHEAD).fill_(3)
    assert bool((tensor == 3).all())


def test_who_fills_and_who_touches_do_not_meet() -> None:
    """What was written before it is touched stays."""
    for value in range(10):
        tensor = empty(AHEAD, torch.float32).fill_(value)
        touched((1, 1))  # waits for the thread
        assert bool((tensor == value).all())


def test_nobody_touches_what_nobody_has() -> None:
    """The thread keeps it for one call at most."""
    for _ in range(20):
        empty((256, 1 << 20), torch.float32)
    begin = time.monotonic()
    while any(thread.name == "fxzero-touch" for thread in threading.enumerate()):
        assert time.monotonic() < begin + 30
        time.sleep(0.001)
