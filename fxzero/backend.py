"""``torch.compile(model, backend="fxzero")``: from Dynamo's graph to a scheduled executable.

    Dynamo graph → AOTAutograd's joint graph → passes → cut → passes per side → executable

Dynamo finds `fxzero` through the ``torch_dynamo_backends`` entry point. A model that
`fxzero.shard` has not seen is stage 0: its parameters' gradients are all-reduced.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.distributed.tensor import DTensor

from fxzero import _compat
from fxzero.capture.fold_layers import Folds, trace_folded
from fxzero.capture.mark_inputs import use_markers
from fxzero.capture.shard_inputs import take_local_tensors, with_parameters
from fxzero.compiler.compilation import Compilation, decompositions_of
from fxzero.compiler.config import Config
from fxzero.compiler.pipelines import loop_passes
from fxzero.errors import CaptureError, ConfigError, FxZeroError
from fxzero.graph.writes import refuse_writes
from fxzero.passes.base import Context
from fxzero.passes.lower_kernels import UPDATE
from fxzero.sharding.buffers import sync_buffers
from fxzero.sharding.full_parameter import returned_copy
from fxzero.sharding.params import (
    ModelState,
)
from fxzero.sharding.plain import plain_parameters
from fxzero.sharding.sharded_value import ShardedValue, as_dtensors


@_compat.with_room_for_frames
def fxzero(
    module: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | Config | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """Compile one of Dynamo's graphs.

    Args:
        options: settings of `fxzero.Config`.
        mode: torch.compile's modes belong to Inductor; only ``"default"`` has a meaning here.

    Raises:
        ConfigError: an unknown option, or a mode.
    """
    try:
        if mode not in (None, "default"):
            raise ConfigError(
                f"mode={mode!r} belongs to backend='inductor'. Drop it, and pass "
                "options={'lower_regions': {'backend': 'inductor'}} for fused regions."
            )
        config = Config.from_options(options)
        context = Context(decompositions=decompositions_of(config))
        context.warnings += [
            f"{name} has no effect under torch.compile, where the loop updates parameters. Use "
            "fxzero.compile_step."
            for name in ("stop_unless_finite", "cuda_graph")
            if getattr(config, name)
        ]
        if UPDATE in config.lower_kernels.force:
            context.warnings.append(
                f"lower_kernels.force={config.lower_kernels.force!r}: {UPDATE} has no effect under "
                "torch.compile, where the loop updates parameters. Use fxzero.compile_step."
            )
        compilation = Compilation(
            config,
            loop_passes(config),
            plain=plain_parameters(module, example_inputs),
            context=context,
        )
        refuse_backward(module)
        _compat.collect_only_new_objects_in_dynamo()
        with _compat.collecting_only_new_objects():
            copies = refuse_writes(module, example_inputs)
            use_markers(module, example_inputs)
            inputs, local = take_local_tensors(module, example_inputs)
            distributed = [i for i, value in enumerate(inputs) if isinstance(value, DTensor)]
            for i in distributed:
                if type(inputs[i]) is ShardedValue:
                    inputs[i].__class__ = DTensor
            if any(isinstance(value, DTensor) for value in example_inputs):
                _compat.let_anomaly_mode_read_dtensors()
            decompositions = context.decompositions

            def trace(folds: Folds) -> Callable[..., Any]:
                compilation.folds = folds
                return _compat.aot_compile(
                    module,
                    inputs,
                    forward=compilation.lower_side,
                    backward=compilation.lower_side,
                    inference=compilation.infer,
                    partition=compilation.partition,
                    decompositions=decompositions,
                )

            compiled = trace_folded(module, decompositions, trace)
            call = as_dtensors(with_parameters(compiled, local), distributed)
            call = with_copies(call, copies)
            return with_buffers(call, compilation.states())
    except FxZeroError as error:
        raise _compat.passing_through_dynamo(error) from None


def refuse_backward(module: fx.GraphModule) -> None:
    """A backward belongs below the compiled function, where its gradients are scheduled.

    Raises:
        CaptureError: Dynamo's graph holds one.
    """
    reduces = (torch.ops.fxzero.reshard_grad, torch.ops.fxzero.reshard_grad.default)
    if any(node.target in reduces for node in module.graph.nodes):
        raise CaptureError(
            "the compiled function calls backward() itself, so that Dynamo has traced it. Compile "
            "the model and call loss.backward() outside, or make the whole step one graph with "
            "fxzero.compile_step."
        )


def with_copies(compiled: Callable[..., Any], copies: Mapping[int, str]) -> Callable[..., Any]:
    """A graph whose outputs at some positions are gathered copies, which nobody may write to."""
    if not copies:
        return compiled

    def call(*inputs: Any) -> Any:
        outputs = compiled(*inputs)
        for position, name in copies.items():
            returned_copy(outputs[position], name)
        return outputs

    return call


def with_buffers(compiled: Callable[..., Any], states: Sequence[ModelState]) -> Callable[..., Any]:
    """A graph after whose run the buffers that it has changed are rank 0's on every rank."""
    if not any(state.buffers for state in states):
        return compiled

    def call(*inputs: Any) -> Any:
        outputs = compiled(*inputs)
        for state in states:
            sync_buffers(state)
        return outputs

    return call
