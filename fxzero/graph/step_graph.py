"""The step graph: one FX graph of a training step, in launch order, every node stamped."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import fx

from fxzero._compat import (
    copy_node,
    create_node,
    fake_mode_of,
    graph_module,
    has_symbolic_shape,
)
from fxzero.errors import VerificationError
from fxzero.graph.left_out import LeftOut
from fxzero.graph.node_text import node_line
from fxzero.graph.pieces import Pieces, called
from fxzero.graph.stamps import STAMP, Lane, Phase, Role, Segment, Stamp, set_stamp, stamp_of
from fxzero.pipeline.tables import Action, Table, Work
from fxzero.sharding.params import ParamSpec
from fxzero.sharding.pipeline import Pipeline
from fxzero.transfer import Transfer, TransferKind


@dataclass(frozen=True)
class TransferNodes:
    """The nodes that exist for one transfer.

    prepare(shard) → launch([prepared, …]) → wait(launch) → part(wait, 0) → finish(part)

    A model's own collective may send one tensor that is no list; its wait is its only part.
    """

    launch: fx.Node
    wait: fx.Node
    prepare: tuple[fx.Node, ...]
    parts: tuple[fx.Node, ...]
    """One for each tensor that was sent."""
    finish: tuple[fx.Node, ...]

    @property
    def record(self) -> Transfer:
        """What the transfer is."""
        found = self.stamp.transfer
        assert found is not None, f"{self.launch.name} was stamped as a launch without a record"
        return found

    @property
    def of_parameters(self) -> bool:
        """Whether it moves parameters or their gradients, between ranks or between pools: a model's
        own transfers do not, nor does the norm's sum."""
        return bool(self.stamp.params)

    @property
    def of_activations(self) -> bool:
        """Whether it brings again what forward has kept in parts."""
        return bool(self.stamp.again) and self.stamp.lane is Lane.GATHER

    @property
    def is_copy(self) -> bool:
        """Whether it moves something between this rank's own pools."""
        return self.record.kind is TransferKind.COPY

    @property
    def is_message(self) -> bool:
        """Whether it is one half of what a stage of a pipeline gives to another."""
        return self.record.kind in (TransferKind.SEND, TransferKind.RECEIVE)

    @property
    def is_placed(self) -> bool:
        """Whether `prefetch` chooses when it runs: a model's own stay where its author put them,
        and copies have lanes of their own."""
        return (self.of_parameters and not self.is_copy) or self.of_activations

    @property
    def stamp(self) -> Stamp:
        """The launch's stamp: phase, lane, layer, parameters, bucket."""
        return stamp_of(self.launch)

    @property
    def tensors(self) -> list[fx.Node]:
        """What the transfer sends; nothing where the step before has sent it."""
        return sent_by(self.launch)

    @property
    def results(self) -> list[fx.Node]:
        """What compute reads: the finished tensors, one for each that was sent."""
        ends = []
        for node in self.parts:
            while (following := [u for u in node.users if u in self.finish]) != []:
                node = following[0]
            ends.append(node)
        return ends


def segment_of(action: Action) -> Segment:
    """What an action runs."""
    phase = Phase.FORWARD if action.work is Work.FORWARD else Phase.BACKWARD
    half = int(action.work is Work.WEIGHT_GRADIENTS)
    return Segment(phase, action.micro_step, action.stage, half)


class StepGraph:
    """A joint graph, or one side of it after the cut, with what passes need to know of it.

    Args:
        module: the graph as AOTAutograd made it.
        num_forward_outputs: how many of its outputs belong to the forward.
        specs: the layout of each parameter in it, by key.
        inputs: the key of the parameter that a placeholder holds, by placeholder.
        gradients: the key of the parameter whose gradient an output is, by its position.
        changed: placeholders whose tensors hold another value once the forward has run, by
            the position of the output that is that value.
        loss: of a whole step, the position of the output that it minimises.
    """

    def __init__(
        self,
        module: fx.GraphModule,
        *,
        num_forward_outputs: int,
        specs: Mapping[str, ParamSpec],
        inputs: Mapping[fx.Node, str] | None = None,
        gradients: Mapping[int, str] | None = None,
        changed: Mapping[int, fx.Node] | None = None,
        loss: int | None = None,
    ) -> None:
        self.module = module
        self.num_forward_outputs = num_forward_outputs
        self.specs = dict(specs)
        self.inputs = dict(inputs or {})
        self.gradients = dict(gradients or {})
        self.changed = dict(changed or {})
        self.loss = loss
        self.scale: fx.Node | None = None
        """What the update multiplies gradients by: see the pass `clip_grads`."""
        self.norm: fx.Node | None = None
        """The norm of all gradients."""
        self.steady_runs = 1
        """How many micro-steps the fourth of five stands for: see `fxzero.graph.steady`."""
        self.pipeline: Pipeline | None = None
        """The pipeline of whose stages it holds some."""
        self.table: Table | None = None
        """Of a pipeline, what its ranks do, once micro-steps are ordered by it."""
        self.settings: dict[str, str] = {}
        """What it was compiled with that shows in no collective, and must be equal on all ranks."""
        self.unread: tuple[ParamSpec, ...] = ()
        """Parameters of its model that it does not read, and that ranks hold all the same: told to
        those who look at it."""
        self.in_common = ""
        """Of a pipeline, a digest of what its stages must see alike: what travels between them."""
        self.blocks: dict[str, tuple[str, ...]] = {}
        """By a parameter that travels block by block, the blocks whose gradients are its own: see
        the pass `tile_linear`."""
        self.left_out: list[LeftOut] = []
        """Equal layers that it does without until `fxzero.passes.expand_layers`."""
        self.skip: fx.Node | None = None
        """One if the update must not happen, else zero."""
        self.fake_mode = fake_mode_of(module.graph)
        self.pieces = Pieces(getattr(self.fake_mode, "shape_env", None))
        """What its calls call: see `fxzero.graph.pieces`."""
        self._values: dict[object, Any] = {}
        self._origin: fx.Node | None = None
        self._after_inputs: fx.Node | None = None

    @property
    def graph(self) -> fx.Graph:
        """The FX graph."""
        return self.module.graph

    @cached_property
    def labels(self) -> dict[str, str]:
        """By key, what a parameter is called in every process: its name, behind the place of its
        model among those of the graph if there are several."""
        numbers = sorted({spec.state.number for spec in self.specs.values()})
        several = len(numbers) > 1
        return {
            key: f"{numbers.index(spec.state.number)}/{spec.name}" if several else spec.name
            for key, spec in self.specs.items()
        }

    def add_blocks(self, specs: Iterable[ParamSpec]) -> None:
        """Know blocks of parameters as what travels for itself."""
        self.specs |= {spec.key: spec for spec in specs}
        vars(self).pop("labels", None)

    def owner_of(self, key: str) -> str:
        """The parameter that a key is of: its own, or that of which it is a block."""
        spec = self.specs.get(key)
        return spec.block.owner if spec is not None and spec.block is not None else key

    def is_block(self, transfer: TransferNodes) -> bool:
        """Whether a transfer carries a block of a parameter."""
        return any(self.owner_of(key) != key for key in transfer.stamp.params)

    @property
    def device(self) -> torch.device:
        """Where it computes: what is not on the CPU, if something is."""
        for node in self.graph.nodes:
            value = node.meta.get("val")
            for tensor in value if isinstance(value, (list, tuple)) else (value,):
                if isinstance(tensor, torch.Tensor) and tensor.device.type != "cpu":
                    return tensor.device
        return torch.device("cpu")

    @property
    def row(self) -> tuple[Action, ...]:
        """Of a pipeline, what this rank does, in order, once micro-steps are ordered."""
        if self.table is None or self.pipeline is None:
            return ()
        return self.table.ranks[self.pipeline.place]

    @property
    def identity(self) -> str:
        """What ranks call the model that it belongs to: models are sharded in one order. Of a
        pipeline each place has a graph of its own, and makes its own choices."""
        numbers = sorted({spec.state.number for spec in self.specs.values()})
        place = "" if self.pipeline is None else f" at {self.pipeline.place}"
        return "-".join(str(number) for number in numbers) + place

    @property
    def mutated(self) -> frozenset[fx.Node]:
        """Placeholders whose tensors the forward changes."""
        return frozenset(self.changed.values())

    @property
    def output(self) -> fx.Node:
        """The output node."""
        return next(iter(reversed(self.graph.nodes)))

    @property
    def output_values(self) -> tuple[Any, ...]:
        """What the graph returns: nodes, or None."""
        values = self.output.args[0]
        assert isinstance(values, (list, tuple))
        return tuple(values)

    def set_output_values(self, values: Iterable[Any]) -> None:
        """Replace what the graph returns."""
        self.output.args = (tuple(values),)

    def nodes(
        self,
        *,
        phase: Phase | None = None,
        role: Role | None = None,
        segment: Segment | None = None,
    ) -> Iterator[fx.Node]:
        """Nodes in launch order, of one phase, role or segment if asked."""
        boundary = role in (Role.INPUT, Role.OUTPUT)
        found = [n for n in self.graph.nodes if boundary or n.op not in ("placeholder", "output")]
        if role is not None:
            found = _with_role(found, role)
        if phase is not None:
            found = [node for node in found if stamp_of(node).phase is phase]
        if segment is not None:
            found = [node for node in found if stamp_of(node).segment == segment]
        return iter(found)

    def segments(self) -> list[Segment]:
        """The forwards and backwards of the step, in the order in which they run."""
        found = dict.fromkeys(stamp_of(n).segment for n in self.nodes() if n.op != "get_attr")
        inside = [segment for segment in found if segment.phase is not Phase.OPTIMIZER]
        if self.row:
            place = {segment_of(action): i for i, action in enumerate(self.row)}
            return sorted(inside, key=place.__getitem__)
        return sorted(inside, key=lambda s: (s.micro_step, s.phase is Phase.BACKWARD))

    def call(
        self,
        target: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
        *,
        stamp: Stamp,
        name: str | None = None,
        value: Any = None,
    ) -> fx.Node:
        """Make a node at the graph's insertion point, with stamp, ``val`` and provenance.

        Args:
            value: its fake value, for targets that cannot run on fake tensors.
        """
        node = create_node(self.graph, "call_function", target, args, kwargs or {}, name)
        set_stamp(node, stamp)
        for key in ("stack_trace", "nn_module_stack"):
            if self._origin is not None and key in self._origin.meta:
                node.meta[key] = self._origin.meta[key]
        node.meta["val"] = self.value_of(target, args, kwargs or {}) if value is None else value
        return node

    def input(self, name: str, value: Any, source: tuple[Any, ...]) -> fx.Node:
        """Make a graph input that Dynamo knows nothing of.

        Args:
            source: where its value comes from: see `fxzero.step.binding`.
        """
        with self.graph.inserting_before(self._first_call()):
            node = self.graph.placeholder(name)
        # The code of a graph has a placeholder's target as an argument, as it was given.
        node.target = node.name
        node.meta["val"] = value
        node.meta["fxzero_source"] = source
        set_stamp(node, Stamp(Phase.OPTIMIZER, role=Role.INPUT))
        return node

    def _first_call(self) -> fx.Node:
        """The first node that is no input: the one found before, most of the time."""
        found = self._after_inputs
        if found is None or found._erased or found.prev.op != "placeholder":
            found = next(node for node in self.graph.nodes if node.op != "placeholder")
            self._after_inputs = found
        return found

    @contextlib.contextmanager
    def made_for(self, node: fx.Node) -> Iterator[None]:
        """Let nodes made inside point to the user's line that `node` came from."""
        before, self._origin = self._origin, node
        try:
            yield
        finally:
            self._origin = before

    def value_of(self, target: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """The fake value of a call: run on fake tensors, once for equal arguments."""
        runs_as_is = target is operator.getitem or self.fake_mode is None
        key = None if runs_as_is else (target, _value_key((args, kwargs)))
        if key is not None and key in self._values:
            return self._values[key]
        fake_args, fake_kwargs = fx.map_arg((args, kwargs), lambda n: n.meta["val"])
        if self.fake_mode is None or key is None:
            return target(*fake_args, **fake_kwargs)
        with self.fake_mode, torch.no_grad():
            value = self._values[key] = target(*fake_args, **fake_kwargs)
        return value

    def transfers(
        self, *, phase: Phase | None = None, name: str = "", segment: Segment | None = None
    ) -> list[TransferNodes]:
        """All transfers, in launch order; of one phase or segment, and one lane by its name."""
        found = []
        for launch in self.nodes(phase=phase, segment=segment, role=Role.LAUNCH):
            if not name or stamp_of(launch).lane.value == name:
                found.append(transfer_nodes(launch))
        return found

    def clone(self) -> StepGraph:
        """A copy to rewrite. Fake values and constants are shared, stamps are frozen."""
        copies: dict[fx.Node, fx.Node] = {}
        graph = fx.Graph()
        for node in self.graph.nodes:
            copies[node] = copy_node(graph, node, copies.__getitem__)
        other = StepGraph(
            graph_module(self.module, graph),
            num_forward_outputs=self.num_forward_outputs,
            specs=self.specs,
            inputs={copies[node]: key for node, key in self.inputs.items()},
            gradients=self.gradients,
            changed={position: copies[node] for position, node in self.changed.items()},
            loss=self.loss,
        )
        other.pieces = self.pieces
        other.steady_runs = self.steady_runs
        other.pipeline, other.table, other.in_common = self.pipeline, self.table, self.in_common
        other.settings = dict(self.settings)
        other.unread = self.unread
        other.blocks = dict(self.blocks)
        other.left_out = [chain.moved(copies) for chain in self.left_out]
        for name in ("scale", "norm", "skip"):
            node = getattr(self, name)
            setattr(other, name, copies[node] if node is not None else None)
        return other

    def become(self, other: StepGraph) -> None:
        """Take the nodes of another graph, and all that is known of them: the other one is used
        up."""
        self.__dict__.update(other.__dict__)

    def reorder(self, order: Iterable[fx.Node]) -> None:
        """Put the call nodes into another order; inputs stay first, the output last."""
        output = self.output
        for node in order:
            output.prepend(node)

    def text(self) -> str:
        """The graph, a line a node: value, operator, and the stamp; then the pieces it calls."""
        lines = [node_line(node) for node in self.graph.nodes]
        for piece in called(self.graph.nodes):
            lines += ["", f"{piece.__name__}:"]
            lines += [f"    {node_line(node)}" for node in piece.body.nodes]
        return "\n".join(lines)


def _with_role(nodes: list[fx.Node], role: Role) -> list[fx.Node]:
    """Of some nodes those of one role: asked so often that a call for each would be noticed."""
    try:
        return [node for node in nodes if node.meta[STAMP].role is role]
    except KeyError:
        return [node for node in nodes if stamp_of(node).role is role]  # says which has none


def _index_of(part: fx.Node) -> int:
    index = part.args[1]
    assert isinstance(index, int)
    return index


def sent_by(launch: fx.Node) -> list[fx.Node]:
    """What a launch sends: a list, or in a model's own call one tensor."""
    sent = launch.args[0] if launch.args else ()
    tensors = sent if isinstance(sent, (list, tuple)) else (sent,)
    return [node for node in tensors if isinstance(node, fx.Node)]


def transfer_nodes(launch: fx.Node) -> TransferNodes:
    """The nodes of the transfer that a node launches.

    Raises:
        VerificationError: nothing waits for it.
    """
    wait = next((user for user in launch.users if stamp_of(user).role is Role.WAIT), None)
    if wait is None:
        raise VerificationError(f"nothing waits for the transfer {launch.name}")
    parts = [u for u in wait.users if u.op != "output" and stamp_of(u).role is Role.PART]
    parts.sort(key=_index_of)  # in the order of the tensors that were sent
    read = [user for part in parts for user in part.users]
    return TransferNodes(
        launch=launch,
        wait=wait,
        prepare=tuple(_closure(launch.all_input_nodes, Role.PREPARE, lambda n: n.all_input_nodes)),
        parts=tuple(parts or [wait]),
        finish=tuple(_closure(read, Role.FINISH, lambda n: list(n.users))),
    )


def _value_key(argument: Any) -> Any:
    """Equal for arguments of equal shapes, strides, dtypes and devices."""
    if isinstance(argument, fx.Node):
        return _value_key(argument.meta["val"])
    if isinstance(argument, torch.Tensor):
        layout: tuple[Any, ...] = (argument.shape, argument.stride())
        if has_symbolic_shape(argument):  # symbols do not hash: their text stands for them
            layout = tuple(map(str, layout))
        return (*layout, argument.dtype, argument.device)
    if isinstance(argument, (list, tuple)):
        return tuple(map(_value_key, argument))
    if isinstance(argument, dict):
        return tuple((name, _value_key(value)) for name, value in argument.items())
    return repr(argument)


def _closure(
    seeds: Iterable[fx.Node], role: Role, following: Callable[[fx.Node], list[fx.Node]]
) -> list[fx.Node]:
    """Nodes of one role that are reached through nodes of that role, in graph order."""
    found: dict[fx.Node, None] = {}
    queue = list(seeds)
    while queue:
        node = queue.pop()
        if node in found or node.op != "call_function" or stamp_of(node).role is not role:
            continue
        found[node] = None
        queue.extend(following(node))
    return sorted(found)
