"""Typed settings: one dataclass, filled alike from ``options={...}`` and from Hydra.

A pass is its own settings, so `Config` is a record of the passes that have some. An unknown key
is an error that names the nearest right one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from fxzero.compiler.memory_budget import LEAST, NO_BUDGET, MemoryBudget
from fxzero.cost.settings import CostSettings
from fxzero.cost.throttle import Throttle
from fxzero.disk.scratch import DiskSettings
from fxzero.errors import ConfigError
from fxzero.passes import (
    Bucket,
    GatherAhead,
    LowerKernels,
    LowerRegions,
    OffloadActivations,
    OffloadParams,
    OffloadStates,
    OrderMicroBatches,
    Prefetch,
    Recompute,
    Slab,
    TileLinear,
)
from fxzero.passes.lower_regions import RegionBackend
from fxzero.passes.offload_states import Place
from fxzero.passes.recompute import Policy
from fxzero.settings import Auto, Share, Size, build, check_types


class MemoryPreset(StrEnum):
    """Names for where a step holds what it has."""

    NONE = "none"
    """All of it on the device."""
    STATES_HOST = "states_host"
    """ZeRO-Offload: optimizer state and fp32 masters in the host's memory, updated there."""
    ALL_HOST = "all_host"
    """ZeRO-3 Offload: and parameters on the device only where they are gathered or used."""
    INFINITY = "infinity"
    """ZeRO-Infinity: the same, on disk: on the host is what is on its way."""
    L2L = "l2l"
    """One layer at a time (Pudipeddi et al. 2020): and every block is repeated in backward from its
    input, and two layers' parameters are on the device at most."""
    AUTO = "auto"
    """What a `memory_budget` asks for, by cost: the fastest step that fits."""


PRESETS: dict[MemoryPreset, dict[str, Any]] = {
    MemoryPreset.NONE: {},
    MemoryPreset.STATES_HOST: {"offload_states": {"share": 1.0}},
    MemoryPreset.ALL_HOST: {"offload_states": {"share": 1.0}, "offload_params": {"share": 1.0}},
    MemoryPreset.INFINITY: {
        "offload_states": {"share": 1.0},
        "offload_params": {"share": 1.0},
        "host_budget": Size(LEAST),
    },
    MemoryPreset.L2L: {
        "offload_states": {"share": 1.0},
        "offload_params": {"share": 1.0, "in_flight": 1},
        "recompute": {"policy": Policy.FULL},
        "bucket": {"min_bytes": 0},
        "prefetch": {"keep": False},
    },
    MemoryPreset.AUTO: {
        "memory_budget": Size("auto"),
        "offload_states": {"share": Auto.AUTO},
        "offload_params": {"share": Auto.AUTO},
        "offload_activations": {"share": Auto.AUTO},
    },
}
"""What a name stands for: settings, and those of passes, that have their defaults."""


def _shown(share: Share) -> str:
    return "auto" if isinstance(share, Auto) else f"{share:g}"


def check_shares(config: Config) -> None:
    """See that what is asked of the host goes together.

    Raises:
        ConfigError: it does not: more parameters than optimizer state there, say.
    """
    states, params = config.offload_states.share or 0.0, config.offload_params.share or 0.0
    least = 1.0 if isinstance(states, Auto) else states  # it follows what parameters ask for
    if not isinstance(params, Auto) and params > least:
        raise ConfigError(
            f"offload_params.share={_shown(params)} is more than offload_states.share="
            f"{_shown(states)}: what lives on the host is updated there. Raise "
            "offload_states.share, or use memory='all_host'."
        )
    if config.offload_states.delay and (params or config.host_budget != NO_BUDGET):
        by_disk = f"host_budget={config.host_budget}"
        what = f"offload_params.share={_shown(params)}" if params else by_disk
        raise ConfigError(
            f"offload_states.delay=1 and {what}: compute would read parameters on the host while "
            "the update of the step before changes them. Use memory='states_host', whose copies "
            "stay on the device."
        )
    held = [one for one in (config.offload_states, config.offload_activations) if one.share]
    if config.cuda_graph and held:
        raise ConfigError(
            f"cuda_graph=True and {held[0].name}.share={held[0].share:g}: a CUDA graph replays "
            "what the GPU does, and not what the host does beside it: copies that wait for its "
            "updates, and comparisons with what somebody has written meanwhile. Leave out one."
        )
    if config.offload_states.update is Place.DEVICE and config.host_budget != NO_BUDGET:
        raise ConfigError(
            f"offload_states.update=device and host_budget={config.host_budget}: what is on disk "
            "is updated on the host, piece by piece. Leave out one of them."
        )


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
    their own ``step()``, nor with `stop_unless_finite`, which waits for the GPU, nor where
    something is held on the host (`memory`)."""
    memory_budget: Size = NO_BUDGET
    """The most memory that a rank's step may take at its peak, by simulation: ``8GiB``,
    ``512MiB``, a number of bytes, ``80%`` of the device, ``auto`` (what the device has for this
    rank, less a tenth), or ``none``. As much is repeated in backward as it takes, and no more."""
    memory: MemoryPreset = MemoryPreset.NONE
    """Where things are held: a name that fills in settings of passes that have their defaults; what
    is given otherwise stays. ``states_host`` is ``offload_states.share=1``, ``all_host`` that and
    ``offload_params.share=1``, ``infinity`` these and ``host_budget=least``, and ``l2l`` these with
    ``offload_params.in_flight=1``, ``recompute.policy=full``, ``bucket.min_bytes=0`` and
    ``prefetch.keep=False``, but for the disk. ``auto`` leaves all three shares to be decided
    within ``memory_budget=auto``."""
    host_budget: Size = NO_BUDGET
    """The most that a rank's step may hold in the host's memory of what `memory` moves there; the
    rest goes to disk (`disk.paths`), the buckets whose gradients come first before others. A size
    as for `memory_budget`, of the host; ``least`` for all of it on disk; ``none`` for no disk."""
    disk: DiskSettings = field(default_factory=DiskSettings)
    throttle: Throttle = field(default_factory=Throttle)
    plan: str = ""
    """A file of decisions to replay to the letter instead of deciding: see
    ``fxzero inspect --plan``."""
    dump: str = ""
    """A folder to write to, for each rank and graph, what every pass made of it, what was decided,
    simulated and measured: `fxzero inspect`, `report`, `explain`, `diff` and `trace` read it. The
    default is the environment's ``FXZERO_DUMP``."""
    cost: CostSettings = field(default_factory=CostSettings)
    lower_kernels: LowerKernels = field(default_factory=LowerKernels)
    recompute: Recompute = field(default_factory=Recompute)
    tile_linear: TileLinear = field(default_factory=TileLinear)
    order_micro_batches: OrderMicroBatches = field(default_factory=OrderMicroBatches)
    bucket: Bucket = field(default_factory=Bucket)
    prefetch: Prefetch = field(default_factory=Prefetch)
    offload_states: OffloadStates = field(default_factory=OffloadStates)
    offload_params: OffloadParams = field(default_factory=OffloadParams)
    offload_activations: OffloadActivations = field(default_factory=OffloadActivations)
    gather_ahead: GatherAhead = field(default_factory=GatherAhead)
    lower_regions: LowerRegions = field(default_factory=LowerRegions)
    slab: Slab = field(default_factory=Slab)

    def __post_init__(self) -> None:
        check_types(self, "options")
        MemoryBudget.parse(self.memory_budget)
        if self.host_budget != LEAST:
            MemoryBudget.parse(self.host_budget, "host_budget")
        if self.memory is MemoryPreset.NONE:
            check_shares(self)
        else:
            check_shares(self.filled)

    @staticmethod
    def from_options(options: Mapping[str, Any] | Config | None) -> Config:
        """Read ``options={...}``: ``{"prefetch": {"distance": 2}, "strict": True}``.

        Raises:
            ConfigError: an unknown key, or a value that a setting cannot take.
        """
        if isinstance(options, Config):
            return options
        return build(Config, {} if options is None else options, "options")

    @property
    def budget(self) -> MemoryBudget | None:
        """The bound on memory, if there is one."""
        return MemoryBudget.parse(self.filled.memory_budget)

    @property
    def filled(self) -> Config:
        """The same with what `memory` says in the place of defaults. Hydra gives those like any
        other value, so that nobody can tell who has asked for one."""
        changed: dict[str, Any] = {}
        for name, settings in PRESETS[self.memory].items():
            mine, default = getattr(self, name), getattr(_DEFAULTS, name)
            if not isinstance(settings, dict):
                changed[name] = settings if mine == default else mine
                continue
            left = [key for key in settings if getattr(mine, key) == getattr(default, key)]
            changed[name] = replace(mine, **{key: settings[key] for key in left})
        return replace(self, memory=MemoryPreset.NONE, **changed)

    @property
    def offloads(self) -> str:
        """What shall be held outside of the device, as somebody has asked for it; else empty."""
        preset = f" (memory={self.memory.value!r})" if self.memory is not MemoryPreset.NONE else ""
        for one in (self.filled.offload_states, self.filled.offload_activations):
            if one.share:
                return f"{one.name}.share={_shown(one.share)}{preset}"
        return ""

    @property
    def streams_states(self) -> bool:
        """Whether optimizer state is on the host, and its updates are on the device."""
        states = self.filled.offload_states
        return bool(states.share) and states.update is Place.DEVICE

    @property
    def holds_on_disk(self) -> bool:
        """Whether something may be held on disk."""
        filled = self.filled
        return filled.host_budget != NO_BUDGET and bool(filled.offload_states.share)

    @property
    def host_budget_bytes(self) -> int | None:
        """The bound on the host's memory; None if there is none, or all is to be on disk."""
        text = self.filled.host_budget
        budget = None if text == LEAST else MemoryBudget.parse(text, "host_budget")
        return None if budget is None else budget.bytes_of(self.cost.host_bytes)

    @property
    def fuses(self) -> bool:
        """Whether runs of compute become compiled regions."""
        return self.lower_regions.backend is RegionBackend.INDUCTOR


_DEFAULTS = Config()
