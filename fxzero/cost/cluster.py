"""Machines as figures: devices, the links inside a node, the links between nodes.

`conf/cluster/` has a file for each known one, with the source of every figure. `load_cluster`
reads one of them, or a file of your own with the same keys.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from importlib import resources
from pathlib import Path
from typing import Any

import torch

from fxzero.errors import ConfigError, nearest


@dataclass(frozen=True)
class DeviceSpec:
    """One device: what one rank computes with."""

    name: str
    peak_flops: Mapping[str, float]
    """Dense FLOP/s by dtype: ``fp32``, ``bf16``, ``fp16``, ``fp64``."""
    memory_bytes_per_s: float
    memory_bytes: float
    half_peak_flops: float = 0.0
    """Size of a matrix product, in FLOPs, that reaches half of `flops_efficiency`."""
    flops_efficiency: float = 1.0
    """Share of the peak that large matrix products reach."""
    memory_efficiency: float = 1.0
    """Share of the bandwidth that large streaming operators reach."""
    launch_us: float = 0.0
    """Of one operator or fused kernel."""


@dataclass(frozen=True)
class LinkSpec:
    """What carries bytes between ranks: the α–β model, with the host's share."""

    bytes_per_s: float
    """Per rank inside a node, per node between nodes; one direction, both at once."""
    latency_us: float
    """α: of one message, however small."""
    host_s_per_byte: float = 0.0
    """Compute time that the host loses by each byte that it sends and receives."""
    host_us: float = 0.0
    """Compute time that the host loses by each collective."""


@dataclass(frozen=True)
class ClusterSpec:
    """Equal nodes of equal devices."""

    name: str
    device: DeviceSpec
    intra: LinkSpec
    """Between the devices of a node."""
    inter: LinkSpec
    """Between nodes."""
    devices_per_node: int = 1
    num_nodes: int = 1
    sources: Mapping[str, str] = field(default_factory=dict)
    """Where the figures come from."""

    def __post_init__(self) -> None:
        for what, value in (
            ("devices_per_node", self.devices_per_node),
            ("num_nodes", self.num_nodes),
            ("device.memory_bytes_per_s", self.device.memory_bytes_per_s),
            ("intra.bytes_per_s", self.intra.bytes_per_s),
            ("inter.bytes_per_s", self.inter.bytes_per_s),
        ):
            if not value > 0:
                raise ConfigError(f"cluster {self.name!r}: {what}={value} must be positive")


def known_clusters() -> list[str]:
    """The names of the files in `conf/cluster/`."""
    folder = resources.files("fxzero.conf") / "cluster"
    return sorted(Path(f.name).stem for f in folder.iterdir() if f.name.endswith(".yaml"))


def load_cluster(name: str) -> ClusterSpec:
    """Read a cluster by its name in `conf/cluster/`, or from the path of a YAML file.

    Raises:
        ConfigError: there is none of that name, or a key is missing, unknown or no number.
    """
    from omegaconf import OmegaConf  # not loaded by importing fxzero

    if name.endswith((".yaml", ".yml")):
        path = Path(name)
        if not path.is_file():
            raise ConfigError(f"cost.cluster={name!r}: there is no such file in {Path.cwd()}")
        text = path.read_text()
    elif name in (known := known_clusters()):
        text = (resources.files("fxzero.conf") / "cluster" / f"{name}.yaml").read_text()
    else:
        raise ConfigError(f"cost.cluster={name!r}: {nearest(name, known)}")
    values = OmegaConf.to_container(OmegaConf.create(text))
    if not isinstance(values, dict):
        raise ConfigError(f"cluster {name!r} must be a mapping")
    return _read(ClusterSpec, {"name": Path(name).stem, **values}, name)


def _read(kind: Any, values: Any, where: str) -> Any:
    """Make a spec of a mapping."""
    if not isinstance(values, dict):
        raise ConfigError(f"cluster {where}: expected a mapping, found {values!r}")
    nested = {"device": DeviceSpec, "intra": LinkSpec, "inter": LinkSpec}
    known = {f.name for f in fields(kind)}
    arguments: dict[str, Any] = {}
    for key, value in values.items():
        if key not in known:
            raise ConfigError(f"cluster {where} has no key {key!r}: {nearest(str(key), known)}")
        if key in nested:
            value = _read(nested[key], value, f"{where}.{key}")
        elif key not in ("name", "sources", "peak_flops"):
            value = _number(value, f"{where}.{key}")
        arguments[key] = value
    try:
        return kind(**arguments)
    except TypeError as error:
        raise ConfigError(f"cluster {where}: {error}") from None


def _number(value: Any, where: str) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise ConfigError(f"cluster {where}={value!r} must be a number") from None
    return int(number) if number.is_integer() and not isinstance(value, float) else number


GPUS = {"H200": "h200", "H100": "dgx_h100", "A100": "dgx_a100", "V100": "dgx2"}
"""A part of a GPU's name, and the cluster that has it."""


def guess_cluster(device_type: str, world_size: int) -> ClusterSpec:
    """The cluster that this process seems to be part of, from its device and torchrun's variables.

    Every rank comes to the same guess. CPU ranks on several hosts are assumed to be joined by
    Gigabit Ethernet, and GPUs of an unknown kind to be A100s.
    """
    local = max(int(os.environ.get("LOCAL_WORLD_SIZE", world_size)), 1)
    num_nodes = max(world_size // local, 1)
    name = "laptop" if num_nodes == 1 else "pair_1gbit"
    if device_type == "cuda":
        found = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
        name = next((spec for part, spec in GPUS.items() if part in found), "dgx_a100")
    spec = load_cluster(name)
    return replace(spec, num_nodes=num_nodes, devices_per_node=min(local, world_size))
