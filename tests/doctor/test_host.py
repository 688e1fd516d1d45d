"""Cores, memory and shared memory: verdicts by figures."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch

from fxzero.cost.resources import cores
from fxzero.doctor import host


@pytest.mark.parametrize(
    ("cores", "ranks", "threads", "verdict", "advice"),
    [
        (4, 2, 2, "ok", ""),
        (4, 4, 2, "warn", "OMP_NUM_THREADS=1"),
        (2, 4, 1, "warn", "start 2 of them"),
        (16, 2, 1, "warn", "OMP_NUM_THREADS=8"),
        (16, 1, 8, "ok", ""),
    ],
)
def test_threads_and_cores(
    monkeypatch: pytest.MonkeyPatch, cores: int, ranks: int, threads: int, verdict: str, advice: str
) -> None:
    """Too many wait for each other, too few leave cores idle."""
    if torch.cuda.is_available():
        pytest.skip("beside a GPU, cores may be idle")
    monkeypatch.setattr(host, "cores", lambda: cores)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    checked = host.check_cores(ranks)
    assert checked.verdict == verdict
    assert advice in checked.advice


def test_cores_are_not_more_than_there_are() -> None:
    """And one at least."""
    assert 1 <= cores() <= (os.cpu_count() or 1)


def test_little_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """As containers have it: 64 MB."""
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_bavail=16384, f_frsize=4096))
    checked = host.check_shared_memory(2)
    assert checked.verdict == "warn"
    assert "--shm-size" in checked.advice


def test_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is free, for each rank."""
    monkeypatch.setattr(host, "available_bytes", lambda: 3 << 30)
    assert host.check_memory(1).verdict == "ok"
    assert host.check_memory(2).verdict == "warn"
