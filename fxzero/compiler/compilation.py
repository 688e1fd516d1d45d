"""One graph on its way through the compiler: read, scheduled, cut, lowered. Both doors use it."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from fxzero import _compat
from fxzero.capture.fold_layers import Folds
from fxzero.capture.folded import marked_parameters, reveal
from fxzero.capture.unfold_layers import unfold
from fxzero.compiler import dump_folder
from fxzero.compiler.config import Config
from fxzero.compiler.dump_folder import PROFILE, RankFolder, asked_for, rank_folder
from fxzero.compiler.fitting import Fitting
from fxzero.compiler.pipelines import DECIDING, Pipelines
from fxzero.compiler.placement import Placing, Tried, is_open
from fxzero.compiler.plan import OtherGraphError, Plan
from fxzero.compiler.run import PassRecord, run_passes
from fxzero.compiler.without_effect import without_effect
from fxzero.cost.throttle import Throttle
from fxzero.errors import ConfigError, FxZeroWarning, VerificationError
from fxzero.graph import StepGraph
from fxzero.graph.aliases import root
from fxzero.graph.cut import Sides, crossing, cut
from fxzero.graph.products import refuse_mixed_products
from fxzero.passes.base import Context, Fact, Pass
from fxzero.passes.decisions import Decisions
from fxzero.passes.expand_layers import UnequalLayersError
from fxzero.passes.gather_ahead import GatherAhead
from fxzero.passes.offload_params import OffloadParams
from fxzero.passes.release_saved import private_saved
from fxzero.runtime.executor import executable
from fxzero.runtime.node_times import NodeTimes
from fxzero.schedule.simulate import simulate_memory
from fxzero.sharding.params import ModelState, ParamSpec, spec_of

log = logging.getLogger("fxzero")


CAPTURED, WAS_CUT = "capture", "cut"
"""What stands for the name of a pass before the first one."""

Call = Callable[[list[Any]], Any]
"""What runs a part of the graph: of a list of inputs, which it empties."""


@dataclass
class Compilation:
    """One graph on its way through the compiler, and what was noted on the way."""

    config: Config
    pipelines: Pipelines
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
    scheduled: StepGraph | None = None
    """The same before it was lowered, where that is another graph: of a step that is not cut."""
    gradients: dict[int, str] = field(default_factory=dict)
    """The parameter whose gradient an output of backward is, by its position."""
    sides: list[StepGraph] = field(default_factory=list)
    """What was lowered: forward and backward, or a forward alone."""
    facts: frozenset[Fact] = frozenset()
    """What is true of the scheduled graph, and of what is cut out of it."""
    budget_bytes: int | None = None
    """What the graph's peak was fitted into."""
    stands_for: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """By layer, equal ones for which early passes have decided as for it."""
    rungs: tuple[Tried, ...] = ()
    """What was tried to find out what leaves the device, where that was left to be decided."""
    every_layer: bool = False
    """Whether passes shall see all layers of a chain of equal ones, for somebody who looks at
    them."""
    tries: bool = False
    """Whether what it makes is tried, and may not be taken: warnings wait."""
    look: Callable[[str, StepGraph], None] | None = None
    """Called with a graph behind each pass; before the first one the name is `CAPTURED`, and of
    what has been cut out of another graph `WAS_CUT`."""
    around: Callable[[str, StepGraph, Call], Call] | None = None
    """Makes of a part's callable another one: given ``step``, ``forward`` or ``backward``, and the
    graph."""
    dump: RankFolder | None = None
    """Where what is known of it is written, if anywhere."""
    number: int | None = None
    """Of its graph in the dump."""
    measured: dict[str, NodeTimes] = field(default_factory=dict)
    """What was measured, by part: ``step``, or ``forward`` and ``backward``."""

    def __post_init__(self) -> None:
        if asked_for(self.config.dump):
            self.dump = rank_folder(asked_for(self.config.dump))
            self.config = replace(self.config, keep_text=True)
            self.keep_graphs = self.context.decisions.keep_digest = True
        if self.config.plan:
            self.context.decisions.plan = Plan.read(self.config.plan, DECIDING)
        self.context.throttle = self.config.throttle
        self.context.host_budget_bytes = self.config.host_budget_bytes
        self.take(self.pipelines)
        self.context.warnings += without_effect(self.config)
        for observe in observers:
            observe(self)

    def partition(
        self, module: fx.GraphModule, inputs: Sequence[Any], *, num_fwd_outputs: int, **_: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """AOTAutograd's partitioner: run the joint passes and cut."""
        graph = self.read(module, num_fwd_outputs)
        _refuse_stages(graph)
        self.schedule(graph)
        sides = self.cut(graph)
        return sides.forward.module, sides.backward.module

    def read(self, module: fx.GraphModule, num_forward_outputs: int) -> StepGraph:
        """Find out which inputs and outputs belong to which parameter.

        Raises:
            CaptureError: a product of two dtypes.
        """
        refuse_mixed_products(module.graph)
        reveal(module.graph, self.folds)
        specs: dict[str, ParamSpec] = {}
        inputs: dict[fx.Node, str] = {}
        by_index: dict[int, str] = {}
        for read, key in marked_parameters(module.graph, self.folds):
            spec = spec_of(key)
            source = root(read)
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
        """Decide what happens in the step, and when.

        Raises:
            ConfigError: its memory budget is less than it can do with.
        """
        self.specs = graph.specs
        on_host = self.config.offloads or any(s.device is not None for s in self.specs.values())
        if self.config.throttle != Throttle() and not on_host:
            self.context.warnings.append(
                f"{self.config.throttle} has no effect: nothing is copied to or from the host"
            )
        if self.keep_graphs:
            self.joint = graph
        budget = self.config.budget
        if is_open(self.pipelines):
            self.budget_bytes = Placing(self, graph, budget).run()
            self.specs = graph.specs
            return
        if budget is not None and graph.num_forward_outputs < len(graph.output_values):
            self.budget_bytes = Fitting(self, graph, budget).run()
            self.specs = graph.specs
            return
        self.schedule_freely(graph)

    def schedule_freely(self, graph: StepGraph) -> None:
        """Decide what happens in the step, and when, whatever it holds."""
        if self.every_layer or any(map(self.config.tile_linear.cuts, graph.specs.values())):
            self._schedule(graph, leave_out=False)  # blocks of a layer are no part of it
            return
        folded = graph.clone() if self.folds.leave_out else None
        try:
            self._schedule(graph, leave_out=True)
            return
        except UnequalLayersError as error:
            if self.context.decisions.replayed:
                raise ConfigError(
                    f"plan={self.config.plan!r} treats layers that are equal differently: {error}. "
                    "Decide alike for the layers of a chain, or drop "
                    f"{', '.join(sorted(self.context.decisions.replayed))} from the plan."
                ) from None
            log.warning("every layer goes through the passes by itself: %s", error)
        except OtherGraphError:  # it may be of a graph in which no layer was left out
            if folded is None:
                raise
        assert folded is not None
        graph.become(folded)
        self.start_again(self.pipelines)
        self._schedule(graph, leave_out=False)

    def _schedule(self, graph: StepGraph, *, leave_out: bool) -> None:
        """Unfold a graph, and run the passes that decide on it.

        Raises:
            UnequalLayersError: layers were left out, and must not be.
            OtherGraphError: the plan does not know the graph.
        """
        self.unfold(graph, leave_out=leave_out)
        self.facts = self.run(graph, self.pipelines.scheduling, frozenset())

    def unfold(self, graph: StepGraph, *, leave_out: bool) -> None:
        """Copy equal layers out, or note that there are some; then everything has its cost."""
        unfold(graph, self.folds, leave_out=leave_out)
        self.stands_for = {
            chain.example.name: tuple(place.name for place in chain.layers)
            for chain in graph.left_out
        }
        self.context.fuses = self.config.fuses
        self.context.costs = self.config.cost.make(graph, fuses=self.config.fuses)
        self.context.on_cpu = self.config.cost.device_type(graph) == "cpu"

    def take(self, pipelines: Pipelines) -> None:
        """Go on with some passes."""
        self.pipelines = pipelines
        self.context.params_on_host = any(
            isinstance(one, OffloadParams) for one in pipelines.scheduling
        )

    def start_again(self, pipelines: Pipelines) -> None:
        """Forget what was decided and noted: another graph of the same step comes."""
        self.take(pipelines)
        self.records.clear()
        decisions = self.context.decisions
        self.context.decisions = Decisions(decisions.plan, decisions.keep_digest)
        self.context.scratch.clear()

    def run(
        self,
        graph: StepGraph,
        passes: Sequence[Pass],
        given: frozenset[Fact],
        *,
        of: Sequence[Pass] = (),
    ) -> frozenset[Fact]:
        """Run passes, and keep what they say; what is true of the graph then.

        Args:
            of: all passes among which these are the first, or the next; by default there are no
                others.
        """
        if self.look is not None:
            self.look(WAS_CUT if given else CAPTURED, graph)
        self.records += run_passes(
            passes,
            graph,
            self.context,
            given=given,
            keep_text=self.config.keep_text,
            observe=log_record,
            look=self.look,
            of=of,
        )
        self.warn()
        return given.union(*(one.provides for one in passes))

    def cut(self, graph: StepGraph) -> Sides:
        """Split the scheduled graph; backward may free what only it can see."""
        values, _ = crossing(graph)
        forward_outputs = [
            n for n in graph.output_values[: graph.num_forward_outputs] if isinstance(n, fx.Node)
        ]
        count = graph.num_forward_outputs
        self.gradients = {position - count: key for position, key in graph.gradients.items()}
        return cut(graph, private_saved(graph.graph, values, forward_outputs))

    @_compat.with_room_for_frames
    @_compat.collecting_only_new_objects()  # a backward is lowered when it first runs
    def lower_side(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """AOTAutograd's compiler of one side."""
        self.folds = Folds()  # they hold what Dynamo has traced, which is not read again
        _compat.forget_donated_buffers()
        side = StepGraph(module, num_forward_outputs=0, specs=self.specs)
        if self.keep_graphs:
            self.sides.append(side)
        self.run(side, self.pipelines.lowering, self.facts | {Fact.CUT})
        is_backward = any(
            node.name.startswith("tangents_") for node in module.graph.find_nodes(op="placeholder")
        )
        gradients = {
            position: key
            for position, key in self.gradients.items()
            if is_backward and self.specs[key].zero == 0  # others never arrive unreduced
        }
        part = "backward" if is_backward else "forward"
        times = self._times(part)
        call = executable(side, self.states(), gradients, times=times, is_kept=self.keep_graphs)
        if self.around is not None:
            call = self.around(part, side, call)
        self._write()
        if is_backward:  # before it everything that made the graph is still in use
            _compat.return_free_memory()
        return call

    def lower_whole(self, graph: StepGraph) -> Callable[[list[Any]], Any]:
        """Make a scheduled whole step callable, in which nothing is cut and nothing saved.

        Raises:
            NotSteadyError: it holds fewer micro-steps than the step has, and cannot.
        """
        given = self.facts | {Fact.CUT, Fact.RELEASED}
        if self.keep_graphs:
            self.scheduled = graph.clone()
        spare = graph.clone() if self.budget_bytes is not None else None
        self.run(graph, self.pipelines.lowering, given)
        if spare is not None and self._excess_bytes(graph):
            log.info("the budget leaves no room for gathers between two steps")
            graph.become(spare)
            del self.records[-len(self.pipelines.lowering) :]
            self.run(graph, [_waiting(one) for one in self.pipelines.lowering], given)
            self._verify_peak(graph)
        times = self._times("step")
        call = executable(graph, self.states(), times=times, is_kept=self.keep_graphs)
        if self.around is not None:
            call = self.around("step", graph, call)
        self.folds = Folds()  # no other graph of this step comes
        self._write()
        return call

    def _times(self, part: str) -> NodeTimes | None:
        """What measures a part of the graph, where there is a dump."""
        if self.dump is None:
            return None
        if self.number is None:
            self.number = self.dump.next_graph()
        if self.config.cuda_graph:  # it is replayed, and not called
            return None
        path = self.dump.graph(self.number) / f"{part}{PROFILE}"
        self.measured[part] = NodeTimes(path, self._write)
        return self.measured[part]

    def _write(self) -> None:
        """Bring the dump up to date."""
        if self.dump is not None and dump_folder.write_graph is not None:
            dump_folder.write_graph(self)

    def _excess_bytes(self, graph: StepGraph) -> int:
        """What a lowered graph holds beyond its budget."""
        assert self.budget_bytes is not None
        memory = simulate_memory(graph, fuses=self.config.fuses)
        return max(memory.peak_bytes - self.budget_bytes, 0)

    def _verify_peak(self, graph: StepGraph) -> None:
        """See that lowering has not added what the memory budget has no room for.

        Raises:
            VerificationError: it has.
        """
        excess_bytes = self._excess_bytes(graph)
        if excess_bytes:
            raise VerificationError(
                f"memory_budget={self.config.memory_budget!r}: once it is lowered the step holds "
                f"{excess_bytes} bytes more than the {self.budget_bytes} that are allowed. Allow "
                "as much more."
            )

    def states(self) -> list[ModelState]:
        """The models whose parameters are in the graph."""
        return list({id(spec.state): spec.state for spec in self.specs.values()}.values())

    def infer(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """AOTAutograd's compiler of a graph without backward."""
        output = next(iter(reversed(module.graph.nodes)))
        graph = self.read(module, len(output.args[0]))
        _refuse_stages(graph)
        self.schedule(graph)
        call = self.lower_side(module, inputs)
        _compat.return_free_memory()
        return call

    def warn(self) -> None:
        """Report settings that cannot take effect."""
        if self.tries:
            return
        messages, self.context.warnings = self.context.warnings, []
        for message in dict.fromkeys(messages):
            if self.config.strict:
                raise ConfigError(f"{message} (an error because strict=True)")
            warnings.warn(message, FxZeroWarning, stacklevel=2)


def _refuse_stages(graph: StepGraph) -> None:
    """See that no stage of a pipeline is in a graph of the ordinary loop."""
    for spec in graph.specs.values():
        spec.refuse_outside_of_a_step()


def _waiting(one: Pass) -> Pass:
    """The same pass, but no gathers between two steps."""
    return replace(one, enabled=False) if isinstance(one, GatherAhead) else one


observers: list[Callable[[Compilation], None]] = []
"""Called with every compilation when it starts; `fxzero inspect` listens here."""


def log_record(record: PassRecord) -> None:
    """Tell the logger ``fxzero`` what a pass did."""
    log.info("%s: %.1f ms, %s", record.options, record.time_ms, record.notes)


def decompositions_of(config: Config) -> dict[Any, Callable[..., Any]]:
    """What AOTAutograd takes apart: Inductor wants small operators, torch runs whole ones."""
    if config.fuses:
        return _compat.inductor_decompositions()
    return {}


def _is_tensor_node(value: Any) -> bool:
    """Whether something is a node with a tensor: not a DTensor's mesh, nor None."""
    return isinstance(value, fx.Node) and isinstance(value.meta.get("val"), torch.Tensor)
