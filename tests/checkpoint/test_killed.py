"""A job that is killed while it saves: what was published is whole, and nothing else is taken."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fxzero
from tests.checkpoint.runs import hidden, visible

# One process imports, and forks a job for each kill. A job trains, saves, and says what it has
# saved; the next one goes on from that.
JOBS = """
import json, os, random, signal, sys, time
import torch
from torch import nn
import fxzero

def job(folder, pipe, asynchronous):
    model = nn.Linear(64, 64)
    state = fxzero.TrainState(model)
    loaded = fxzero.checkpoint.load(state, folder)
    step = 0 if loaded is None else loaded.step
    assert loaded is None or loaded.skipped == (), loaded
    assert loaded is None or bool((model.weight == step).all()), (step, model.weight[0, 0])
    os.write(pipe, f"l{step}\\n".encode())
    while True:
        step += 1
        with torch.no_grad():
            model.weight.fill_(step)
        saving = fxzero.checkpoint.save(state, folder, step=step, keep=2, asynchronous=asynchronous)
        saving.wait()
        os.write(pipe, f"s{step}\\n".encode())

folder, kills, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
draw = random.Random(seed)
said = []
for kill in range(kills):
    ours, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            job(folder, theirs, kill % 2 == 0)
        except BaseException as error:
            os.write(theirs, f"e{error!r}\\n".encode())
        os._exit(1)
    os.close(theirs)
    text = b""
    while b"l" not in text and b"e" not in text:
        text += os.read(ours, 1000)
    time.sleep(draw.uniform(0.0, 0.12))
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    while part := os.read(ours, 1000):
        text += part
    os.close(ours)
    said.append(text.decode().split())
print(json.dumps(said))
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize(("kills", "seed"), [(20, 0), (200, 1)])
def test_a_job_is_killed_at_random_moments(tmp_path: Path, kills: int, seed: int) -> None:
    """Each next job goes on from what the last one has said it saved, or from one more."""
    folder = tmp_path / "checkpoints"
    done = subprocess.run(
        [sys.executable, "-c", JOBS, str(folder), str(kills), str(seed)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    jobs: list[list[str]] = json.loads(done.stdout)
    last = 0
    for said in jobs:
        assert not any(line.startswith("e") for line in said), said
        loaded = int(said[0][1:])
        assert loaded in (last, last + 1), (last, said)
        last = max([loaded, *(int(line[1:]) for line in said if line[0] == "s")])
    assert last > kills // 4, "the premise: they save"  # a busy machine may kill most before

    model = nn.Linear(64, 64)
    state = fxzero.TrainState(model)
    found: Any = fxzero.checkpoint.load(state, folder)
    assert found.step in (last, last + 1)
    assert torch.equal(model.weight, torch.full_like(model.weight, found.step))
    fxzero.checkpoint.save(state, folder, step=found.step + 1, keep=2).wait()
    assert len(visible(folder)) == 2
    assert hidden(folder) == []
