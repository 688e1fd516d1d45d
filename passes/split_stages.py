"""Keep what this rank's stages of a pipeline compute, and let them speak with the others.

    rank of stage 0      a = f(x, w0); b = g(a, w1); …; da = g'(db); dw0 = f'(da)
                     →   a = f(x, w0); send([a]); …; da, = receive(); dw0 = f'(da)
    rank of stage 1      a, = receive(); b = g(a, w1); …; da = g'(db); send([da])

Which stage computes what is in `fxzero.graph.assign_stages`. A value that a later stage reads goes
from each stage to the next one, and its gradient comes back the same way, where what comes from
several stages is added up as soon as it meets. What no other stage waits for, gradients of weights
above all, is computed behind what is sent. What needs no parameter is computed where it is read. A
parameter that several stages hold has, on each, the gradient of what is read there: `join_stages`
adds them up.
"""

from __future__ import annotations

import hashlib
import operator
import warnings
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import fx

from fxzero._compat import copy_node, graph_module
from fxzero.cost.analytic import flops_of
from fxzero.cost.model import CostModel
from fxzero.errors import CaptureError, FxZeroWarning
from fxzero.graph import Phase, Role, Stamp, StepGraph
from fxzero.graph.aliases import root
from fxzero.graph.assign_stages import Stages, assign_stages
from fxzero.graph.messages import forms_of
from fxzero.graph.node_text import source_line
from fxzero.graph.operators import is_random, num_bytes
from fxzero.graph.stamps import Lane, set_stamp, stamp_of
from fxzero.passes.base import Context, Door, Fact, Notes, Pass
from fxzero.passes.stage_messages import emit_receive, emit_send
from fxzero.pipeline.schedules import AUTO, fastest, splits_backward
from fxzero.pipeline.tables import Action, Work
from fxzero.sharding.pipeline import Pipeline

_aten = torch.ops.aten


def _is_reshard(node: fx.Node) -> bool:
    """Whether a node marks a gradient."""
    return node.op == "call_function" and stamp_of(node).role is Role.RESHARD


class _Part:
    """The part of a micro-step's graph that one rank runs."""

    def __init__(
        self, graph: StepGraph, stages: Stages, pipeline: Pipeline, *, halves: bool
    ) -> None:
        self.halves = halves
        self.old = graph
        self.stages = stages
        self.pipeline = pipeline
        self.place = pipeline.place
        self.given: dict[fx.Node, fx.Node] = {}
        """What is there on every rank: inputs, constants."""
        self.made: dict[tuple[fx.Node, int], fx.Node] = {}
        """By node and stage, what stands for it there."""
        self.graph = self._empty()
        self.nodes: dict[tuple[Phase, int], list[fx.Node]] = {}
        """By phase and stage, what is copied: markers of gradients right behind them, so that no
        gradient waits for the backward's end."""
        for node in graph.graph.nodes:
            stage = stages.marks.get(node, stages.of.get(node))
            if stage is not None:
                self.nodes.setdefault((stamp_of(node).phase, stage), []).append(node)

    def _empty(self) -> StepGraph:
        """A graph that has the same inputs, but for parameters of others, and nothing else yet."""
        old, graph = self.old, fx.Graph()
        for node in old.graph.nodes:
            key = old.inputs.get(node)
            if node.op == "placeholder" and (key is None or old.specs[key].is_here):
                self.given[node] = copy_node(graph, node)
        for node in old.graph.find_nodes(op="get_attr"):
            self.given[node] = copy_node(graph, node)
        output = graph.output(())
        output.meta = dict(old.output.meta)
        return StepGraph(
            graph_module(old.module, graph),
            num_forward_outputs=old.num_forward_outputs,
            specs={key: spec for key, spec in old.specs.items() if spec.is_here},
            inputs={self.given[n]: key for n, key in old.inputs.items() if n in self.given},
            loss=old.loss,
        )

    def run(self) -> StepGraph:
        """Make it."""
        graph = self.graph
        graph.fake_mode = self.old.fake_mode
        graph.pieces = self.old.pieces
        graph.pipeline = self.pipeline
        with graph.graph.inserting_before(graph.output):
            for stage in self.pipeline.stages:
                self._forward(stage)
            for stage in reversed(self.pipeline.stages):
                self._backward(stage)
            self._outputs()
        graph.graph.eliminate_dead_code()
        return graph

    def _forward(self, stage: int) -> None:
        if stage > 0:
            self._pass_on(self.stages.crossing_up(stage - 1), stage - 1, stage, Phase.FORWARD)
        for node in self.nodes.get((Phase.FORWARD, stage), ()):
            self._copy(node, stage, Phase.FORWARD)
        for node in self.nodes.get((Phase.BACKWARD, stage), ()):
            if _is_reshard(node):
                continue
            for source in node.all_input_nodes:  # what forward's values look like to backward
                if self._is_forwards_own(source, stage):
                    self.at(source, stage, Phase.FORWARD)
        if stage + 1 < self.pipeline.num_stages:
            self._give(self.stages.crossing_up(stage), stage, stage + 1, Phase.FORWARD)

    def _is_forwards_own(self, node: fx.Node, stage: int) -> bool:
        """Whether forward can make a view, or what is everywhere, of what a stage has there."""
        if node.op != "call_function" or node in self.stages.of:
            return False
        if stamp_of(node).phase is not Phase.FORWARD:
            return False
        queue, seen = [node], {node}
        while queue:
            for source in queue.pop().all_input_nodes:
                if source in seen or self._is_at(source, stage):
                    continue
                may = source.op == "call_function" and stamp_of(source).phase is Phase.FORWARD
                if source in self.stages.of or not may:
                    return False
                seen.add(source)
                queue.append(source)
        return True

    def _backward(self, stage: int) -> None:
        before = self.graph.output.prev
        if stage + 1 < self.pipeline.num_stages:
            crossing = self.stages.crossing_down(stage + 1)
            self._pass_on(crossing, stage + 1, stage, Phase.BACKWARD)
        for node in self.nodes.get((Phase.BACKWARD, stage), ()):
            self._copy(node, stage, Phase.BACKWARD)
        if stage > 0:
            self._give(self.stages.crossing_down(stage), stage, stage - 1, Phase.BACKWARD)
        given = [self.at(v, stage, Phase.BACKWARD) for v in self.stages.crossing_down(stage)]
        self._put_off(before.next, given)

    def _put_off(self, first: fx.Node, given: list[fx.Node]) -> None:
        """Put what no stage waits for, which are gradients of weights, behind the rest of a
        backward: a message is on its way meanwhile, and a schedule may run it later.

        Args:
            first: of the backward's nodes, which go on to the graph's end.
            given: what another stage waits for.
        """
        nodes: list[fx.Node] = []
        while first is not self.graph.output:
            nodes.append(first)
            first = first.next
        waited_for = {n for n in nodes if stamp_of(n).lane in (Lane.SEND, Lane.RECEIVE)}
        queue = [*waited_for, *given]
        inside = set(nodes)
        while queue:
            for source in queue.pop().all_input_nodes:
                if source in inside and source not in waited_for:
                    waited_for.add(source)
                    queue.append(source)
        waited_for.update(given)
        for node in nodes:
            if node.target is operator.getitem and node.all_input_nodes[0] in waited_for:
                waited_for.add(node)
        late = put_off(nodes, waited_for) if given else [n for n in nodes if n not in waited_for]
        for node in late:
            if self.halves:
                set_stamp(node, stamp_of(node).but(half=1))
            self.graph.output.prepend(node)

    def _pass_on(self, values: list[fx.Node], source: int, stage: int, phase: Phase) -> None:
        """Have values of another stage: from this rank itself, or by a message."""
        if not values:
            return
        place = self.pipeline.place_of[source]
        if place == self.place:
            for value in values:
                self.made[value, stage] = self.made[value, source]
            return
        link = self.pipeline.links[place, self.place]
        stamp = Stamp(phase, stage=stage, made_by="split_stages", layer=stamp_of(values[0]).layer)
        made = emit_receive(self.graph, values, link, stamp, _name(source, stage))
        for value, node in zip(values, made, strict=True):
            self.made[value, stage] = node

    def _give(self, values: list[fx.Node], stage: int, target: int, phase: Phase) -> None:
        """Give values to another stage, unless it is this rank's own."""
        place = self.pipeline.place_of[target]
        if not values or place == self.place:
            return
        link = self.pipeline.links[self.place, place]
        stamp = Stamp(phase, stage=stage, made_by="split_stages", layer=stamp_of(values[0]).layer)
        here = [self.at(value, stage, phase) for value in values]
        emit_send(self.graph, here, link, stamp, _name(stage, target))

    def at(self, node: fx.Node, stage: int, phase: Phase) -> fx.Node:
        """What stands for a node at a stage; what is everywhere, and views, are made there."""
        if node in self.given:
            return self.given[node]
        if (node, stage) in self.made:
            return self.made[node, stage]
        may = node.op == "call_function" and node not in self.stages.of
        if not may or stamp_of(node).role is Role.RESHARD:
            raise CaptureError(
                f"stage {stage} of the pipeline needs {node.name} ({node.target}), which it cannot "
                "get: it is made of a parameter of another stage, or of a gradient. Give the "
                "modules that share it one stage (fxzero.shard(stages=…))."
            )
        stack = [node]
        while stack:  # chains of views may be long
            waiting = [s for s in stack[-1].all_input_nodes if not self._is_at(s, stage)]
            waiting = [s for s in waiting if s.op == "call_function" and s not in self.stages.of]
            if waiting:
                stack.append(waiting[0])
            else:
                self._copy(stack.pop(), stage, phase)
        return self.made[node, stage]

    def _is_at(self, node: fx.Node, stage: int) -> bool:
        return node in self.given or (node, stage) in self.made

    def _copy(self, node: fx.Node, stage: int, phase: Phase) -> None:
        def argument(source: fx.Node) -> fx.Node:
            return self.at(source, stage, phase)

        for source in node.all_input_nodes:
            argument(source)  # before the copy, which reads them
        copy = copy_node(self.graph.graph, node, argument)
        set_stamp(copy, stamp_of(node).but(stage=stage, phase=phase))
        self.made[node, stage] = copy

    def _outputs(self) -> None:
        graph, old = self.graph, self.old
        values: list[Any] = []
        for position, value in enumerate(old.output_values):
            if not isinstance(value, fx.Node):
                values.append(value)
            elif position in old.gradients:
                key = old.gradients[position]
                gradient = self._gradient(value) if old.specs[key].is_here else None
                if gradient is None and old.specs[key].layout.tied is not None:
                    gradient = self._no_gradient(value, key)
                values.append(gradient)
                if gradient is not None:
                    graph.gradients[position] = key
            else:
                values.append(self._output(position, value))
        graph.changed = {
            position: self.given[source]
            for position, source in old.changed.items()
            if isinstance(values[position], fx.Node)
        }
        graph.set_output_values(values)

    def _output(self, position: int, value: fx.Node) -> fx.Node | None:
        """One of forward's results; of a loss of another stage a zero."""
        if value in self.given:
            return self.given[value]
        owner = root(value)
        stage = self.stages.of.get(owner)
        if stage in self.pipeline.stages:
            assert stage is not None
            return self.at(value, stage, Phase.FORWARD)
        if stage is None and position != self.old.loss:
            return self.at(value, self.pipeline.stages[0], Phase.FORWARD)
        if position != self.old.loss:
            return None
        like = value.meta["val"]
        stamp = Stamp(Phase.FORWARD, stage=self.pipeline.stages[-1], made_by="split_stages")
        form = {"dtype": like.dtype, "device": like.device}
        return self.graph.call(_aten.full.default, ([], 0.0), form, stamp=stamp, name="no_loss")

    def _gradient(self, node: fx.Node) -> fx.Node | None:
        """The part of a parameter's gradient that this rank's stages compute; None if none does."""
        if stamp_of(node).role is Role.RESHARD:
            stage = self.stages.marks[node]
            return self.made[node, stage] if stage in self.pipeline.stages else None
        parts = [self._gradient(source) for source in node.all_input_nodes]
        here = [part for part in parts if part is not None]
        if len(here) < len(parts):
            return here[0] if here else None
        given = dict(zip(node.all_input_nodes, here, strict=True))
        copy = copy_node(self.graph.graph, node, given.__getitem__)
        stages = [stamp_of(part).stage for part in here]
        halves = [stamp_of(part).half for part in here]
        set_stamp(copy, stamp_of(node).but(stage=min(stages), half=max(halves)))
        return copy

    def _no_gradient(self, node: fx.Node, key: str) -> fx.Node:
        """A gradient of zeros, of a parameter that other stages read: all that hold it add up."""
        while stamp_of(node).role is not Role.RESHARD:
            node = node.all_input_nodes[0]
        spec = self.old.specs[key]
        held = [stage for stage in self.pipeline.stages if stage in spec.stages]
        stamp = stamp_of(node).but(stage=held[-1], half=int(self.halves), made_by="split_stages")
        like = node.all_input_nodes[0].meta["val"]
        form = {"dtype": like.dtype, "device": like.device}
        zeros = self.graph.call(
            _aten.full.default, (list(spec.shape), 0.0), form, stamp=stamp.but(role=Role.COMPUTE)
        )
        return self.graph.call(node.target, (zeros, *node.args[1:]), stamp=stamp)  # type: ignore[arg-type]


def _name(source: int, target: int) -> str:
    return f"{source}_to_{target}"


def in_common(graph: StepGraph, stages: Stages, num_stages: int) -> str:
    """A digest of what travels between all stages: ranks of all of them must see it alike."""
    digest = hashlib.blake2b(digest_size=16)
    for stage in range(num_stages):
        for crossing in (stages.crossing_up(stage), stages.crossing_down(stage)):
            words = [str(stage)]
            for value, form in zip(crossing, forms_of(crossing), strict=True):
                stamp = stamp_of(value)
                # Backward's nodes are of the layer that was traced for several: maybe another.
                layer = stamp.layer if stamp.phase is Phase.FORWARD else ""
                words += [str(value.target), layer, str(stages.of[value]), str(form)]
            digest.update("|".join(words).encode() + b"\n")
    return digest.hexdigest()


def refuse_what_stages_cannot(graph: StepGraph) -> None:
    """Refuse what has no meaning in a part of a step.

    Raises:
        CaptureError: the model brings collectives of its own.
    """
    for node in graph.nodes(role=Role.LAUNCH):
        raise CaptureError(
            f"the forward calls a collective, {node.target}, and stages of a pipeline do not run "
            "it on all ranks. Leave out the axis 'pipeline', or the collective."
        )


def warn_of_equal_seeds(graph: StepGraph, pipeline: Pipeline) -> None:
    """Say so if the dropout of two stages draws the same numbers."""
    if len(set(pipeline.seeds)) == len(pipeline.seeds) or not any(map(is_random, graph.nodes())):
        return
    warnings.warn(
        "the forward draws random numbers, and stages of the pipeline were seeded alike when the "
        "model was sharded: their dropout draws the same masks. Seed each rank by its place, "
        "before fxzero.shard: torch.manual_seed(seed + mesh.get_local_rank('pipeline')).",
        FxZeroWarning,
        stacklevel=2,
    )


def refuse_buffers_of_several(graph: StepGraph, stages: Stages) -> None:
    """A buffer that the forward changes goes on to the next micro-step on the stage that does so.

    Raises:
        CaptureError: another stage reads what it was before.
    """
    for position, source in graph.changed.items():
        value = graph.output_values[position]
        writer = stages.of.get(root(value)) if isinstance(value, fx.Node) else None
        if writer is None:
            continue  # every rank changes its own, and all alike
        for reader in _read_from(source, stages):
            if stages.of[reader] == writer:
                continue
            line = source_line(reader)
            raise CaptureError(
                f"stage {writer} of the pipeline changes a buffer of shape "
                f"{tuple(source.meta['val'].shape)} that {reader.name} ({reader.target})"
                f"{f' at {line}' if line else ''} of stage {stages.of[reader]} reads: it would not "
                "see what the micro-batch before has made of it. Give the modules that use the "
                "buffer one stage (fxzero.shard(stages=…))."
            )


def _read_from(source: fx.Node, stages: Stages) -> list[fx.Node]:
    """Nodes of some stage that read an input, or what is made of it everywhere."""
    found: dict[fx.Node, None] = {}
    queue, seen = [source], {source}
    while queue:
        for user in queue.pop().users:
            if user in seen or user.op == "output":
                continue
            seen.add(user)
            if user in stages.of:
                found[user] = None
            else:
                queue.append(user)
    return list(found)


def put_off(nodes: Iterable[fx.Node], waited_for: Collection[fx.Node]) -> dict[fx.Node, None]:
    """Of a backward's nodes, products that nobody waits for, and what follows from them, in order.

    What is light stays where it is: a product's operands are there already, while the terms of a
    sum, such as a norm's gradient is, would be kept until then.
    """
    found: dict[fx.Node, None] = {}
    for node in nodes:
        follows = any(source in found for source in node.all_input_nodes)
        if node not in waited_for and (follows or flops_of(node)):
            found[node] = None
    return found


def actions_us(
    graph: StepGraph, stages: Stages, num_stages: int, costs: CostModel
) -> Callable[[Action], float]:
    """What an action of each stage takes, messages aside: equal on all ranks, which have the whole
    graph here."""
    parts: dict[tuple[int, Work], list[fx.Node]] = {}
    awaited: set[fx.Node] = set()
    for stage in range(1, num_stages):
        queue = [node for node in stages.crossing_down(stage) if stages.of.get(node) == stage]
        while queue:
            node = queue.pop()
            if node not in awaited:
                awaited.add(node)
                sources = map(root, node.all_input_nodes)  # views are of no stage
                queue += [source for source in sources if stages.of.get(source) == stage]
    for node in graph.graph.nodes:
        stage_of_node = stages.of.get(node)
        if stage_of_node is None:
            continue
        if stamp_of(node).phase is Phase.FORWARD:
            work = Work.FORWARD
        else:
            work = Work.INPUT_GRADIENTS if node in awaited else Work.WEIGHT_GRADIENTS
        parts.setdefault((stage_of_node, work), []).append(node)
    us = {part: costs.compute_us(nodes) for part, nodes in parts.items()}

    def action_us(action: Action) -> float:
        halves = (Work.INPUT_GRADIENTS, Work.WEIGHT_GRADIENTS)
        works = halves if action.work is Work.BACKWARD else (action.work,)
        return sum(us.get((action.stage, work), 0.0) for work in works)

    return action_us


@dataclass(frozen=True)
class SplitStages(Pass):
    """Keep this rank's stages of a pipeline."""

    name: ClassVar[str] = "split_stages"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.STAMPED})
    doors: ClassVar[frozenset[Door]] = frozenset({Door.STEP})

    schedule: str = field(default="", repr=False)
    """What runs the stages: see `fxzero.passes.order_micro_batches`."""
    micro_batches: int = field(default=1, repr=False)

    def run(self, graph: StepGraph, ctx: Context) -> Notes:
        """See the module's docstring.

        Raises:
            CaptureError: stages that the graph cannot be cut into.
        """
        pipeline = next((s.state.pipeline for s in graph.specs.values() if s.stages), None)
        if pipeline is None:
            return Notes()
        refuse_what_stages_cannot(graph)
        holders = {key: spec.stages for key, spec in graph.specs.items()}
        stages = assign_stages(graph, holders)
        refuse_buffers_of_several(graph, stages)
        warn_of_equal_seeds(graph, pipeline)
        digest = in_common(graph, stages, pipeline.num_stages)
        up = [sum(map(num_bytes, stages.crossing_up(s))) for s in range(pipeline.num_stages - 1)]
        down = [sum(map(num_bytes, stages.crossing_down(s))) for s in range(1, pipeline.num_stages)]
        before = len(graph.graph.nodes)
        schedule = self.schedule or pipeline.schedule
        if schedule == AUTO:
            action_us = actions_us(graph, stages, pipeline.num_stages, ctx.costs)
            schedule = fastest(pipeline.place_of, self.micro_batches, action_us).name
            pipeline = replace(pipeline, schedule=schedule)
        halves = splits_backward(schedule, pipeline.group.size)
        part = _Part(graph, stages, pipeline, halves=halves).run()
        part.in_common = digest
        graph.become(part)
        return Notes(
            stages=pipeline.stages,
            of=pipeline.num_stages,
            nodes=len(graph.graph.nodes),
            of_nodes=before,
            sent_bytes=up,
            gradient_bytes=down,
        )
