"""Cluster files: written, read again, and refused before anything is measured."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from fxzero.cost import load_cluster
from fxzero.cost.cluster import known_clusters
from fxzero.doctor.cluster_file import check_name, text_of, values_of, write
from fxzero.errors import ConfigError


@pytest.mark.parametrize("name", known_clusters())
def test_what_is_written_is_read(tmp_path: Path, name: str) -> None:
    """Every key of every cluster; the name is the file's."""
    spec = load_cluster(name)
    write(tmp_path / "mine.yaml", spec)
    assert load_cluster(str(tmp_path / "mine.yaml")) == replace(spec, name="mine")
    assert [p.name for p in tmp_path.iterdir()] == ["mine.yaml"]


def test_measured_figures_are_rounded() -> None:
    """To what repeats; sizes in bytes are whole numbers, and stay."""
    laptop = load_cluster("laptop")
    device = replace(laptop.device, launch_us=1.23456789, memory_bytes=25276514304)
    spec = replace(laptop, device=device)
    assert "launch_us: 1.235\n" in text_of(spec)
    assert "memory_bytes: 25276514304\n" in text_of(spec)
    assert "fp32: 1.6e+11\n" in text_of(spec)
    assert values_of(spec)["device"]["launch_us"] == 1.235


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    """Nothing is left of it, and the folder that is in its place stays."""
    (tmp_path / "there.yaml").mkdir()
    with pytest.raises(ConfigError, match=r"there.yaml cannot be written"):
        write(tmp_path / "there.yaml", load_cluster("laptop"))
    assert [p.name for p in tmp_path.iterdir()] == ["there.yaml"]


def test_names_are_checked_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cluster is known for a file by its end; and may be written where we may write."""
    with pytest.raises(ConfigError, match=r"a cluster file's name ends in .yaml: mine.yaml"):
        check_name("--write", tmp_path / "mine.json")
    check_name("--write", tmp_path / "mine.yaml")
    monkeypatch.setattr("os.access", lambda path, mode: False)
    with pytest.raises(ConfigError, match="this process may not write to"):
        check_name("--write", tmp_path / "mine.yaml")
