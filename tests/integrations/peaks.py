"""What a script of torchrun says that its ranks have held."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
ALIKE = {
    "OMP_NUM_THREADS": "1",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
    # glibc gives large blocks back at once; by its moving limit what is free stays with the
    # process, by luck up to as much as is in use.
    "MALLOC_MMAP_THRESHOLD_": "1048576",
}


def held_bytes(module: str, name: str) -> int:
    """The largest of the peaks of two ranks, which print ``peak BYTES``."""
    command = f"{sys.executable} -m torch.distributed.run --standalone --nproc-per-node 2 -m"
    run = subprocess.run(
        [*command.split(), module, name],
        cwd=ROOT,
        env={**os.environ, **ALIKE},
        capture_output=True,
        text=True,
        check=True,
    )
    return max(int(line.split()[1]) for line in run.stdout.splitlines() if "peak" in line)
