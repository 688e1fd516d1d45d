"""Settings of what leaves the device that cannot take effect beside the others."""

from __future__ import annotations

from collections.abc import Iterator

from fxzero.compiler.config import Config
from fxzero.compiler.memory_budget import NO_BUDGET
from fxzero.disk.scratch import DiskSettings
from fxzero.passes.offload_states import OffloadStates

_STATES = OffloadStates()


def without_effect(config: Config) -> Iterator[str]:
    """Say it of each, and what it waits for; errors under ``strict=True``."""
    filled = config.filled
    states, params, saved = filled.offload_states, filled.offload_params, filled.offload_activations
    if not states.share:
        for name in ("ahead", "update", "delay"):
            value = getattr(states, name)
            if value != getattr(_STATES, name):
                shown = getattr(value, "value", value)
                yield f"offload_states.{name}={shown} has no effect: no state is offloaded"
    if states.delay_after != _STATES.delay_after and not states.delay:
        yield (
            f"offload_states.delay_after={states.delay_after} has no effect: no update is late. "
            "Set offload_states.delay=1."
        )
    if params.in_flight is not None and not params.share:
        yield (
            f"offload_params.in_flight={params.in_flight} has no effect: offload_params.share is 0"
        )
    if filled.host_budget != NO_BUDGET and not states.share and not saved.share:
        yield (
            f"host_budget={config.host_budget!r} has no effect: nothing is held on the "
            "host. Choose what is by memory='states_host', say."
        )
    if config.disk != DiskSettings() and not config.holds_on_disk:
        yield (
            f"{config.disk} has no effect: nothing is held on disk. Bound what the host "
            "holds by host_budget, or use memory='infinity'."
        )
