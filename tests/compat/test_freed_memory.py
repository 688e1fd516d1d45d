"""What glibc's heap does with memory that a step frees."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

ROUNDS = """
import resource
import torch
from fxzero._compat import return_free_memory

{before}
def touched():
    tensors = [torch.ones(1 << 20) for _ in range(12)]  # 48 MiB
    return len(tensors)

for _ in range(3):
    touched()
begin = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    touched()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - begin)
"""


def pages_touched_anew(before: str, **environment: str) -> int:
    """In ten rounds that allocate 48 MiB and free them."""
    ran = subprocess.run(
        [sys.executable, "-c", ROUNDS.format(before=before)],
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": ":".join(sys.path), **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return int(ran.stdout)


@pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="the C library is not glibc"
)
def test_a_step_does_not_touch_its_memory_anew() -> None:
    """Behind a compilation; before it glibc gives most of a step's memory back, and whoever says
    otherwise is obeyed."""
    assert pages_touched_anew("return_free_memory()") < 1000
    assert pages_touched_anew("") > 10 * 4000
    said = {"MALLOC_TRIM_THRESHOLD_": "131072", "MALLOC_MMAP_THRESHOLD_": "131072"}
    assert pages_touched_anew("return_free_memory()", **said) > 10 * 4000
