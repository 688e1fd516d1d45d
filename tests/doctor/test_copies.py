"""Copies and the disk: rates that can be, and nothing left behind."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fxzero.cost import load_cluster
from fxzero.disk import scratch
from fxzero.doctor import copies
from fxzero.doctor.measure import Measuring
from fxzero.doctor.verdicts import Verdict
from fxzero.doctor.world import World
from fxzero.errors import DiskError

LAPTOP = load_cluster("laptop")


def measuring(folder: Path) -> Measuring:
    """One rank."""
    return Measuring(World(), torch.device("cpu"), folder)


def test_ways_of_a_cpu() -> None:
    """A memory's, and a thread's."""
    ways = copies.measure_ways(torch.device("cpu"))
    assert ways.up_bytes_per_s == ways.down_bytes_per_s
    assert 1e8 < ways.up_bytes_per_s < 1e12
    assert 0 < ways.latency_us < 1e5


def test_a_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Written, read, and gone."""
    monkeypatch.setattr(copies, "DISK_BYTES", 32 << 20)
    found = measuring(tmp_path)
    spec = found.disk_spec(LAPTOP)
    assert all(1e5 < rate < 1e12 for rate in (spec.read_bytes_per_s, spec.write_bytes_per_s))
    assert 0 < spec.latency_us < 1e6
    assert spec != LAPTOP.disk
    assert found.sources["disk"].startswith("measured: ")
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check has failed, the figures are the guess's and say so, and nothing is left."""
    monkeypatch.setattr(copies, "DISK_BYTES", 16 << 20)

    def read(self: scratch.ScratchFile, offset: int, buffer: memoryview) -> None:
        if len(buffer) > scratch.BLOCK:
            raise OSError(5, "Input/output error")

    monkeypatch.setattr(scratch.ScratchFile, "read", read)
    found = measuring(tmp_path)
    assert found.disk_spec(LAPTOP) == LAPTOP.disk
    assert [(c.name, c.verdict) for c in found.checks] == [("disk", Verdict.FAIL)]
    assert "Input/output error" in found.checks[0].found
    assert found.sources["disk"] == "not measured: as in laptop"
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_takes_no_file(tmp_path: Path) -> None:
    """A sentence, of the disk's own."""
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(DiskError):
        copies.Scratch(file, 1)
    found = measuring(file)
    assert found.disk_spec(LAPTOP) == LAPTOP.disk
    assert found.checks[0].verdict is Verdict.FAIL


def test_a_disk_without_direct_io(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A warning: what is measured is the page cache."""
    monkeypatch.setattr(copies, "DISK_BYTES", 16 << 20)
    monkeypatch.setattr(scratch.ScratchFile, "_use_direct", lambda self: False)
    found = measuring(tmp_path)
    found.disk_spec(LAPTOP)
    assert found.checks[0].verdict is Verdict.WARN
    assert "refuses direct I/O" in found.checks[0].advice
    assert "through the page cache" in found.sources["disk"]
