"""Which costs a compilation decides by."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import StrEnum

import torch
import torch.distributed as dist

from fxzero.cost.analytic import AnalyticCosts
from fxzero.cost.cluster import ClusterSpec, guess_cluster, load_cluster
from fxzero.cost.measured import MeasuredCosts
from fxzero.cost.model import CostModel
from fxzero.cost.resources import device_bytes, host_bytes
from fxzero.errors import ConfigError
from fxzero.graph import StepGraph
from fxzero.settings import check_types


class CostKind(StrEnum):
    """Where costs come from."""

    ANALYTIC = "analytic"
    """A roofline and α–β, from the figures of a cluster."""
    MEASURED = "measured"
    """Micro-benchmarks of this model's regions and of this machine's collectives, made once by
    rank 0 and kept on disk."""


@dataclass(frozen=True)
class CostSettings:
    """Which costs a compilation decides by."""

    model: CostKind = CostKind.ANALYTIC
    """``analytic``: a roofline and α–β, from the figures of a cluster. ``measured``:
    micro-benchmarks of this model's regions and this machine's collectives, made once by rank 0."""
    cluster: str | None = None
    """A name in `conf/cluster/`, or the path of a YAML file with the same keys. None guesses from
    the device and from torchrun's variables."""

    def __post_init__(self) -> None:
        """A cluster that there is, before anything is compiled for it."""
        check_types(self, "cost")
        if self.cluster is not None:
            load_cluster(self.cluster)

    def make(self, graph: StepGraph, *, fuses: bool) -> CostModel:
        """The model of costs for a graph.

        Args:
            fuses: whether its regions will be compiled.

        Raises:
            ConfigError: costs shall be measured where there is nothing to measure.
        """
        device_type = device_of(graph)
        cluster = self._cluster(device_type)
        if self.model is CostKind.ANALYTIC:
            return AnalyticCosts(cluster)
        if dist.is_initialized() and dist.get_backend() == "fake":
            raise ConfigError(
                "cost.model='measured' needs real ranks; this process group is fake. Use "
                "cost.model='analytic' and say which cluster: cost.cluster='dgx_h100'."
            )
        _compilations[graph.identity] += 1
        identity = f"{graph.identity}/{_compilations[graph.identity]}"
        base = AnalyticCosts(cluster)
        return MeasuredCosts(base, device_type, fuses, graph.fake_mode, identity)

    def device_type(self, graph: StepGraph) -> str:
        """What torch calls the devices whose costs these are: of a step that is only looked at
        others than its tensors', which are fake."""
        return self._cluster(device_of(graph)).device.type

    def device_bytes(self, device_type: str) -> int:
        """What the device has for this rank: the cluster's figure where one was named or ranks are
        fake, else this machine's."""
        is_fake = dist.is_initialized() and dist.get_backend() == "fake"
        if self.cluster is not None or is_fake:
            return int(self._cluster(device_type).device.memory_bytes)
        return device_bytes(device_type)

    def host_bytes(self) -> int:
        """What the host has for this rank, likewise."""
        is_fake = dist.is_initialized() and dist.get_backend() == "fake"
        if self.cluster is not None or is_fake:
            return int(self._cluster("cpu").host.memory_bytes)
        return host_bytes()

    def _cluster(self, device_type: str) -> ClusterSpec:
        world_size = dist.get_world_size() if dist.is_initialized() else 1
        if self.cluster is None:
            return guess_cluster(device_type, world_size)
        return load_cluster(self.cluster)


_compilations: Counter[str] = Counter()
"""How often graphs of each model were compiled by measured costs: equal on all ranks."""


def device_of(graph: StepGraph) -> str:
    """The type of device that the parameters are on."""
    for node in graph.inputs:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor):
            return value.device.type
    return "cpu"
