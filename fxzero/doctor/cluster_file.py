"""A machine's figures as a cluster file, which `fxzero.cost.load_cluster` reads.

device: {name: …, peak_flops: {fp32: 9.512e+10, …}, memory_bytes_per_s: 2.083e+10, …}
host: …
disk: …
intra: …
inter: …
devices_per_node: 2
sources: {device: measured …, inter: not measured …}
"""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fxzero.cost.cluster import ClusterSpec, load_cluster
from fxzero.errors import ConfigError

HEADER = """\
# A machine as `fxzero doctor` measured it: see sources. For --cluster FILE of fxzero inspect and
# estimate, and options={"cost": {"cluster": FILE}}. Correct by hand what you know better.
"""
DIGITS = 4
"""Of figures that were measured: they do not repeat to more of them."""


def values_of(cluster: ClusterSpec) -> dict[str, Any]:
    """A cluster as its file has it: the file's name is its own."""
    found = asdict(cluster)
    del found["name"]
    rounded = _rounded(found)
    assert isinstance(rounded, dict)
    return rounded


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(inner) for key, inner in value.items()}
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


def text_of(cluster: ClusterSpec) -> str:
    """The file."""
    from yaml import SafeDumper, dump  # not loaded by importing fxzero

    class Dumper(SafeDumper):
        """Writes ``9.512e+10`` for what Python writes as ``95120000000.0``."""

    def number(dumper: Any, value: float) -> Any:
        text = f"{value:.{DIGITS}g}"
        mantissa, e, exponent = text.partition("e")
        mantissa = mantissa if "." in mantissa else f"{mantissa}.0"  # YAML's floats have a dot
        return dumper.represent_scalar("tag:yaml.org,2002:float", mantissa + e + exponent)

    Dumper.add_representer(float, number)
    return HEADER + dump(
        values_of(cluster), Dumper=Dumper, sort_keys=False, width=100, allow_unicode=True
    )


def check_name(option: str, path: Path) -> None:
    """See, before anything is measured, that a cluster file can be written, and read by its name.

    Raises:
        ConfigError: it cannot.
    """
    if path.suffix not in (".yaml", ".yml"):
        raise ConfigError(f"{option} {path}: a cluster file's name ends in .yaml: {path.stem}.yaml")
    there = path if path.exists() else path.parent
    if not os.access(there, os.W_OK):
        raise ConfigError(f"{option} {path}: this process may not write to {str(there)!r}")


def write(path: Path, cluster: ClusterSpec) -> None:
    """Write a cluster file; whoever reads it meanwhile sees the old one or the new one.

    Raises:
        ConfigError: it cannot be written.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.write_text(text_of(cluster), encoding="utf-8")
        draft.replace(path)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from error
    load_cluster(str(path))  # what it holds is what a cluster may hold
