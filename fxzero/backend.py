"""``torch.compile(model, backend="fxzero")``: from Dynamo's graph to a scheduled executable.

    Dynamo graph → AOTAutograd's joint graph → passes → cut → passes per side → executable

Dynamo finds `fxzero` through the ``torch_dynamo_backends`` entry point. A model that
`fxzero.shard` has not seen is stage 0: its parameters' gradients are all-reduced.
"""

from __future__ import annotations

import itertools
import logging
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch.distributed.tensor import DTensor

from fxzero import _compat
from fxzero.capture.fold_layers import Folds, trace_folded, unfold
from fxzero.capture.mark_inputs import use_markers
from fxzero.capture.shard_inputs import take_local_tensors, with_parameters
from fxzero.compiler.config import Config
from fxzero.compiler.plan import Plan
from fxzero.compiler.run import PassRecord, run_passes
from fxzero.errors import CaptureError, ConfigError, FxZeroError, FxZeroWarning
from fxzero.graph import StepGraph
from fxzero.graph.cut import Sides, cut
from fxzero.graph.writes import refuse_writes
from fxzero.passes.base import Context, Fact, Pass
from fxzero.passes.decisions import Decisions
from fxzero.passes.lower_regions import RegionBackend
from fxzero.passes.release_saved import private_saved
from fxzero.passes.shard_params import shard_source
from fxzero.ranks import watch
from fxzero.ranks.groups import Group, init_distributed
from fxzero.runtime.executor import executable
from fxzero.sharding.before_step import watch_optimizers
from fxzero.sharding.buffers import sync_buffers
from fxzero.sharding.full_parameter import returned_copy
from fxzero.sharding.gradients import reduce_what_arrives
from fxzero.sharding.layout import Layout
from fxzero.sharding.params import (
    ModelState,
    ParamSpec,
    is_known,
    plain_spec_of,
    register,
    remember_plain,
    spec_of,
)
from fxzero.sharding.replicas import check_equal
from fxzero.sharding.sharded_value import ShardedValue, as_dtensors
from fxzero.sharding.whereabouts import outermost_module

log = logging.getLogger("fxzero")

_UNSHARD = torch.ops.fxzero.unshard.default


@dataclass
class Compilation:
    """One graph on its way through the compiler, and what was noted on the way."""

    config: Config
    plain: dict[int, ParamSpec]
    """Parameters of a model that was not sharded, by position among the graph's inputs."""
    context: Context = field(default_factory=Context)
    records: list[PassRecord] = field(default_factory=list)
    folds: Folds = field(default_factory=Folds)
    """The equal layers that AOTAutograd traces once."""
    specs: dict[str, ParamSpec] = field(default_factory=dict)
    """The parameters in the graph, by key."""
    keep_graphs: bool = False
    """Keep the graphs below for somebody to look at; they are large."""
    joint: StepGraph | None = None
    """The scheduled graph of the whole step."""
    gradients: dict[int, str] = field(default_factory=dict)
    """The parameter whose gradient an output of backward is, by its position."""
    sides: list[StepGraph] = field(default_factory=list)
    """What was lowered: forward and backward, or a forward alone."""

    def partition(
        self, module: fx.GraphModule, inputs: Sequence[Any], *, num_fwd_outputs: int, **_: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """AOTAutograd's partitioner: run the joint passes and cut."""
        graph = self.read(module, num_fwd_outputs)
        self.schedule(graph)
        sides = self.cut(graph)
        return sides.forward.module, sides.backward.module

    def read(self, module: fx.GraphModule, num_forward_outputs: int) -> StepGraph:
        """Find out which inputs and outputs belong to which parameter."""
        unfold(module, self.folds)
        specs: dict[str, ParamSpec] = {}
        inputs: dict[fx.Node, str] = {}
        by_index: dict[int, str] = {}
        for marker in module.graph.find_nodes(op="call_function", target=_UNSHARD):
            spec = spec_of(marker.args[1])
            source = shard_source(marker.args[0])
            specs[spec.key] = spec
            inputs[source] = spec.key
            index = _compat.input_index(source)
            if index is not None:
                by_index[index] = spec.key
        for node in module.graph.find_nodes(op="placeholder"):
            index = _compat.input_index(node)
            # Not a DTensor's mesh, which comes from the same input as its local tensor.
            if index in self.plain and _is_tensor_node(node) and node not in inputs:
                spec = self.plain[index]
                specs[spec.key] = spec
                inputs[node] = spec.key
                by_index[index] = spec.key
        output = next(iter(reversed(module.graph.nodes)))
        descriptions = output.meta.get("desc") or ()
        gradients = {}
        for position, description in enumerate(descriptions):
            index = _compat.gradient_index(description)
            if index in by_index and _is_tensor_node(output.args[0][position]):
                gradients[position] = by_index[index]
        by_input = {
            _compat.input_index(node): node
            for node in module.graph.find_nodes(op="placeholder")
            if _is_tensor_node(node)
        }
        changed = {
            position: by_input[index]
            for position, description in enumerate(descriptions)
            if (index := _compat.mutated_index(description)) is not None
            and index in by_input
            and _is_tensor_node(output.args[0][position])
        }
        return StepGraph(
            module,
            num_forward_outputs=num_forward_outputs,
            specs=specs,
            inputs=inputs,
            gradients=gradients,
            changed=changed,
        )

    def schedule(self, graph: StepGraph) -> None:
        """Run the passes of the whole step."""
        self.specs = graph.specs
        if self.keep_graphs:
            self.joint = graph
        self.choose_costs(graph)
        self.run(graph, self.config.joint_passes())

    def __post_init__(self) -> None:
        if self.config.plan:
            self.context.decisions.plan = Plan.read(self.config.plan)

    def start_again(self) -> None:
        """Forget what was decided and noted: another graph of the same step comes."""
        self.records.clear()
        decisions = self.context.decisions
        self.context.decisions = Decisions(decisions.plan, decisions.keep_digest)
        self.context.scratch.clear()

    def choose_costs(self, graph: StepGraph) -> None:
        """Find out what things take, by the settings."""
        fuses = self.config.lower_regions.backend is RegionBackend.INDUCTOR
        self.context.fuses = fuses
        self.context.costs = self.config.cost.make(graph, fuses=fuses)

    def run(self, graph: StepGraph, passes: Sequence[Pass], given: Iterable[Fact] = ()) -> None:
        """Run passes, and keep what they say."""
        self.records += run_passes(
            passes,
            graph,
            self.context,
            given=given,
            keep_text=self.config.keep_text,
            observe=log_record,
        )
        self.warn()

    def cut(self, graph: StepGraph) -> Sides:
        """Split the scheduled graph; backward may free what only it can see."""
        from fxzero.graph.cut import crossing

        values, _ = crossing(graph)
        forward_outputs = [
            n for n in graph.output_values[: graph.num_forward_outputs] if isinstance(n, fx.Node)
        ]
        count = graph.num_forward_outputs
        self.gradients = {position - count: key for position, key in graph.gradients.items()}
        return cut(graph, private_saved(graph.graph, values, forward_outputs))

    @_compat.collecting_only_new_objects()  # a backward is lowered when it first runs
    def lower(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """AOTAutograd's compiler of one side."""
        _compat.forget_donated_buffers()
        side = StepGraph(module, num_forward_outputs=0, specs=self.specs)
        if self.keep_graphs:
            self.sides.append(side)
        self.run(side, self.config.side_passes(), {Fact.STAMPED, Fact.GATHERED, Fact.CUT})
        states = {id(s.state): s.state for s in self.specs.values()}
        is_backward = any(
            node.name.startswith("tangents_") for node in module.graph.find_nodes(op="placeholder")
        )
        gradients = self.gradients if is_backward else {}
        call = executable(side, list(states.values()), gradients)
        _compat.return_free_memory()
        return call

    def infer(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """AOTAutograd's compiler of a graph without backward."""
        output = next(iter(reversed(module.graph.nodes)))
        graph = self.read(module, len(output.args[0]))
        self.schedule(graph)
        return self.lower(module, inputs)

    def warn(self) -> None:
        """Report settings that cannot take effect."""
        messages, self.context.warnings = self.context.warnings, []
        for message in messages:
            if self.config.strict:
                raise ConfigError(f"{message} (an error because strict=True)")
            warnings.warn(message, FxZeroWarning, stacklevel=2)


observers: list[Callable[[Compilation], None]] = []
"""Called with every compilation when it starts; `fxzero inspect` listens here."""


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
        compilation = Compilation(
            config, plain=_plain_parameters(module, example_inputs), context=context
        )
        for observe in observers:
            observe(compilation)
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
                    forward=compilation.lower,
                    backward=compilation.lower,
                    inference=compilation.infer,
                    partition=compilation.partition,
                    decompositions=decompositions,
                )

            compiled = trace_folded(module, decompositions, trace)
            states = {id(s.state): s.state for s in compilation.specs.values()}
            call = as_dtensors(with_parameters(compiled, local), distributed)
            call = with_copies(call, copies)
            return with_buffers(call, list(states.values()))
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


def log_record(record: PassRecord) -> None:
    """Tell the logger ``fxzero`` what a pass did."""
    log.info("%s: %.1f ms, %s", record.options, record.time_ms, record.notes)


def decompositions_of(config: Config) -> dict[Any, Callable[..., Any]]:
    """What AOTAutograd takes apart: Inductor wants small operators, torch runs whole ones."""
    if config.lower_regions.backend is RegionBackend.INDUCTOR:
        return _compat.inductor_decompositions()
    return {}


def _is_tensor_node(value: Any) -> bool:
    """Whether something is a node with a tensor: not a DTensor's mesh, nor None."""
    return isinstance(value, fx.Node) and isinstance(value.meta.get("val"), torch.Tensor)


_plain_models = itertools.count()
"""Models that nobody sharded are met in the same order on all ranks."""
_PATH = re.compile(r"_(?:modules|parameters)\['([^']+)'\]")


def _plain_parameters(
    module: fx.GraphModule, example_inputs: Sequence[Any]
) -> dict[int, ParamSpec]:
    """Specs of the trainable parameters of a model that nobody sharded: stage 0."""
    if _compat.active_ddp_module() is not None:
        return {}  # DistributedDataParallel reduces the gradients itself
    placeholders = module.graph.find_nodes(op="placeholder")
    found = {
        i: (value, _qualified_name(node))
        for i, (node, value) in enumerate(zip(placeholders, example_inputs, strict=False))
        if isinstance(value, nn.Parameter)
        and value.requires_grad
        and not isinstance(value, DTensor)
        and not is_known(value)
    }
    if not found:
        return {}
    world = init_distributed(next(iter(found.values()))[0].device.type)
    if world is None:
        return {}
    group = Group.of(world)
    if group.size == 1:
        return {}
    watch.start()
    watch_optimizers()
    _replicate({name: parameter for parameter, name in found.values()}, group)
    specs = {i: plain_spec_of(parameter) for i, (parameter, _) in found.items()}
    return {i: spec for i, spec in specs.items() if spec is not None}


def _replicate(in_graph: dict[str, nn.Parameter], group: Group) -> None:
    """Take note of the parameters of a model that nobody sharded: stage 0.

    Not only of those in the graph. What the model computes outside of it (nn.LSTM, a layer that
    was not compiled) has gradients too, which are reduced when they arrive.
    """
    model = outermost_module()
    everything = dict(model.named_parameters()) if model is not None else {}
    names = {id(parameter): name for name, parameter in (*in_graph.items(), *everything.items())}
    parameters = {id(p): p for p in (*in_graph.values(), *everything.values())}
    new = {
        names[identity]: parameter
        for identity, parameter in parameters.items()
        if plain_spec_of(parameter) is None
        and not is_known(parameter)
        and not isinstance(parameter, DTensor)
    }
    if not new:
        return
    check_equal(new)
    state = ModelState(zero=0, number=-1)
    number = next(_plain_models)
    layout = Layout.replicated(group)
    for name, parameter in new.items():
        spec = ParamSpec.whole(parameter, name, f"plain{number}/{name}", state, layout)
        remember_plain(parameter, register(spec))
        reduce_what_arrives(parameter, spec)


def _qualified_name(node: fx.Node) -> str:
    """A parameter's name, from where Dynamo found it."""
    parts = [p for p in _PATH.findall(_compat.input_source_name(node)) if p != "_orig_mod"]
    return ".".join(parts) or node.name
