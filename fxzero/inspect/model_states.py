"""Model states: parameters, gradients and optimizer state, which ZeRO shares out.

Of P parameters on N ranks, in bytes, mixed precision with AdamW (Rajbhandari et al. 2020, section
5; masters and moments in float32, 2 bytes in what is computed with):

    stage   as the paper counts     here
    0       16 P                    16 P without a compute dtype of its own, 18 P with one
    1       4 P + 12 P/N            4 P + 12 P/N
    2       2 P + 14 P/N            2 P + 16 P/N: reduced gradients have the master's dtype
    3       16 P/N                  16 P/N: what is gathered is no state, and gone again
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from fxzero.graph import StepGraph
from fxzero.sharding.params import ParamSpec

MOMENTS = 2
"""Of Adam: as many tensors of a parameter's shape."""


@dataclass(frozen=True)
class ModelStates:
    """What one rank holds from step to step, and while gradients wait for the update."""

    parameter_bytes: int = 0
    """Masters, and at stages below 3 what the model computes with."""
    gradient_bytes: int = 0
    optimizer_bytes: int = 0

    @property
    def num_bytes(self) -> int:
        """All of them."""
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes

    def __add__(self, other: ModelStates) -> ModelStates:
        return ModelStates(
            self.parameter_bytes + other.parameter_bytes,
            self.gradient_bytes + other.gradient_bytes,
            self.optimizer_bytes + other.optimizer_bytes,
        )

    @staticmethod
    def of(graphs: Iterable[StepGraph], trained: frozenset[str]) -> ModelStates:
        """Of the parameters of some graphs, each counted once, with AdamW.

        Args:
            trained: the names of those that are trained.
        """
        return sum(ModelStates.by_parameter(graphs, trained).values(), ModelStates())

    @staticmethod
    def by_parameter(
        graphs: Iterable[StepGraph], trained: frozenset[str]
    ) -> dict[str, ModelStates]:
        """The same of each parameter, by name."""
        graphs = list(graphs)
        specs = {key: spec for graph in graphs for key, spec in graph.specs.items()}
        whole = (s for s in specs.values() if s.block is None or s.block.owner not in specs)
        here = [spec for spec in whole if spec.is_here]  # blocks are parts of what is there
        found = {spec.name: _states(spec, spec.name in trained) for spec in here}
        for spec in (spec for graph in graphs for spec in graph.unread if spec.is_here):
            # No gradient comes, and nothing is made of it that would be computed with.
            part_bytes = math.prod(spec.local_shape) * spec.dtype.itemsize
            found.setdefault(spec.name, ModelStates(part_bytes))
        return found


def _states(spec: ParamSpec, trained: bool) -> ModelStates:
    """Of one parameter."""
    part_bytes = math.prod(spec.local_shape) * spec.dtype.itemsize
    full_bytes = spec.num_elements * spec.compute_dtype.itemsize
    is_shared = spec.shard_group is not None
    casts = spec.compute_dtype != spec.dtype
    computed = full_bytes if spec.zero < 3 and (is_shared or casts) else 0
    reduced_late = spec.zero == 1 or (spec.zero == 0 and casts)
    gradient = full_bytes if reduced_late else part_bytes
    return ModelStates(part_bytes + computed, gradient * trained, MOMENTS * part_bytes * trained)
