"""The joint graph of a model's step as it was captured, before any pass has seen it.

    graph = joint_graph(build, zero=3, world_size=8)
    run_passes([StampNodes(), Recompute(), ShardParams()], graph, Context())

For whoever wants to run passes by hand, one after the other: `examples/tour.py` does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from fxzero.compiler.compilation import Compilation, observers
from fxzero.compiler.config import Config
from fxzero.errors import CaptureError
from fxzero.graph import StepGraph
from fxzero.inspect.capture import capture
from fxzero.passes import Context, Notes, Pass


@dataclass(frozen=True)
class _Keep(Pass):
    """Keep a copy of the graph as it comes."""

    name: ClassVar[str] = "keep"

    def run(self, graph: StepGraph, ctx: Context) -> Notes:
        """Passes that run afterwards change the graph, and not the copy."""
        ctx.scratch[self.name] = graph.clone()
        return Notes()


def joint_graph(
    build: Callable[[], Any],
    *,
    zero: int,
    world_size: int,
    rank: int = 0,
    batch_size: int | None = None,
) -> StepGraph:
    """Forward and backward of a model as one graph, for one of `world_size` ranks in name only.

    Operators are torch's own, as they are where regions are not compiled
    (``lower_regions.backend="eager"``).

    Args:
        build: returns a module, or a pair of a module and its inputs. It runs on fake tensors.
        batch_size: rows of this rank's batch, where `build` returned no inputs.

    Raises:
        CaptureError: the step is no single graph, or nothing in it can be trained.
        ConfigError: see `fxzero.inspect.capture`.
    """

    def observe(compilation: Compilation) -> None:
        pipelines = compilation.pipelines
        first = replace(pipelines, scheduling=(_Keep(), *pipelines.scheduling))
        compilation.take(first)

    observers.append(observe)
    try:
        captured = capture(
            build,
            zero=zero,
            world_size=world_size,
            rank=rank,
            batch_size=batch_size,
            options=Config.from_options({"lower_regions": {"backend": "eager"}}),
        )
    finally:
        observers.remove(observe)
    kept = [compilation.context.scratch.get(_Keep.name) for compilation in captured.compilations]
    if len(kept) != 1 or not isinstance(kept[0], StepGraph):
        raise CaptureError(
            f"the model's step is {len(kept)} graphs, of which none is the whole: its forward "
            "breaks where Dynamo cannot follow. TORCH_LOGS=graph_breaks says where; capture a part "
            "of the model that has no break."
        )
    return kept[0]
