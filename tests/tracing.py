"""Step graphs of tiny models, for any number of ranks, without processes or memory.

`trace` stops the compiler before its first pass and returns the joint graph, so that a
test runs the passes that it is about and looks at what they did.
"""

from __future__ import annotations

import contextlib
import functools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh

import fxzero
from fxzero.capture.unfold_layers import unfold
from fxzero.compiler.compilation import Compilation, observers
from fxzero.compiler.config import Config
from fxzero.compiler.pipelines import loop_passes
from fxzero.compiler.run import PassRecord, run_passes
from fxzero.graph import Phase, Role, StepGraph
from fxzero.graph.cut import Sides, crossing, cut
from fxzero.graph.stamps import stamp_of
from fxzero.inspect.capture import fake_ranks
from fxzero.passes import (
    Context,
    Pass,
)
from fxzero.passes.release_saved import private_saved
from fxzero.sharding.params import GradSync, ModelState, grad_sync
from fxzero.sharding.shard import model_state, param_specs, replace_specs

BY_LAYER: dict[str, Any] = {"bucket": {"min_bytes": 0}, "prefetch": {"distance": 1}}
"""A bucket a layer, gathered one ahead: by cost, tiny layers would all travel together."""

Build = Callable[[], tuple[nn.Module, tuple[Any, ...]]]
"""Makes a model and the inputs of its forward; runs on fake tensors."""


class _Stopped(Exception):  # noqa: N818 - a way out, not an error
    """The joint graph was taken."""


@dataclass(frozen=True)
class Setup:
    """How a model is sharded, and for which rank of how many."""

    zero: int = 3
    world_size: int = 8
    rank: int = 0
    mesh_shape: tuple[int, ...] = ()
    """Two axes replicate and shard; the default is one axis of `world_size`."""
    sync: GradSync = GradSync.REDUCE
    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    training: bool = True
    leave_out: bool = False
    """Whether long chains of layers are without their middle."""
    offload: bool = False
    device: str = "cpu"
    """With `offload`, where the model computes. A build without CUDA can trace for ``meta``, which
    stands for a device with memory of its own."""


def trace(build: Build, **setup: Any) -> StepGraph:
    """The joint graph of one step, before any pass. Options are `Setup`'s fields."""
    return _trace(build, Setup(**setup)).clone()


@functools.cache
def _trace(build: Build, setup: Setup) -> StepGraph:
    """Tracing takes a third of a second, a copy of the graph a thousandth."""
    found: list[StepGraph] = []

    def take(compilation: Compilation) -> None:
        def schedule(graph: StepGraph) -> None:
            if not graph.specs:  # the cast of the inputs, before the model
                return Compilation.schedule(compilation, graph)
            unfold(graph, compilation.folds, leave_out=setup.leave_out)
            found.append(graph)
            raise _Stopped

        compilation.schedule = schedule  # type: ignore[method-assign]

    with fake_model(build, setup) as (model, inputs), observed(take):
        options = {"lower_regions": {"backend": "eager"}}
        compiled = torch.compile(model, backend="fxzero", options=options)
        with (
            contextlib.suppress(torch._dynamo.exc.BackendCompilerFailed),
            torch.set_grad_enabled(setup.training),
        ):
            compiled(*inputs)
    (graph,) = found
    return graph


@contextlib.contextmanager
def fake_model(build: Build, setup: Setup) -> Iterator[tuple[nn.Module, tuple[Any, ...]]]:
    """A sharded model of fake tensors on one of many fake ranks."""
    torch._dynamo.reset()
    shape = setup.mesh_shape or (setup.world_size,)
    with fake_ranks(math.prod(shape), setup.rank):
        mesh = init_device_mesh("cpu", shape)
        with FakeTensorMode():
            model, inputs = build()
            fxzero.shard(
                model,
                setup.zero,
                mesh=mesh,
                param_dtype=setup.param_dtype,
                reduce_dtype=setup.reduce_dtype,
                offload=setup.offload,
            )
            if setup.device != "cpu":
                device = torch.device(setup.device)
                specs = param_specs(model).items()
                replace_specs(model, {n: replace(spec, device=device) for n, spec in specs})
            state = model_state(model)
            assert isinstance(state, ModelState)
            with grad_sync(state, setup.sync):
                yield model, inputs
    torch._dynamo.reset()


@contextlib.contextmanager
def observed(observer: Callable[[Compilation], None]) -> Iterator[None]:
    """Call `observer` with each compilation that starts meanwhile."""
    observers.append(observer)
    try:
        yield
    finally:
        observers.remove(observer)


OUTLINED = loop_passes(
    Config.from_options({"bucket": {"min_bytes": 0}, "prefetch": {"distance": 1}})
).scheduling
"""The passes of the joint graph: tiny layers travel alone, gathers run one ahead."""
JOINT = tuple(one for one in OUTLINED if one.name != "outline")
"""The same on operators: what a test of one pass looks at is not behind a call."""


def up_to(name: str, *instead: Pass, passes: Sequence[Pass] = JOINT) -> list[Pass]:
    """Passes up to and including the pass `name`; `instead` replaces passes of equal name."""
    chosen = {p.name: p for p in instead}
    names = [p.name for p in passes]
    return [chosen.get(p.name, p) for p in passes[: names.index(name) + 1]]


def run(
    graph: StepGraph, passes: Sequence[Pass], context: Context | None = None
) -> list[PassRecord]:
    """Run passes, verified after each, and keep the graph's text."""
    return run_passes(passes, graph, context or Context(), keep_text=True)


def scheduled(build: Build, last: str, *instead: Pass, **setup: Any) -> StepGraph:
    """Trace a model and run the joint passes up to and including `last`."""
    graph = trace(build, **setup)
    run(graph, up_to(last, *instead))
    return graph


def record_of(build: Build, name: str, *instead: Pass, **setup: Any) -> PassRecord:
    """What the pass `name` did to a model's graph."""
    return run(trace(build, **setup), up_to(name, *instead))[-1]


def find(graph: StepGraph, target: Any, *, phase: Phase | None = None) -> list[fx.Node]:
    """The nodes that call `target`, in launch order."""
    return [n for n in graph.nodes(phase=phase) if n.target is target]


def of_role(graph: StepGraph, role: Role, *, phase: Phase | None = None) -> list[fx.Node]:
    """The nodes of a role, in launch order."""
    return list(graph.nodes(phase=phase, role=role))


def params_of(nodes: Sequence[fx.Node]) -> list[tuple[str, ...]]:
    """The names of the parameters that nodes move, without the models' numbers."""
    return [tuple(key.partition("/")[2] for key in stamp_of(node).params) for node in nodes]


def words(text: str) -> str:
    """A graph's text without what differs from run to run: models' numbers."""
    return re.sub(r"\b\d+/(?=[a-z])", "N/", text)


def sides(build: Build, *instead: Pass, **setup: Any) -> Sides:
    """Run the joint passes and cut."""
    graph = scheduled(build, "prefetch", *instead, **setup)
    values, _ = crossing(graph)
    outputs = [n for n in graph.output_values[: graph.num_forward_outputs] if n is not None]
    return cut(graph, private_saved(graph.graph, values, outputs))


class Chain(nn.Module):
    """`depth` bias-free linear layers, whose backward reads every weight."""

    def __init__(self, depth: int = 2, width: int = 8, relu: bool = True) -> None:
        super().__init__()
        self.relu = relu
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        """(B, width) → scalar."""
        for layer in self.layers:
            x = layer(x).relu() if self.relu else layer(x)
        return x.sum()


texts = pytest.mark.skipif(
    torch.__version__ < "2.13",
    reason="the expected texts are those that torch 2.13 traces; behaviour is tested on all",
)
"""Marks tests that compare whole graphs with their text."""


@functools.cache
def chain(depth: int = 2, width: int = 8, batch: int = 4, relu: bool = True) -> Build:
    """A `Chain` and an input that wants a gradient."""

    def build() -> tuple[nn.Module, tuple[Any, ...]]:
        return Chain(depth, width, relu), (torch.randn(batch, width, requires_grad=True),)

    return build


@functools.cache
def of(make: Callable[[], nn.Module], *shape: int, grad: bool = True) -> Build:
    """A model and a random input of a shape."""

    def build() -> tuple[nn.Module, tuple[Any, ...]]:
        return make(), (torch.randn(*shape, requires_grad=grad),)

    return build
