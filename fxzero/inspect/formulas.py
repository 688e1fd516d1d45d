"""Memory from a number of parameters alone: the ZeRO paper's table, and DeepSpeed's estimators.

Both count model states only; DeepSpeed's multiply what is on the host by a margin. What they leave
out (activations, what is gathered, temporaries, time) is what an estimate of a model has beside.
"""

from __future__ import annotations

from dataclasses import dataclass

HOST_MARGIN = 1.5
"""DeepSpeed's ``additional_buffer_factor``."""


def paper_bytes(zero: int, num_parameters: float, num_ranks: int) -> float:
    """Bytes of model states per rank, in mixed precision with Adam.

    Rajbhandari et al. 2020, section 5.4: 16 P; 4 P + 12 P/N; 2 P + 14 P/N; 16 P/N.
    """
    whole, shared = {0: (16, 0), 1: (4, 12), 2: (2, 14), 3: (0, 16)}[zero]
    return num_parameters * (whole + shared / num_ranks)


@dataclass(frozen=True)
class DeepSpeedRow:
    """What one of DeepSpeed's settings is estimated to need."""

    zero: int
    offload_optimizer: bool
    offload_params: bool
    zero_init: bool | None
    """Whether no process ever makes the whole model; None at stage 2, which makes it."""
    device_bytes: float
    """Of each device."""
    host_bytes: float
    """Of each node."""


def deepspeed_rows(
    num_parameters: float, largest_layer: float, devices_per_node: int, num_nodes: int
) -> list[DeepSpeedRow]:
    """What DeepSpeed's ``estimate_zero2_model_states_mem_needs`` and ``…zero3…`` say.

    Args:
        num_parameters: of the model.
        largest_layer: parameters of its largest layer, which ZeRO-3 gathers whole.
        devices_per_node: ranks on each node.
        num_nodes: nodes.
    """
    p, n, ranks = num_parameters, devices_per_node, devices_per_node * num_nodes
    margin = HOST_MARGIN
    rows = [
        DeepSpeedRow(2, True, False, None, 2 * p, p * max(4 * ranks, 16) * margin),
        DeepSpeedRow(2, False, False, None, 2 * p + 18 * p / ranks, 4 * p * n * margin),
    ]
    for zero_init in (True, False):
        # Without it each process of a node first has all parameters in the host's memory.
        least = 0.0 if zero_init else 4 * p * n
        both, states = max(18 * p / num_nodes, least), max(16 * p / num_nodes, least)
        none = 4 * largest_layer * n if zero_init else 4 * p * n
        gathered = 4 * largest_layer
        rows += [
            DeepSpeedRow(3, True, True, zero_init, gathered, both * margin),
            DeepSpeedRow(3, True, False, zero_init, gathered + 2 * p / ranks, states * margin),
            DeepSpeedRow(3, False, False, zero_init, gathered + 18 * p / ranks, none * margin),
        ]
    return rows
