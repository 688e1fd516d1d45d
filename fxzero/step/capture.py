"""From Dynamo's graph of the loss to a scheduled step, optimizer included.

    Dynamo graph → AOTAutograd's joint graph → passes → executable

The joint graph is never cut: nothing is saved from a forward for a backward, so nothing
outlives its last use. What runs is a function of Dynamo's inputs and of the optimizer.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxzero import _compat
from fxzero.capture.fold_layers import Folds, trace_folded
from fxzero.capture.mark_inputs import use_markers
from fxzero.capture.shard_inputs import take_local_tensors
from fxzero.compiler.compilation import Compilation, decompositions_of
from fxzero.compiler.config import Config
from fxzero.compiler.pipelines import step_passes
from fxzero.errors import CaptureError, ConfigError
from fxzero.graph import StepGraph
from fxzero.graph.node_text import source_line
from fxzero.graph.steady import UNROLLED, NotSteadyError
from fxzero.graph.writes import refuse_writes
from fxzero.passes.base import Context
from fxzero.runtime.cuda_graph import CudaGraphStep
from fxzero.runtime.optimizers import OptimizerLayout, create_state
from fxzero.sharding.host import HOST
from fxzero.sharding.params import ParamSpec
from fxzero.step.binding import Binder

log = logging.getLogger("fxzero")


class SeveralGraphsError(CaptureError):
    """A step that one graph cannot hold, and several can."""


@_compat.with_room_for_frames
def compile_graph(
    module: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    config: Config,
    layout: OptimizerLayout,
    specs: Mapping[int, ParamSpec],
    static: Collection[int],
    micro_batches: int,
    clip_grad_norm: float | None,
    scaled: bool,
) -> tuple[Binder, Callable[[list[Any]], Any]]:
    """Compile the step whose loss Dynamo's graph computes.

    Args:
        specs: the model's parameters by identity.
        static: identities of the model's parameters and buffers.

    Returns:
        What makes a list of inputs for one run, and what runs: it returns the loss, the
        gradients' norm and whether the step was skipped, None where they are not wanted.

    Raises:
        CaptureError: the graph computes no scalar, or more than a loss.
    """
    check_scalar_loss(module)
    refuse_computed_inputs(example_inputs, specs)
    plain = {
        position: specs[id(value)]
        for position, value in enumerate(example_inputs)
        if isinstance(value, nn.Parameter) and value.requires_grad and id(value) in specs
    }
    decompositions = decompositions_of(config)
    context = Context(optimizer=layout, decompositions=decompositions, replays=config.cuda_graph)
    pipelined = any(spec.stages for spec in specs.values())
    if pipelined:
        refuse_checkpoints(module)
    pipelines = partial(
        step_passes, config, micro_batches, clip_grad_norm, scaled=scaled, pipelined=pipelined
    )
    unroll = "each micro-step has its own place in the schedule" if pipelined else ""
    compilation = Compilation(config, pipelines(unroll=unroll), plain=plain, context=context)
    compilation.every_layer |= pipelined
    with _compat.collecting_only_new_objects():
        refuse_writes(module, example_inputs)
        use_markers(module, example_inputs)
        inputs, _ = take_local_tensors(module, example_inputs)

        def trace(folds: Folds) -> StepGraph:
            compilation.folds = folds
            return compilation.read(*_compat.capture_joint(module, inputs, decompositions))

        graph = trace_folded(module, decompositions, trace)
        find_loss(graph)
        drop_unwanted(graph, layout)
        refuse_sparse(graph)
        create_state(
            layout,
            set(graph.gradients.values()),
            will_move=config.holds_on_disk,
            home=HOST if config.streams_states else None,
        )
        why_not = no_cuda_graph(graph, layout, config) if config.cuda_graph else ""
        if why_not:
            compilation.context.warnings.append(f"cuda_graph has no effect: {why_not}")
        if scaled and config.stop_unless_finite:
            compilation.context.warnings.append(
                "stop_unless_finite has no effect in fp16, where such a step is skipped"
            )
        spare = graph.clone() if micro_batches > UNROLLED and not pipelined else None
        try:
            compilation.schedule(graph)
            call = compilation.lower_whole(graph)
        except NotSteadyError as error:
            planned = compilation.context.decisions.replayed & _OF_MICRO_STEPS
            if planned:
                raise ConfigError(
                    f"plan={config.plan!r}: its graph holds {UNROLLED} micro-steps, of which the "
                    f"fourth stands for others, and {error}. Order every micro-step alike, or set "
                    f"accumulate.micro_steps={micro_batches} and drop what was decided after it. "
                    f"Without {', '.join(sorted(planned))} in the plan, that is done by itself."
                ) from None
            log.warning("compiling %d micro-batches one by one: %s", micro_batches, error)
            assert spare is not None
            graph, why = spare, str(error)
            compilation.start_again(pipelines(unroll=why))
            compilation.schedule(graph)
            call = compilation.lower_whole(graph)
        binder = Binder(graph, layout, micro_batches)
        if config.cuda_graph and not why_not:
            batch = {i for i, value in enumerate(example_inputs) if id(value) not in static}
            call = CudaGraphStep(call, binder.copied(batch), [i for i, _ in binder.groups])
    _compat.return_free_memory()
    return binder, call


def refuse_checkpoints(module: fx.GraphModule) -> None:
    """A checkpoint of the model's own hides its parameters, which a stage has to see.

    Raises:
        CaptureError: there is one.
    """
    for node in module.graph.nodes:
        if _compat.is_higher_order(node) and "checkpoint" in str(node.target):
            raise CaptureError(
                f"the forward runs {node.target} ({source_line(node) or node.name}), and stages of "
                f"a pipeline are cut out of one flat graph. {WITHOUT_CHECKPOINTS}"
            )


WITHOUT_CHECKPOINTS = (
    "Drop torch.utils.checkpoint, and gradient_checkpointing_enable(), and let the compiler repeat "
    "what they would: options={'recompute': {'policy': 'full'}}."
)

_OF_MICRO_STEPS = frozenset({"accumulate", "bucket", "prefetch"})
"""Passes whose decisions are for as many micro-steps as the graph holds."""


def refuse_computed_inputs(inputs: Sequence[Any], specs: Mapping[int, ParamSpec]) -> None:
    """A step computes gradients of parameters, not of what was computed from them before.

    Raises:
        CaptureError: the forward reads a tensor that requires a gradient and is no parameter.
    """
    for value in inputs:
        if not isinstance(value, Tensor) or isinstance(value, nn.Parameter):
            continue
        if value.requires_grad and id(value) not in specs:
            raise CaptureError(
                f"the forward reads a tensor of shape {list(value.shape)} that requires a gradient "
                "and is no parameter: something computed from one, and kept, such as weight.t() "
                "in a constructor. Compute it in the forward."
            )


def no_cuda_graph(graph: StepGraph, layout: OptimizerLayout, config: Config) -> str:
    """Why a step cannot be replayed as a CUDA graph; empty if it can."""
    values = [n.meta.get("val") for n in graph.graph.find_nodes(op="placeholder")]
    devices = {v.device.type for v in values if isinstance(v, Tensor) and v.dim()}
    if devices != {"cuda"}:
        return f"the step has tensors on {', '.join(sorted(devices))}"
    if not layout.kernels:
        return f"{layout.name} runs its own step(); pass fused=True if it has a fused kernel"
    if config.stop_unless_finite:
        return "stop_unless_finite waits for the GPU in every step"
    if any(p.dtype == torch.float64 for p in layout.parameters.values()):
        # Learning rates are read from the device, by kernels that take them as float32.
        return "parameters in float64 would be updated by learning rates in float32"
    return ""


def check_scalar_loss(module: fx.GraphModule) -> None:
    """See that a graph of Dynamo's returns a scalar to minimise, and nothing else."""
    (values,) = next(iter(reversed(module.graph.nodes))).args
    found = [n.meta.get("example_value") for n in values if isinstance(n, fx.Node)]
    if not found:
        raise CaptureError(
            "the loss is no tensor that the graph computes. Return a scalar tensor, or pass "
            "loss_fn(output, target) to compile_step."
        )
    if len(found) != 1:
        raise SeveralGraphsError(
            f"the step computes {len(found)} tensors that outlive it; one graph returns one loss. "
            "Does the model return several, or bind a tensor to an attribute (self.x = …, or "
            "self.x += … on a buffer)? Write into buffers in place: self.x.add_(…)."
        )
    (loss,) = found
    shape = list(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
    if not isinstance(loss, Tensor) or loss.dim() > 0:
        raise CaptureError(
            f"the loss must be a scalar tensor, found one of shape {shape}. Reduce it, or pass "
            "loss_fn(output, target) to compile_step."
        )
    if not loss.requires_grad:
        raise CaptureError(
            "the loss depends on no parameter that requires a gradient. Was it computed under "
            "no_grad, or detached?"
        )


def find_loss(graph: StepGraph) -> None:
    """Find the loss among the joint graph's outputs.

    Raises:
        CaptureError: the forward changes something other than a buffer.
    """
    descriptions = graph.output.meta.get("desc") or ()
    losses = [i for i, d in enumerate(descriptions) if _compat.is_output(d)]
    forward = graph.output_values[: graph.num_forward_outputs]
    meshes = sum(isinstance(n, fx.Node) and n.op == "placeholder" and is_opaque(n) for n in forward)
    others = graph.num_forward_outputs - len(graph.changed) - meshes
    if len(losses) != 1 or others != 1:
        raise SeveralGraphsError(
            "the forward returns or changes tensors in a way that one step graph cannot hold: "
            f"{[type(d).__name__ for d in descriptions[: graph.num_forward_outputs]]}. Use the "
            "ordinary loop with torch.compile(model, backend='fxzero')."
        )
    refuse_changed_parameters(graph)
    graph.loss = losses[0]
    graph.graph.set_codegen(fx.graph.CodeGen())  # inputs one by one, not primals and tangents
    for node in graph.graph.nodes:
        if node.op == "call_function" and node.target is not None and _writes_input(node):
            raise CaptureError(
                f"the forward changes its input {node.args[0]} in place ({node.target}). Use the "
                "ordinary loop with torch.compile(model, backend='fxzero')."
            )


def refuse_changed_parameters(graph: StepGraph) -> None:
    """See that no parameter changes but by its update, which reads it as it was before the step.

    Raises:
        CaptureError: the forward changes one that has a gradient.
    """
    trained = set(graph.gradients.values())
    for position, source in graph.changed.items():
        key = graph.inputs.get(source)
        if key not in trained:
            continue
        value = graph.output_values[position]
        line = source_line(value) if isinstance(value, fx.Node) else ""
        raise CaptureError(
            f"the forward changes the parameter {graph.specs[key].name} in place"
            f"{f' at {line}' if line else ''}, as nn.Embedding(max_norm=…) does; in one step graph "
            "only the optimizer changes what it updates. Use the ordinary loop with "
            "torch.compile(model, backend='fxzero'), or renormalise between two steps, under "
            "torch.no_grad(): embedding.weight.renorm_(2, 0, max_norm)."
        )


def is_opaque(node: fx.Node) -> bool:
    """Whether a node is no tensor: a DTensor that the forward changes also returns its mesh."""
    return _compat.is_script_object(node.meta.get("val"))


def drop_unwanted(graph: StepGraph, layout: OptimizerLayout) -> None:
    """Compute no gradient of a parameter that the optimizer does not have."""
    values = list(graph.output_values)
    unwanted = {p: k for p, k in graph.gradients.items() if k not in layout.parameters}
    if not unwanted:
        return
    names = ", ".join(graph.specs[key].name for key in unwanted.values())
    log.warning("compile_step computes no gradient of %s: not in the optimizer", names)
    for position in unwanted:
        values[position] = None
        del graph.gradients[position]
    graph.set_output_values(values)
    graph.graph.eliminate_dead_code()


def refuse_sparse(graph: StepGraph) -> None:
    """Gradients are dense here.

    Raises:
        CaptureError: one is not.
    """
    for position, key in graph.gradients.items():
        value = graph.output_values[position].meta["val"]
        if value.layout is not torch.strided:
            raise CaptureError(
                f"the gradient of {graph.specs[key].name} is sparse ({value.layout}). Use "
                "nn.Embedding(sparse=False)."
            )


def _writes_input(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    if schema is None or not schema.is_mutable:
        return False
    return any(source.op == "placeholder" for source in node.all_input_nodes)
