"""Ranks that die at any moment, in saving too: the run ends with the losses of one that was never
disturbed, bit by bit, and what was published is whole.

    torchrun --max-restarts    kill -9 of a rank, again and again    losses.0, losses.1
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from fxzero.checkpoint.folder import published
from fxzero.checkpoint.listing import list_checkpoints
from tests.tiers import exhaustive

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = Path(__file__).with_name("run_under_torchrun.py")
RANKS = 2
TIMEOUT_S = 1200


def start(folder: Path, num_steps: int, restarts: int) -> subprocess.Popen[str]:
    """Train under torchrun."""
    folder.mkdir()
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *("--nproc-per-node", str(RANKS), "--max-restarts", str(restarts)),
        *("--monitor-interval", "0.1"),
        *(str(SCRIPT), str(folder), str(num_steps)),
    ]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "FXZERO_WARN_S": "10"}
    with open(folder / "log", "w") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, env=env, text=True)


def losses_of(folder: Path, rank: int) -> dict[int, set[str]]:
    """What each step's loss was, every time that it was trained."""
    found: dict[int, set[str]] = {}
    for line in (folder / f"losses.{rank}").read_text().splitlines():
        number, _, loss = line.partition(" ")
        if loss and number.isdigit():
            found.setdefault(int(number), set()).add(loss)
    return found


def kill_some(folder: Path, job: subprocess.Popen[str], num_kills: int, draw: random.Random) -> int:
    """Kill a rank, again and again, each time some moment after training has begun."""
    killed = 0
    seen: set[str] = set()
    while killed < num_kills and job.poll() is None:
        new = {path.name for path in folder.glob("trains.*")} - seen
        if not new:
            time.sleep(0.02)
            continue
        seen |= new
        time.sleep(draw.uniform(0.0, 0.6))
        victim = draw.randrange(RANKS)
        with suppress(ProcessLookupError):
            os.kill(int((folder / f"pid.{victim}").read_text()), signal.SIGKILL)
            killed += 1
        time.sleep(0.3)  # until torchrun has seen it
        seen |= {path.name for path in folder.glob("trains.*")}
    return killed


@pytest.mark.parametrize(("num_kills", "num_steps"), exhaustive((2, 200), (40, 2500)))
def test_a_run_whose_ranks_are_killed(tmp_path: Path, num_kills: int, num_steps: int) -> None:
    """It ends where it would have ended, with nothing lost that was published."""
    quiet, killed = tmp_path / "quiet", tmp_path / "killed"
    job = start(quiet, num_steps, 0)
    assert job.wait(TIMEOUT_S) == 0, (quiet / "log").read_text()[-2000:]

    job = start(killed, num_steps, num_kills + 5)
    count = kill_some(killed, job, num_kills, random.Random(num_kills))
    assert job.wait(TIMEOUT_S) == 0, (killed / "log").read_text()[-4000:]
    assert count == num_kills

    for rank in range(RANKS):
        expected, found = losses_of(quiet, rank), losses_of(killed, rank)
        assert found.keys() == expected.keys() == set(range(1, num_steps + 1))
        assert found == expected
    rows = list_checkpoints(killed / "checkpoints").rows
    assert [row.fault for row in rows] == [""] * len(rows)
    assert [item.step for item in published(killed / "checkpoints")][-1] == num_steps
