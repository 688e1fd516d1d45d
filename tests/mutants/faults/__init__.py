"""The faults, and what catches each of them.

A fault is a few characters of the source. Chosen are those that would train something else in
silence, lose a gradient, hang, read freed memory, or say of a step what is not so.
"""

from __future__ import annotations

from tests.mutants.fault import Fault
from tests.mutants.faults import (
    blocks,
    commands,
    costs,
    disk,
    equal_layers,
    gathers,
    identity,
    memory_and_ranks,
    micro_steps,
    offload,
    reduces,
    stages,
    streams,
    updates,
)

FAULTS: tuple[Fault, ...] = (
    *gathers.FAULTS,
    *reduces.FAULTS,
    *blocks.FAULTS,
    *micro_steps.FAULTS,
    *updates.FAULTS,
    *identity.FAULTS,
    *memory_and_ranks.FAULTS,
    *equal_layers.FAULTS,
    *offload.FAULTS,
    *stages.FAULTS,
    *streams.FAULTS,
    *disk.FAULTS,
    *costs.FAULTS,
    *commands.FAULTS,
)
