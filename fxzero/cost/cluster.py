"""Machines as figures: devices, the links inside a node, the links between nodes.

`conf/cluster/` has a file for each known one, with the source of every figure. `load_cluster`
reads one of them, or a file of your own with the same keys.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from importlib import resources
from pathlib import Path
from typing import Any

import torch

from fxzero.errors import ConfigError, nearest

TYPES = ("cuda", "cpu")
"""Of devices."""


@dataclass(frozen=True)
class DeviceSpec:
    """One device: what one rank computes with."""

    name: str
    peak_flops: Mapping[str, float]
    """Dense FLOP/s by dtype: ``fp32``, ``bf16``, ``fp16``, ``fp64``."""
    memory_bytes_per_s: float
    memory_bytes: float
    half_peak_flops: float = 0.0
    """Size of a matrix product, in FLOPs, that reaches half of `flops_efficiency`, in the dtype of
    the largest peak; in others one that takes as long does."""
    flops_efficiency: float = 1.0
    """Share of the peak that large matrix products reach."""
    memory_efficiency: float = 1.0
    """Share of the bandwidth that large streaming operators reach."""
    launch_us: float = 0.0
    """Of one operator or fused kernel."""
    convolution_efficiency: float = 1.0
    """Share of a matrix product's speed that convolutions and their gradients reach."""
    attention_efficiency: float = 1.0
    """Share of a matrix product's speed that fused attention and its gradient reach."""
    random_per_s: float = 0.0
    """Random numbers that it draws in a second, where it draws one after the other; 0 where
    drawing is as fast as writing."""
    transcendental_per_s: float = 0.0
    """Values of exp, tanh, erf and their like that it computes in a second, where that takes
    longer than to stream them; 0 where it does not."""
    type: str = ""
    """What torch calls it: ``cuda``, or ``cpu``, whose ranks talk over gloo. Where nothing is said,
    what draws numbers one after the other is a CPU."""

    def __post_init__(self) -> None:
        """Fill in the type."""
        if not self.type:
            object.__setattr__(self, "type", "cpu" if self.random_per_s else "cuda")


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
    tensor_us: float = 0.0
    """Of each further tensor of a collective: it comes later by so much, and the host loses it.
    Where tensors travel as messages of their own, as over gloo, this is most of a small bucket."""


@dataclass(frozen=True)
class HostSpec:
    """The host's share of one device: how it is reached, and what updates there have."""

    up_bytes_per_s: float = 2.5e10
    """To the device. The figures of a cluster that has none are those of PCIe 4.0 x16, 31.5 GB/s
    each way, of which copies reach some 80 %."""
    down_bytes_per_s: float = 2.5e10
    """From it."""
    latency_us: float = 10.0
    """Of one copy, however small."""
    memory_bytes_per_s: float = 2.0e10
    """Of the host's memory, for the updates of one device's parameters."""
    memory_bytes: float = 1.0e11
    """Of the host's memory, for one device."""


@dataclass(frozen=True)
class DiskSpec:
    """The disk's share of one device."""

    read_bytes_per_s: float = 1.5e9
    """From it. The figures of a cluster that has none are those of one PCIe 4.0 NVMe disk, some 7
    GB/s read and 5 written, shared by four devices."""
    write_bytes_per_s: float = 1.0e9
    """To it."""
    latency_us: float = 100.0
    """Of one request, however small."""
    num_bytes: float = 1.0e12
    """For one device."""


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
    host: HostSpec = field(default_factory=HostSpec)
    """Beside each device."""
    disk: DiskSpec = field(default_factory=DiskSpec)
    """Behind each host."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """Where the figures come from."""

    def __post_init__(self) -> None:
        """See that times come out positive and finite, whatever is asked of the figures.

        Raises:
            ConfigError: a figure that no machine has.
        """
        device = self.device
        positive = {
            "devices_per_node": self.devices_per_node,
            "num_nodes": self.num_nodes,
            "device.memory_bytes_per_s": device.memory_bytes_per_s,
            "device.memory_bytes": device.memory_bytes,
            "device.flops_efficiency": device.flops_efficiency,
            "device.memory_efficiency": device.memory_efficiency,
            "device.convolution_efficiency": device.convolution_efficiency,
            "device.attention_efficiency": device.attention_efficiency,
            "intra.bytes_per_s": self.intra.bytes_per_s,
            "inter.bytes_per_s": self.inter.bytes_per_s,
            **{f"device.peak_flops.{dtype}": value for dtype, value in device.peak_flops.items()},
            **{f"host.{field}": getattr(self.host, field) for field in _HOST_RATES},
            **{f"disk.{field}": getattr(self.disk, field) for field in _DISK_RATES},
        }
        for what, value in positive.items():
            if not (value > 0 and math.isfinite(value)):
                raise ConfigError(f"cluster {self.name!r}: {what}={value} must be positive")
        if device.type not in TYPES:
            raise ConfigError(
                f"cluster {self.name!r}: device.type={device.type!r} must be one of {list(TYPES)}"
            )
        shares = {
            "flops_efficiency": "the peak",
            "memory_efficiency": "the peak",
            "convolution_efficiency": "a product's speed",
            "attention_efficiency": "a product's speed",
        }
        for what, whole in shares.items():
            if getattr(device, what) > 1:
                raise ConfigError(
                    f"cluster {self.name!r}: device.{what}={getattr(device, what)} is a share of "
                    f"{whole}, 1 at most"
                )
        not_negative = {
            "device.half_peak_flops": device.half_peak_flops,
            "device.launch_us": device.launch_us,
            "device.random_per_s": device.random_per_s,
            "device.transcendental_per_s": device.transcendental_per_s,
            "host.latency_us": self.host.latency_us,
            "disk.latency_us": self.disk.latency_us,
            **{
                f"{link}.{field}": getattr(getattr(self, link), field)
                for link in ("intra", "inter")
                for field in ("latency_us", "host_s_per_byte", "host_us", "tensor_us")
            },
        }
        for what, value in not_negative.items():
            if not (value >= 0 and math.isfinite(value)):
                raise ConfigError(f"cluster {self.name!r}: {what}={value} must be 0 or more")


def known_clusters() -> list[str]:
    """The names of the files in `conf/cluster/`."""
    folder = resources.files("fxzero.conf") / "cluster"
    return sorted(Path(f.name).stem for f in folder.iterdir() if f.name.endswith(".yaml"))


def load_cluster(name: str) -> ClusterSpec:
    """Read a cluster by its name in `conf/cluster/`, or from the path of a YAML file.

    Raises:
        ConfigError: there is none of that name, or a key is missing, unknown or no number.
    """
    if not isinstance(name, str) or not name:
        raise ConfigError(
            f"cost.cluster={name!r} must be a name in conf/cluster, or the path of a YAML file"
        )
    if name.endswith((".yaml", ".yml")):
        path = Path(name)
        if not path.is_file():
            raise ConfigError(f"cost.cluster={name!r}: there is no such file in {Path.cwd()}")
        content = path.read_bytes()
    elif name in (known := known_clusters()):
        file = resources.files("fxzero.conf") / "cluster" / f"{name}.yaml"
        content = file.read_bytes()
    else:
        raise ConfigError(
            f"cost.cluster={name!r}: {nearest(name, known)}; or a file that ends in .yaml"
        )
    return _spec(content, name)


@functools.lru_cache(maxsize=32)
def _spec(content: bytes, name: str) -> ClusterSpec:
    """What a file says; read once, as every compilation asks for it."""
    values = _parse(content, name)
    if not isinstance(values, dict):
        raise ConfigError(
            f"cluster {name!r} must be a mapping with the keys of conf/cluster/laptop.yaml, not "
            f"{type(values).__name__}"
        )
    spec: ClusterSpec = _read(ClusterSpec, {"name": Path(name).stem, **values}, name)
    return spec


def _parse(content: bytes, name: str) -> Any:
    """What a YAML file holds.

    Raises:
        ConfigError: it is none; the message has the line.
    """
    from omegaconf import OmegaConf  # not loaded by importing fxzero
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    try:
        text = content.decode()
        return OmegaConf.to_container(OmegaConf.create(text), resolve=True) if text.strip() else {}
    except (YAMLError, OmegaConfBaseException, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"cluster {name!r} is no YAML that can be read: {reason}") from None


_HOST_RATES = ("up_bytes_per_s", "down_bytes_per_s", "memory_bytes_per_s", "memory_bytes")
_DISK_RATES = ("read_bytes_per_s", "write_bytes_per_s", "num_bytes")
_TEXTS = ("name", "type", "sources")
_COUNTS = ("devices_per_node", "num_nodes")


def _read(kind: Any, values: Any, where: str) -> Any:
    """Make a spec of a mapping."""
    if not isinstance(values, dict):
        raise ConfigError(f"cluster {where}: expected a mapping, found {values!r}")
    nested = {
        "device": DeviceSpec,
        "intra": LinkSpec,
        "inter": LinkSpec,
        "host": HostSpec,
        "disk": DiskSpec,
    }
    known = {f.name for f in fields(kind)}
    arguments: dict[str, Any] = {}
    for key, value in values.items():
        if key not in known:
            raise ConfigError(f"cluster {where} has no key {key!r}: {nearest(str(key), known)}")
        if key in nested:
            value = _read(nested[key], value, f"{where}.{key}")
        elif key == "peak_flops":
            value = _rates(value, f"{where}.{key}")
        elif key not in _TEXTS:
            value = _number(value, f"{where}.{key}")
            if key in _COUNTS and value != int(value):
                raise ConfigError(f"cluster {where}.{key}={value} must be a whole number")
        arguments[key] = int(value) if key in _COUNTS else value
    missing = [
        f.name
        for f in fields(kind)
        if f.default is MISSING and f.default_factory is MISSING and f.name not in arguments
    ]
    if missing:
        raise ConfigError(
            f"cluster {where}: {', '.join(missing)} missing; conf/cluster/laptop.yaml shows what "
            "each one is"
        )
    return kind(**arguments)


_DTYPES = ("fp32", "bf16", "fp16", "fp64")


def _rates(values: Any, where: str) -> dict[str, float]:
    """FLOP/s by dtype; those of fp32 stand in for what is not named."""
    if not isinstance(values, dict) or "fp32" not in values:
        raise ConfigError(
            f"cluster {where}={values!r} must be FLOP/s by dtype, fp32 among them: {{fp32: 1e13}}"
        )
    for dtype in values:
        if dtype not in _DTYPES:
            raise ConfigError(f"cluster {where} has no {dtype!r}: {nearest(str(dtype), _DTYPES)}")
    return {dtype: _number(rate, f"{where}.{dtype}") for dtype, rate in values.items()}


def _number(value: Any, where: str) -> float:
    """A finite number; YAML reads ``1e9`` as text, which is one too."""
    try:
        if isinstance(value, bool):
            raise TypeError
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        raise ConfigError(f"cluster {where}={value!r} must be a number") from None
    if not math.isfinite(number):
        raise ConfigError(f"cluster {where}={value!r} must be a finite number")
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
