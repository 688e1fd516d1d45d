"""The examples as a person runs them: under torchrun, from a folder of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
EAGER = ("--options", json.dumps({"lower_regions": {"backend": "eager"}}))
"""Nothing of Inductor, where it is not what is tested."""
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def run(*words: str | Path, folder: Path, **more: str) -> str:
    """What `python words…` prints; it must end well.

    Args:
        more: of the environment.
    """
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "200",
    } | more
    done = subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def on_two_ranks(script: str, *words: str | Path, folder: Path, **more: str) -> str:
    """The same under torchrun."""
    return run(*TORCHRUN, ROOT / "examples" / script, *words, folder=folder, **more)


def metrics(folder: Path) -> list[dict[str, Any]]:
    """What a run logged."""
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def losses(folder: Path) -> list[float]:
    """Of the steps that it logged."""
    return [record["loss"] for record in metrics(folder) if "loss" in record]
