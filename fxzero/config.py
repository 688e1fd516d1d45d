"""Typed settings: one dataclass, filled alike from ``options={...}`` and from Hydra.

A pass is its own settings, so `Config` is a record of passes. An unknown key is an
error that names the nearest right one.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, TypeVar, Union

from fxzero.errors import ConfigError, nearest
from fxzero.passes import (
    Accumulate,
    Bucket,
    ClipGrads,
    DrawMasks,
    GatherAhead,
    LowerKernels,
    LowerRegions,
    LowerTransfers,
    Pass,
    Prefetch,
    Recompute,
    ReleaseSaved,
    ShardGrads,
    ShardParams,
    StampNodes,
    Update,
)
from fxzero.passes.lower_regions import RegionBackend
from fxzero.schedule.settings import CostSettings

T = TypeVar("T")


@dataclass(frozen=True)
class Config:
    """Everything that can be set about a compilation."""

    strict: bool = False
    """Settings that cannot take effect are errors, not warnings."""
    keep_text: bool = False
    """Record the graph's text before and after each pass, for diffs."""
    stop_unless_finite: bool = False
    """In whole steps: raise NonFiniteGradientError, with the parameters' names, before a gradient
    that is infinite or not a number changes anything. (fp16 skips such steps instead.)"""
    cuda_graph: bool = False
    """In whole steps on CUDA: replay the step as one CUDA graph. Not for optimizers that run
    their own ``step()``, nor with `stop_unless_finite`, which waits for the GPU."""
    cost: CostSettings = field(default_factory=CostSettings)
    lower_kernels: LowerKernels = field(default_factory=LowerKernels)
    recompute: Recompute = field(default_factory=Recompute)
    bucket: Bucket = field(default_factory=Bucket)
    prefetch: Prefetch = field(default_factory=Prefetch)
    gather_ahead: GatherAhead = field(default_factory=GatherAhead)
    lower_regions: LowerRegions = field(default_factory=LowerRegions)

    @staticmethod
    def from_options(options: Mapping[str, Any] | Config | None) -> Config:
        """Read ``options={...}``: ``{"prefetch": {"distance": 2}, "strict": True}``.

        Raises:
            ConfigError: an unknown key, or a value that a setting cannot take.
        """
        if isinstance(options, Config):
            return options
        return build(Config, options or {}, "options")

    def joint_passes(self) -> list[Pass]:
        """The passes of the whole step graph, in order."""
        return [
            StampNodes(),
            self.lower_kernels,
            self.recompute,
            ShardParams(),
            ShardGrads(),
            self.bucket,
            self.prefetch,
        ]

    def step_passes(self, micro_batches: int, max_norm: float | None, scaled: bool) -> list[Pass]:
        """The passes of a graph that ends in the update, in order.

        Args:
            max_norm: what gradients are clipped to.
            scaled: whether the loss is scaled.
        """
        stop = self.stop_unless_finite and not scaled
        return [
            StampNodes(),
            self.lower_kernels,
            self.recompute,
            Accumulate(micro_batches),
            ShardParams(),
            ShardGrads(),
            self.bucket,
            ClipGrads(max_norm=max_norm, unscale=scaled, stop_unless_finite=stop),
            Update(),
            self.prefetch,
        ]

    def side_passes(self) -> list[Pass]:
        """The passes of each side of the cut, in order."""
        fuses = self.lower_regions.backend is RegionBackend.INDUCTOR
        masks = [DrawMasks()] if fuses else []
        return [LowerTransfers(), ReleaseSaved(), *masks, self.lower_regions]

    def lowering_passes(self) -> list[Pass]:
        """The passes that make a scheduled whole step callable, in order."""
        # A CUDA graph replays the same memory: nothing can be in flight between two steps.
        ahead = replace(self.gather_ahead, enabled=False) if self.cuda_graph else self.gather_ahead
        first, *others = (p for p in self.side_passes() if not isinstance(p, ReleaseSaved))
        return [first, ahead, *others]


def build(kind: type[T], values: Mapping[str, Any], where: str) -> T:
    """Make a settings dataclass of a mapping, checking names and types.

    Args:
        where: the path of the mapping, for messages.

    Raises:
        ConfigError: an unknown key, or a value of another type.
    """
    if not isinstance(values, Mapping):
        raise ConfigError(f"{where} takes a mapping of settings, not {values!r}")
    hints = typing.get_type_hints(kind)
    known = {f.name: hints[f.name] for f in dataclasses.fields(kind)}  # type: ignore[arg-type]
    arguments = {}
    for key, value in values.items():
        if key not in known:
            raise ConfigError(f"{where} has no setting {key!r}: {nearest(str(key), known)}")
        arguments[key] = _convert(known[key], value, f"{where}.{key}")
    return kind(**arguments)


def _convert(hint: Any, value: Any, where: str) -> Any:
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return value if isinstance(value, hint) else build(hint, value, where)
    if isinstance(hint, type) and issubclass(hint, Enum):
        choices = [member.value for member in hint]
        if value not in choices and not isinstance(value, hint):
            raise ConfigError(f"{where}={value!r}: {nearest(str(value), choices)}")
        return hint(value)
    if typing.get_origin(hint) in (Union, types.UnionType):
        if value is None:
            return None
        hint = next(arg for arg in typing.get_args(hint) if arg is not type(None))
    if hint is bool and not isinstance(value, bool):
        raise ConfigError(f"{where}={value!r} must be true or false")
    if hint is int and (isinstance(value, bool) or not isinstance(value, int)):
        raise ConfigError(f"{where}={value!r} must be a whole number")
    if hint is float and (isinstance(value, bool) or not isinstance(value, (int, float))):
        raise ConfigError(f"{where}={value!r} must be a number")
    return value
