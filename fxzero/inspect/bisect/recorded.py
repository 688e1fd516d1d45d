"""Compile a step with real values on one of some ranks that exist in name only, and keep each graph
on its way: before the first pass, and behind every one.

Nothing runs there: what a part is called with is recorded, and the graphs are run in lockstep.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fxzero import _compat
from fxzero._compat import hint, pytree, reset_dynamo
from fxzero.compiler.compilation import CAPTURED, WAS_CUT, Call, Compilation, observers
from fxzero.compiler.config import Config
from fxzero.compiler.dump_folder import only_looked_at
from fxzero.errors import FxZeroWarning
from fxzero.graph import StepGraph
from fxzero.inspect.capture import fake_ranks, scalar_of
from fxzero.inspect.optimizer import adamw
from fxzero.inspect.targets import Batch, Sizes, model_and_batch
from fxzero.sharding.precision import Precision
from fxzero.sharding.shard import shard
from fxzero.step.train_step import TrainStep

JOINT, FORWARD, BACKWARD, STEP = "joint", "forward", "backward", "step"


@dataclass(frozen=True)
class Case:
    """What is compiled, and how."""

    build: Callable[[], Any]
    sizes: Sizes
    zero: int = 3
    world_size: int = 2
    dtype: torch.dtype = torch.float64
    step: bool = False
    micro_batches: int = 1
    clip_grad_norm: float | None = None
    config: Config = field(default_factory=Config)
    seed: int = 0
    evaluates: bool = False
    """Whether the model is in eval mode, as it draws random numbers in training."""

    def model_and_batch(self, rank: int) -> tuple[nn.Module, Batch]:
        """The model, equal on all ranks, and a rank's batch: each has another one.

        Dropout draws nothing: two orders of drawing would be two results, and both right.
        """
        sizes = self.sizes
        if sizes.rows is None and self.micro_batches > 1:
            sizes = replace(sizes, rows=2 * self.micro_batches)
        torch.manual_seed(self.seed)
        model, _ = model_and_batch(self.build(), sizes)
        state = {name: value.clone() for name, value in model.state_dict().items()}
        torch.manual_seed(self.seed + 1 + rank)
        other, batch = model_and_batch(self.build(), sizes)
        other.load_state_dict(state)
        for tensor in (*other.parameters(), *other.buffers()):
            tensor.data = self._cast(tensor.data)
        for module in other.modules():
            if isinstance(module, (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)):
                module.p = 0.0
            elif isinstance(module, nn.MultiheadAttention):
                module.dropout = 0.0
        for parameter in other.parameters():
            # What begins with zeros or ones lets many a mistake through.
            is_number = parameter.dtype.is_floating_point or parameter.dtype.is_complex
            if is_number and parameter.numel() and _is_constant(parameter):
                generator = torch.Generator().manual_seed(self.seed)
                noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
                parameter.data.add_(0.1 * noise)
        return other.train(not self.evaluates and other.training), self.cast(batch)

    def cast(self, batch: Batch) -> Batch:
        """A batch whose floating-point tensors have the case's dtype."""

        def casts(value: Any) -> Any:
            return self._cast(value) if isinstance(value, Tensor) else value

        args, kwargs = pytree.tree_map(casts, (batch.args, dict(batch.kwargs)))
        return Batch(tuple(args), kwargs)

    def _cast(self, tensor: Tensor) -> Tensor:
        """In the case's dtype, or in the complex one of its precision."""
        if tensor.is_complex():
            return tensor.to(torch.complex128 if self.dtype == torch.float64 else torch.complex64)
        return tensor.to(self.dtype) if tensor.is_floating_point() else tensor


def _is_constant(tensor: Tensor) -> bool:
    """Whether all elements are one number."""
    return bool((tensor == tensor.flatten()[0]).all())


@dataclass(frozen=True)
class Snapshot:
    """A graph behind a pass, or as it was captured, or cut."""

    behind: str
    graph: StepGraph
    compilation: Compilation


@dataclass(eq=False)
class Recording:
    """One graph of a step on one rank."""

    compilation: Compilation
    snapshots: dict[str, list[Snapshot]] = field(default_factory=dict)
    """By part: ``joint``, then ``forward`` and ``backward``; of a whole step ``step`` alone."""
    inputs: dict[str, list[Any]] = field(default_factory=dict)
    """By part, what it was called with."""
    _by_graph: dict[int, tuple[StepGraph, list[Snapshot]]] = field(default_factory=dict)
    """By identity, which a graph keeps as long as it is held here."""

    def look(self, behind: str, graph: StepGraph) -> None:
        """Keep a graph; one that begins anew forgets what it was."""
        _, kept = self._by_graph.setdefault(id(graph), (graph, []))
        if behind == CAPTURED:
            kept.clear()
            self.snapshots[JOINT] = kept
        elif behind == WAS_CUT and kept:
            return  # the whole step goes on to be lowered
        kept.append(Snapshot(behind, graph.clone(), self.compilation))

    def around(self, part: str, graph: StepGraph, call: Call) -> Call:
        """Record what a part is called with. It does not run, as what is broken may end the
        process: it returns anything of the right shapes."""
        self.snapshots[part] = self._by_graph[id(graph)][1]
        outputs = graph.output_values
        values = [one.meta.get("val") if isinstance(one, fx.Node) else one for one in outputs]

        def recorded(inputs: list[Any]) -> Any:
            self.inputs.setdefault(part, [_copied(value) for value in inputs])
            inputs.clear()
            return [_anything_like(value) for value in values]

        recorded._boxed_call = True  # type: ignore[attr-defined]
        return recorded


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def _anything_like(value: Any) -> Any:
    """Something of an output's shape and dtype."""
    if not isinstance(value, Tensor):
        return hint(value) if isinstance(value, torch.SymInt) else value
    sizes = [hint(size) for size in value.shape]
    if value.dtype.is_floating_point:
        return torch.randn(sizes, dtype=torch.float64).to(value.dtype)
    return torch.zeros(sizes, dtype=value.dtype)


@contextlib.contextmanager
def _recording() -> Iterator[list[Recording]]:
    found: list[Recording] = []

    def observe(compilation: Compilation) -> None:
        recording = Recording(compilation)
        compilation.every_layer = True
        compilation.look, compilation.around = recording.look, recording.around
        found.append(recording)

    observers.append(observe)
    before = os.environ.get("FXZERO_VERIFY")
    os.environ["FXZERO_VERIFY"] = "each"  # what the verifier finds is blamed on one pass, too
    try:
        yield found
    finally:
        observers.remove(observe)
        if before is None:
            del os.environ["FXZERO_VERIFY"]
        else:
            os.environ["FXZERO_VERIFY"] = before


@_compat.with_room_for_frames
def record(case: Case, rank: int) -> list[Recording]:
    """Compile the case on a rank, and run it once; a recording for each graph.

    Raises:
        VerificationError: a pass broke a rule.
    """
    reset_dynamo()
    with (
        fake_ranks(case.world_size, rank),
        only_looked_at(),
        _recording() as found,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore", FxZeroWarning)
        one_step(case, case.config, rank)()
    reset_dynamo()
    return [recording for recording in found if recording.inputs]


def one_step(case: Case, config: Config, rank: int | None = None) -> Callable[[], Any]:
    """A step of the case in the world that there is: of the loop forward and backward.

    Args:
        rank: whose batch it reads; the default is this process's.
    """
    if rank is None:
        rank = dist.get_rank() if dist.is_initialized() else 0
    model, batch = case.model_and_batch(rank)
    shard(model, case.zero, mesh=_mesh())
    if case.step:
        trained = [p for p in model.parameters() if p.requires_grad]
        step = TrainStep(
            model,
            adamw(trained, lr=LR),
            None,
            micro_batches=case.micro_batches,
            clip_grad_norm=case.clip_grad_norm,
            precision=Precision(),
            scheduler=None,
            config=config,
            find_loss=scalar_of,
            runs=True,
        )
        return lambda: step(*batch.args, **batch.kwargs)
    options = {field.name: getattr(config, field.name) for field in fields(config)}
    compiled = torch.compile(model, backend="fxzero", options=options)

    def loop() -> None:
        scalar_of(compiled(*batch.args, **batch.kwargs)).backward()
        model.zero_grad()

    return loop


def _mesh() -> DeviceMesh | None:
    if not dist.is_initialized():
        return None
    return init_device_mesh("cpu", (dist.get_world_size(),))


LR = 1e-2
"""Large enough that a step moves every parameter visibly."""
