"""What glibc's heap does with memory that a step frees."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

SCRIPT = """
import ctypes
import torch
from fxzero._compat import return_free_memory

class Figures(ctypes.Structure):
    _fields_ = [(f"f{{i}}", ctypes.c_size_t) for i in range(10)]

mallinfo = ctypes.CDLL(None).mallinfo2
mallinfo.restype = Figures

def mapped():
    before = mallinfo().f4  # bytes that are mapped by themselves, and given back when freed
    block = torch.empty(30 << 20, dtype=torch.uint8)
    return mallinfo().f4 - before >= block.nbytes

if not {before}:
    return_free_memory()
print(mapped())
"""


def is_mapped(*, before: bool, **environment: str) -> bool:
    """Whether a block of 30 MiB is given back when it is freed, before a compilation or behind."""
    ran = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(before=before)],
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return ran.stdout.strip() == "True"


@pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="the C library is not glibc 2.33 or later"
)
def test_the_heap_keeps_what_a_step_frees() -> None:
    """Behind a compilation; and whoever has said otherwise is obeyed."""
    assert is_mapped(before=True)
    assert not is_mapped(before=False)
    assert is_mapped(before=False, MALLOC_MMAP_THRESHOLD_="131072")
