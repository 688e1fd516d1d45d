"""Run one job in fresh processes under torchrun and collect what its ranks measured.

A rank that fails, or a run past its time limit, ends all processes of the run and raises
`RunError` with the end of that rank's stderr. Each run has an empty compile cache.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from typing import IO, Any

import psutil

from examples.benchmarks import link
from examples.benchmarks.workload import Job

ROOT = Path(__file__).resolve().parents[2]
TAIL_LINES = 40
PREFIX = "fxzero-benchmark-"
"""Of the folder of a run, before the number of the process that made it."""

RankResults = list[dict[str, Any]]


class RunError(RuntimeError):
    """A contender did not finish; the message says which, on which rank, and why."""


def sweep() -> None:
    """Delete what runs left behind that were killed."""
    for folder in Path(gettempdir()).glob(f"{PREFIX}*-*"):
        owner = folder.name.removeprefix(PREFIX).partition("-")[0]
        if owner.isdigit() and not psutil.pid_exists(int(owner)):
            shutil.rmtree(folder, ignore_errors=True)


def launch(job: Job, ranks: int, caches: Path | None = None) -> RankResults:
    """Run `job` on `ranks` processes, on two hosts if it has a link; return what each measured.

    Args:
        caches: where compilers keep what they compiled; an empty folder by default.
    """
    sweep()
    with TemporaryDirectory(prefix=f"{PREFIX}{os.getpid()}-") as name:
        folder = Path(name)
        job.write(folder / "job.json")
        try:
            exit_code = _torchrun(job, ranks, folder, caches or folder)
        except psutil.TimeoutExpired:
            what = f"passed its limit of {job.timeout_s:g} s"
            raise RunError(_explain(job, folder, what)) from None
        if exit_code != 0:
            raise RunError(_explain(job, folder, "failed"))
        return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(ranks)]


def launch_in_turns(jobs: Sequence[Job], ranks: int, repeat: int) -> list[list[RankResults]]:
    """Launch every job `repeat` times, in an order that rotates; return each job's results."""
    results: list[list[RankResults]] = [[] for _ in jobs]
    for turn in range(repeat):
        for offset in range(len(jobs)):
            index = (turn + offset) % len(jobs)
            job = jobs[index]
            results[index].append(launch(job, ranks))
            what = f"{job.contender}, {job.workload.config.num_layers} layers"
            print(f"repeat {turn + 1} of {repeat}: {what}: done", file=sys.stderr)
    return results


def launch_cold_and_warm(
    jobs: Sequence[Job], ranks: int, repeat: int
) -> tuple[list[list[RankResults]], list[list[RankResults]]]:
    """Launch every job with empty caches and then with full ones, in an order that rotates."""
    cold: list[list[RankResults]] = [[] for _ in jobs]
    warm: list[list[RankResults]] = [[] for _ in jobs]
    for turn in range(repeat):
        for offset in range(len(jobs)):
            index = (turn + offset) % len(jobs)
            with TemporaryDirectory(prefix=f"{PREFIX}{os.getpid()}-") as name:
                cold[index].append(launch(jobs[index], ranks, Path(name)))
                warm[index].append(launch(jobs[index], ranks, Path(name)))
            what = f"{jobs[index].contender}, {jobs[index].workload.config.num_layers} layers"
            print(f"repeat {turn + 1} of {repeat}: {what}: done", file=sys.stderr)
    return cold, warm


def _torchrun(job: Job, ranks: int, folder: Path, caches: Path) -> int:
    """Start torchrun, on each host, from the repository root: `examples` is importable there."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": str(job.threads),
        "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
        "TRITON_CACHE_DIR": str(caches / "triton"),
        "FXZERO_CACHE_DIR": str(caches / "fxzero"),
    }
    with (folder / "torchrun.log").open("w") as log:
        if job.link is None:
            command = _command(job, folder, "logs", "--standalone", ranks=ranks)
            agents = [psutil.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log)]
        else:
            agents = _on_two_hosts(job, ranks, folder, environment, log)
        try:
            return _wait(agents, job.timeout_s)
        finally:
            for agent in agents:
                _end(agent)


def _on_two_hosts(
    job: Job, ranks: int, folder: Path, environment: dict[str, str], log: IO[str]
) -> list[psutil.Popen]:
    assert job.link is not None
    each = ranks // link.NUM_HOSTS
    usable = sorted(os.sched_getaffinity(0))
    commands, cores = [], []
    for host, address in enumerate(link.ADDRESSES):
        rendezvous = ("--nnodes", str(link.NUM_HOSTS), "--node-rank", str(host))
        master = ("--master-addr", link.ADDRESSES[0].ip, "--master-port", "29500")
        interface = ("env", f"GLOO_SOCKET_IFNAME={address.device}")
        torchrun = _command(job, folder, f"logs{host}", *rendezvous, *master, ranks=each)
        commands.append([*interface, *torchrun])
        cores.append(usable[host * each : (host + 1) * each])
    return link.start(commands, job.link, cores, environment=environment, folder=ROOT, log=log)


def _command(job: Job, folder: Path, logs: str, *where: str, ranks: int) -> list[str]:
    return [
        *(sys.executable, "-m", "torch.distributed.run", *where),
        *("--nproc-per-node", str(ranks), "--redirects", "3", "--log-dir", str(folder / logs)),
        *("-m", "examples.benchmarks.rank", str(folder / "job.json"), str(folder)),
    ]


def _wait(agents: Sequence[psutil.Popen], timeout_s: float) -> int:
    """Wait for all; the first failure, or the limit, ends the waiting."""
    gone, alive = psutil.wait_procs(
        agents, timeout_s, callback=lambda agent: _end_others(agent, agents)
    )
    if alive:
        raise psutil.TimeoutExpired(timeout_s)
    return next((agent.returncode for agent in gone if agent.returncode), 0)


def _end_others(ended: psutil.Popen, agents: Sequence[psutil.Popen]) -> None:
    """When one host fails, the other would wait for it for minutes."""
    if ended.returncode:
        for agent in agents:
            _end(agent)


def _end(process: psutil.Popen) -> None:
    """End torchrun and its ranks, which live in sessions of their own."""
    if not process.is_running():
        return
    family = [*process.children(recursive=True), process]
    for member in family:
        if member.is_running():
            member.kill()
    psutil.wait_procs(family, timeout=10)


def _explain(job: Job, folder: Path, what: str) -> str:
    """Name the rank that failed first, as torchrun saw it, and quote its stderr."""
    report = (folder / "torchrun.log").read_text()
    cause = re.search(
        r"Root Cause.*?rank\s*:\s*(\d+).*?exitcode\s*:\s*(-?\d+)", report, flags=re.DOTALL
    )
    logs = sorted(folder.glob("logs*/*/attempt_0/*/stderr.log"))
    if cause:
        rank, exit_code = cause.groups()
        what += f" on rank {rank} (exit code {exit_code})"
        logs = [log for log in logs if log.parent.name == rank]
    quotes = [f"stderr of rank {log.parent.name}:\n{_tail(log.read_text())}" for log in logs]
    quotes = quotes or [f"torchrun:\n{_tail(report)}"]
    return "\n".join([f"{job.contender} {what}", *quotes])


def _tail(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines()[-TAIL_LINES:])
