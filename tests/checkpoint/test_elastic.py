"""Agents that die and come back: training goes on with fewer ranks, then with more, and has the
losses of one process that was never disturbed.

    agent A  ├── 2 ranks ──┤├── 1 rank ──┤├── 2 ranks ──►
    agent B  ├──── kill -9            start ├───────────►
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from fxzero.checkpoint.folder import published
from fxzero.checkpoint.listing import list_checkpoints

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = Path(__file__).with_name("run_elastic.py")
TIMEOUT_S = 900
ENV = {
    **os.environ,
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(ROOT),
    "FXZERO_WARN_S": "10",
    # torch 2.13's first agent publishes its address in its first round alone: one that joins later
    # waits for it until it gives up.
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
}


def agent(folder: Path, name: str, port: int, num_steps: int, zero: int) -> subprocess.Popen[str]:
    """One of the hosts of a job of one or two."""
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "1:2"),
        *("--nproc-per-node", "1", "--max-restarts", "20", "--monitor-interval", "0.2"),
        *("--rdzv-backend", "c10d", "--rdzv-id", "job", "--local-addr", "127.0.0.1"),
        *("--rdzv-endpoint", f"127.0.0.1:{port}"),
        "--rdzv-conf",
        f"is_host={int(name == 'a')},last_call_timeout=4,keep_alive_interval=1,read_timeout=20",
        *(str(SCRIPT), str(folder), str(num_steps), str(zero)),
    ]
    with open(folder / f"log.{name}", "a") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, env=ENV, text=True)


def kill(job: subprocess.Popen[str]) -> None:
    """As a host that is switched off: its agent and its rank."""
    for process in [*psutil.Process(job.pid).children(recursive=True), psutil.Process(job.pid)]:
        try:
            process.send_signal(signal.SIGKILL)
        except psutil.NoSuchProcess:
            continue
    job.wait()


def wait_until_it_trains(
    folder: Path, size: int, seen: set[str], *jobs: subprocess.Popen[str]
) -> None:
    """On as many ranks, in processes that are new."""
    deadline = time.monotonic() + TIMEOUT_S / 3
    while time.monotonic() < deadline:
        new = {path.name for path in folder.glob(f"trains.{size}.0.*")} - seen
        if new:
            seen |= new
            return
        assert all(job.poll() is None for job in jobs), "a job has ended early"
        time.sleep(0.1)
    pytest.fail(f"it never trained on {size} ranks: {(folder / 'log.a').read_text()[-3000:]}")


def undisturbed(folder: Path, num_steps: int, zero: int) -> dict[int, float]:
    """What the losses of one process are."""
    folder.mkdir()
    command = [sys.executable, str(SCRIPT), str(folder), str(num_steps), str(zero)]
    subprocess.run(command, env=ENV, check=True, timeout=TIMEOUT_S, capture_output=True)
    lines = [line.split() for line in (folder / "losses").read_text().splitlines()]
    return {int(number): float(loss) for number, _, loss in lines}


@pytest.mark.exhaustive
@pytest.mark.parametrize(("num_changes", "num_steps", "zero"), [(2, 600, 3), (7, 3000, 2)])
def test_agents_that_die_and_come_back(
    tmp_path: Path, num_changes: int, num_steps: int, zero: int
) -> None:
    """Each step's loss is the undisturbed one, on however many ranks it was trained."""
    expected = undisturbed(tmp_path / "quiet", num_steps, zero)
    folder = tmp_path / "job"
    folder.mkdir()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    seen: set[str] = set()
    a = agent(folder, "a", port, num_steps, zero)
    b = agent(folder, "b", port, num_steps, zero)
    try:
        wait_until_it_trains(folder, 2, seen, a, b)
        for change in range(num_changes):
            if change % 2 == 0:
                kill(b)
                wait_until_it_trains(folder, 1, seen, a)
            else:
                b = agent(folder, "b", port, num_steps, zero)
                wait_until_it_trains(folder, 2, seen, a, b)
        assert a.wait(TIMEOUT_S) == 0, (folder / "log.a").read_text()[-4000:]
    finally:
        for job in (a, b):
            if job.poll() is None:
                kill(job)
    sizes = set()
    found = set()
    for line in (folder / "losses").read_text().splitlines():
        number, size, loss = line.split()
        sizes.add(int(size))
        found.add(int(number))
        assert float(loss) == pytest.approx(expected[int(number)], rel=1e-12), line
    assert sizes == {1, 2}
    assert found == set(range(1, num_steps + 1))
    assert [row.fault for row in list_checkpoints(folder / "checkpoints").rows] == ["", ""]
    assert published(folder / "checkpoints")[-1].step == num_steps
