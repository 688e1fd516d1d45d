"""Two hosts on one machine, joined by a slow link.

    host 0 (namespace, one core a rank)  ── veth, token bucket ──  host 1 (the same)

Each host is a network namespace without a name, and a process namespace: both end with
their processes, and those end with this one, even when it is killed. Nothing is left to
clean up.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import psutil

RATES = {"1gbit": 125_000_000, "10gbit": 1_250_000_000}
"""Names that `tc` knows, and bytes per second."""
NUM_HOSTS = 2
TOOLS = ("ip", "tc", "unshare", "setpriv", "nsenter", "taskset")
START_LIMIT_S = 10.0


class LinkError(RuntimeError):
    """This machine cannot play two hosts; the message says why."""


@dataclass(frozen=True)
class Address:
    """Where a host is on the link."""

    device: str
    ip: str


ADDRESSES = [Address("bench0", "10.253.0.1"), Address("bench1", "10.253.0.2")]


def check(ranks: int) -> None:
    """See that this machine can play two hosts.

    Raises:
        LinkError: it is not Linux, this is not root, a program is missing, or the ranks or the
            cores do not divide between two hosts.
    """
    if sys.platform != "linux":
        raise LinkError(f"--link needs Linux's network namespaces; this is {sys.platform}.")
    if os.geteuid() != 0:
        raise LinkError("--link makes network namespaces and needs root: run it with sudo.")
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        raise LinkError(
            f"--link needs {', '.join(missing)}, which are not installed: apt-get install "
            "iproute2 util-linux."
        )
    if ranks % NUM_HOSTS:
        raise LinkError(f"--link shares ranks between two hosts; --ranks {ranks} is odd.")
    cores = len(os.sched_getaffinity(0))
    if cores < ranks:
        raise LinkError(f"--link gives each rank a core of its own: {ranks} ranks, {cores} cores.")


def start(
    commands: Sequence[Sequence[str]],
    rate: str,
    cores: Sequence[Sequence[int]],
    *,
    environment: Mapping[str, str],
    folder: Path,
    log: IO[str],
) -> list[psutil.Popen]:
    """Start one command on each host, joined by a link of some rate.

    Args:
        commands: what each host runs.
        rate: a key of `RATES`.
        cores: the cores of each host.
        folder: the working directory of all.
        log: where their output goes.

    Raises:
        LinkError: the namespaces or the link could not be made.
    """
    hosts = []
    for command, own in zip(commands, cores, strict=True):
        # The host waits for a line on its stdin: the link is made between its processes.
        script = 'ip link set lo up && read ready && exec "$@"'
        hosts.append(
            psutil.Popen(
                [
                    *("setpriv", "--pdeathsig", "KILL"),
                    *("unshare", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"),
                    *("taskset", "--cpu-list", ",".join(map(str, own))),
                    *("sh", "-c", script, "host", *command),
                ],
                cwd=folder,
                env=dict(environment),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        )
    try:
        for host in hosts:
            _wait_for_namespace(host)
        _join(hosts, rate)
    except LinkError:
        for host in hosts:
            host.kill()
        raise
    for host in hosts:
        host.stdin.write(b"\n")
        host.stdin.flush()
    return hosts


def _wait_for_namespace(host: psutil.Popen) -> None:
    own = os.readlink("/proc/self/ns/net")
    end_s = time.monotonic() + START_LIMIT_S
    while time.monotonic() < end_s:
        if host.poll() is not None:
            raise LinkError(
                f"a host ended at once with exit code {host.returncode}: may this process make "
                "namespaces? Containers often may not (CAP_SYS_ADMIN)."
            )
        if os.readlink(f"/proc/{host.pid}/ns/net") != own:
            return
        time.sleep(0.01)
    raise LinkError(f"a host made no namespace within {START_LIMIT_S:g} s")


def _join(hosts: Sequence[psutil.Popen], rate: str) -> None:
    """Make a veth pair between two hosts, and let each end send at a limited rate."""
    first, second = ADDRESSES
    _run(
        *("ip", "link", "add", first.device, "netns", str(hosts[0].pid), "type", "veth"),
        *("peer", "name", second.device, "netns", str(hosts[1].pid)),
    )
    for host, address in zip(hosts, ADDRESSES, strict=True):
        inside = ("nsenter", "--net", "--target", str(host.pid))
        _run(*inside, "ip", "address", "add", f"{address.ip}/24", "dev", address.device)
        _run(*inside, "ip", "link", "set", address.device, "up")
        limit = ("tbf", "rate", rate, "burst", "256kb", "latency", "50ms")
        _run(*inside, "tc", "qdisc", "add", "dev", address.device, "root", *limit)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise LinkError(f"{' '.join(command)} failed: {done.stderr.strip()}")
