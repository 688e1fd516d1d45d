"""Trace equal layers once: a hundred of them cost AOTAutograd one.

    Dynamo's graph    x_1 = …thirty calls…(x, w_0);  x_2 = …the same thirty…(x_1, w_1)
    folded            x_1 = call_layer(7, x, w_0);   x_2 = call_layer(8, x_1, w_1)
    joint graph       layer_forward and layer_backward, one node each per layer
    unfolded          the layer's own nodes again, forward and backward, for every call

AOTAutograd traces the folded graph, and one layer of each kind on its own. After
`unfold` nobody can tell the difference, but for the names of nodes. A layer is folded when
it is a run of calls with plain outputs, equal to another run in everything that tracing
looks at. What is not (a layer that writes its input, returns a view of it, or has symbolic
shapes) is traced as it stands; and so are layers of several outputs of which only some turn
out to have gradients, as soon as that is known.
"""

from __future__ import annotations

import functools
import itertools
import logging
import operator
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, fx, nn

from fxzero import _compat
from fxzero._compat import set_grad_enabled
from fxzero.graph import constants
from fxzero.graph.modules import module_path
from fxzero.sharding.params import is_key, layer_of

log = logging.getLogger("fxzero")

T = TypeVar("T")


@dataclass(frozen=True)
class Run:
    """The calls of one layer in Dynamo's graph, which follow each other but for views."""

    nodes: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    """What it reads from outside, in the order of first use."""
    keys: tuple[str, ...]
    """The parameters that its markers name, in the order of first use."""
    outputs: tuple[fx.Node, ...]
    """Its values that are read outside."""
    structure: tuple[Any, ...]
    """Equal for runs that trace to the same graph but for names."""

    @property
    def differentiable(self) -> tuple[bool, ...]:
        """By output, whether a gradient may be asked for."""
        return tuple(node.meta["example_value"].requires_grad for node in self.outputs)


@dataclass(frozen=True)
class Layer:
    """The joint graph of a kind of layer: inputs and gradients in, outputs and gradients out."""

    graph: fx.Graph
    run: Run
    """The run that it was traced from."""

    @functools.cached_property
    def placeholders(self) -> list[fx.Node]:
        """The layer's inputs, then the gradients of its outputs that may have one."""
        return list(self.graph.find_nodes(op="placeholder"))

    @functools.cached_property
    def _values(self) -> list[Any]:
        values = next(iter(reversed(self.graph.nodes))).args[0]
        return list(values)

    @property
    def outputs(self) -> list[fx.Node]:
        """The layer's outputs."""
        return self._values[: len(self.run.outputs)]

    @functools.cached_property
    def wanted(self) -> list[bool]:
        """Which inputs have a gradient; empty in inference."""
        return [value is not None for value in self._values[len(self.run.outputs) :]]

    @functools.cached_property
    def gradients(self) -> list[fx.Node]:
        """The gradients of the inputs that have one."""
        return [value for value in self._values[len(self.run.outputs) :] if value is not None]

    @functools.cached_property
    def last_sequence(self) -> int:
        """The largest sequence number in the graph."""
        return max((n.meta.get("seq_nr") or 0 for n in self.graph.nodes), default=0)


@dataclass
class Folds:
    """The folded layers of one compilation."""

    layers: dict[int, tuple[Layer, Run]] = field(default_factory=dict)
    """What the calls in the graph stand for, by number."""

    def __enter__(self) -> Folds:
        _calls.update(self.layers)
        return self

    def __exit__(self, *_: object) -> None:
        for number in self.layers:
            _calls.pop(number, None)
        self.layers.clear()  # they hold graphs, and have been unfolded


_numbers = itertools.count()
_calls: dict[int, tuple[Layer, Run]] = {}
"""The layers of the graphs being traced: an operator's kernel has only a number to go by."""


class _PartOfGradientsError(Exception):
    """Of a folded layer's outputs only some have a gradient."""


def trace_folded(
    module: fx.GraphModule,
    decompositions: dict[Any, Callable[..., Any]],
    trace: Callable[[Folds], T],
) -> T:
    """Fold a graph's equal layers and trace what is left.

    Args:
        module: Dynamo's graph, changed in place.
        decompositions: those with which AOTAutograd will trace it.
        trace: runs AOTAutograd on the module; called again, with fewer folds, where a gradient
            of zeros would have to stand for one that does not exist.

    Returns:
        What `trace` returns.
    """
    kinds = equal_runs(module.graph)
    before = _copied(module.graph) if any(len(runs[0].outputs) > 1 for runs in kinds) else None
    try:
        with warnings.catch_warnings(), fold_layers(module, kinds, decompositions) as folds:
            warnings.filterwarnings("ignore", f"Error detected in {_Call.__name__}")
            return trace(folds)
    except _PartOfGradientsError:
        assert before is not None
        module.graph = before
    kinds = [runs for runs in equal_runs(module.graph) if len(runs[0].outputs) == 1]
    with fold_layers(module, kinds, decompositions) as folds:
        return trace(folds)


def _copied(graph: fx.Graph) -> fx.Graph:
    """The same nodes again, with the same names and what Dynamo knows of them."""
    copy = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        copies[node] = copy.node_copy(node, copies.__getitem__)
        _compat.copy_input_source(node, copies[node])
    return copy


def fold_layers(
    module: fx.GraphModule,
    kinds: Iterable[list[Run]],
    decompositions: dict[Any, Callable[..., Any]],
) -> Folds:
    """Replace equal layers of Dynamo's graph by calls.

    Args:
        module: Dynamo's graph, changed in place.
        kinds: see `equal_runs`.
        decompositions: those with which AOTAutograd will trace it.

    Returns:
        What the calls stand for; a context inside of which the graph can be traced.
    """
    folds = Folds()
    fake_mode = _compat.tracing_fake_mode()
    if fake_mode is None:
        return folds
    calls: dict[fx.Node, Run] = {}
    for equal in kinds:
        layer = trace_layer(equal[0], decompositions, fake_mode)
        if layer is not None:
            for run in equal:
                number = next(_numbers)
                folds.layers[number] = (layer, run)
                calls[_call(module.graph, run, number)] = run
    for call, run in calls.items():
        _take_outputs(module.graph, run, call)
    for run in calls.values():
        for node in reversed(run.nodes):
            module.graph.erase_node(node)
    if folds.layers:
        module.recompile()
    log.info("folded %d equal layers", len(folds.layers))
    return folds


def equal_runs(graph: fx.Graph) -> list[list[Run]]:
    """The runs that could be folded, by structure, where there is more than one.

    What only tells torch's own statistics something, in the middle of some layers, is erased.
    """
    for node in graph.find_nodes(op="call_function", target=_compat.log_usage()):
        graph.erase_node(node)
    kinds: dict[tuple[Any, ...], list[Run]] = defaultdict(list)
    for run in layer_runs(graph):
        kinds[run.structure].append(run)
    return [runs for runs in kinds.values() if len(runs) > 1]


def layer_runs(graph: fx.Graph) -> Iterator[Run]:
    """The runs of Dynamo's graph that could be folded."""
    within = inside_contexts(graph)
    if within is None:
        return
    for path, nodes in itertools.groupby(
        (n for n in graph.nodes if n.op not in ("placeholder", "output")),
        key=lambda n: layer_of(module_path(n) or ""),
    ):
        run_nodes = _without_last_views(tuple(nodes))
        run = _as_run(run_nodes) if path and run_nodes and within.isdisjoint(run_nodes) else None
        if run is not None:
            yield run


def _without_last_views(nodes: tuple[fx.Node, ...]) -> tuple[fx.Node, ...]:
    """A layer without what is read outside alone and only looks at a value of its own.

    AOTAutograd traces no function that returns such views: of a layer that ends in
    ``(x + y).view(shape)``, or hands out a slice of what it keeps, they stay outside.
    """
    inside = dict.fromkeys(nodes)
    for node in reversed(nodes):
        if _is_view(node) and inside.keys().isdisjoint(node.users):
            del inside[node]
    return tuple(inside)


_MAY_RETURN_ITS_INPUT = frozenset({"to", "contiguous", "type_as", "float", "cpu", "cuda"})
"""Methods that have nothing to do where their input is already what they are asked for."""


def _is_view(node: fx.Node) -> bool:
    """Whether a value lies in the memory of one that it was made of, and nothing was written."""
    value = node.meta.get("example_value")
    if not isinstance(value, Tensor) or not _compat.is_plain_fake(value):
        return False
    sources = [source.meta.get("example_value") for source in node.all_input_nodes]
    if any(source is value for source in sources):
        return node.op == "call_method" and node.target in _MAY_RETURN_ITS_INPUT
    return any(
        _compat.storage_identity(value) == _compat.storage_identity(source)
        for source in sources
        if isinstance(source, Tensor) and _compat.is_plain_fake(source)
    )


def inside_contexts(graph: fx.Graph) -> set[fx.Node] | None:
    """The calls inside of a context such as autocast or no_grad, where they mean other things.

    None if there are calls without a value that are not known to begin or end a context.
    """
    depth = 0
    has_grad = torch.is_grad_enabled()
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op not in ("call_function", "call_method"):
            continue
        if "example_value" not in node.meta:
            name = getattr(node.target, "__name__", "")
            if node.target is set_grad_enabled:
                has_grad = bool(node.args[0])
            elif name.startswith("_enter_"):
                depth += 1
            elif name.startswith("_exit_"):
                depth -= 1
            elif node.target is not operator.setitem:  # a write, which no layer is that has one
                return None
            found.add(node)
        elif depth or has_grad is not torch.is_grad_enabled():
            found.add(node)
    return found


def _as_run(nodes: tuple[fx.Node, ...]) -> Run | None:
    """Describe consecutive nodes, if they have the form of a layer."""
    inside = set(nodes)
    outputs = tuple(n for n in nodes if any(user not in inside for user in n.users))
    if not outputs or any(n.op == "get_attr" for n in nodes):
        return None
    inputs: dict[fx.Node, int] = {}
    keys: dict[str, int] = {}
    position = {node: i for i, node in enumerate(nodes)}

    def describe(argument: Any) -> Any:
        if isinstance(argument, fx.Node):
            if argument in position:
                return ("node", position[argument])
            return ("input", inputs.setdefault(argument, len(inputs)))
        if isinstance(argument, str) and is_key(argument):
            return ("key", keys.setdefault(argument, len(keys)))
        return ("value", type(argument).__name__, repr(argument))

    structure = []
    for node in nodes:
        described = [
            _nested(describe, node.args),
            _nested(describe, tuple(sorted(node.kwargs.items()))),
        ]
        structure.append((node.op, node.target, *described, _describe_value(node)))
    values = [_describe_value(node) for node in inputs]
    if None in values or any(entry[-1] is None for entry in structure):
        return None
    if not all(map(_is_plain_output, outputs)):
        return None
    structure += values
    structure.append(("outputs", *(position[output] for output in outputs)))
    return Run(nodes, tuple(inputs), tuple(keys), outputs, tuple(structure))


def _nested(describe: Callable[[Any], Any], argument: Any) -> Any:
    """Apply a function to the leaves of nested tuples, lists, dicts and slices."""
    if isinstance(argument, (list, tuple)):
        return (type(argument).__name__, *(_nested(describe, a) for a in argument))
    if isinstance(argument, dict):
        return ("dict", *((k, _nested(describe, v)) for k, v in argument.items()))
    if isinstance(argument, slice):
        parts = (argument.start, argument.stop, argument.step)
        return ("slice", *(_nested(describe, p) for p in parts))
    return describe(argument)


def _describe_value(node: fx.Node) -> Any:
    """All that tracing sees of a value; None for what cannot be folded."""
    value = node.meta.get("example_value")
    if isinstance(value, (list, tuple)):
        parts = tuple("None" if v is None else _describe_tensor(v) for v in value)
        return None if None in parts else (type(value).__name__, parts)
    return _describe_tensor(value)


def _describe_tensor(value: Any) -> Any:
    if not _compat.is_plain_fake(value) or _compat.has_symbolic_shape(value):
        return None
    layout = (tuple(value.shape), value.stride(), value.storage_offset())
    return (*layout, value.dtype, value.device, value.requires_grad, value.is_conj())


def _is_plain_output(node: fx.Node) -> bool:
    """Whether a gradient of this value can be asked for in the value's own layout, if at all."""
    value = node.meta["example_value"]
    if not isinstance(value, Tensor):
        return False
    return not value.requires_grad or (value.is_contiguous() and value.is_floating_point())


def trace_layer(
    run: Run, decompositions: dict[Any, Callable[..., Any]], fake_mode: Any
) -> Layer | None:
    """Trace the joint graph of a run; None if AOTAutograd cannot trace it alone."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in run.inputs:
        copies[node] = graph.placeholder(node.name)
    for node in run.nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[output] for output in run.outputs))
    examples = [node.meta["example_value"] for node in run.inputs]
    joint = torch.is_grad_enabled() and any(run.differentiable)
    with fake_mode:  # Dynamo traced in another one
        inputs = [_like(v).requires_grad_(v.requires_grad and joint) for v in examples]
    run_layer = _compat.interpreted(fx.GraphModule(nn.Module(), graph))
    traced = _compat.trace_joint(run_layer, inputs, decompositions, joint, fake_mode)
    if traced is None:
        return None
    constants.record(traced)
    return Layer(traced.graph, run)


def _call(graph: fx.Graph, run: Run, number: int) -> fx.Node:
    """Put a call next to the run that it will replace."""
    with graph.inserting_before(run.nodes[0]):
        call = graph.call_function(call_layer, (number, *run.inputs))
    call.meta = dict(run.outputs[-1].meta)
    call.meta["example_value"] = tuple(node.meta["example_value"] for node in run.outputs)
    return call


def _take_outputs(graph: fx.Graph, run: Run, call: fx.Node) -> None:
    """Let what reads a run's outputs read the call's."""
    after = call
    for i, output in enumerate(run.outputs):
        with graph.inserting_after(after):
            after = graph.call_function(operator.getitem, (call, i))
        after.meta = dict(output.meta)
        output.replace_all_uses_with(after)


def call_layer(number: int, *inputs: Tensor) -> tuple[Tensor, ...]:
    """Stand in for a folded layer while its model is traced."""
    layer, _ = _calls[number]
    if any(layer.wanted):
        return _Call.apply(number, *inputs)
    return tuple(torch.ops.fxzero.layer_forward(list(inputs), number))


class _Call(torch.autograd.Function):
    """The derivative of a folded layer is another opaque call."""

    @staticmethod
    def forward(ctx: Any, number: int, *inputs: Tensor) -> tuple[Tensor, ...]:
        layer, _ = _calls[number]
        ctx.number = number
        ctx.set_materialize_grads(False)
        outputs = tuple(torch.ops.fxzero.layer_forward(list(inputs), number))
        kinds = zip(outputs, layer.run.differentiable, strict=True)
        ctx.mark_non_differentiable(*(output for output, has_grad in kinds if not has_grad))
        return outputs

    @staticmethod
    def backward(ctx: Any, *all_grads: Tensor | None) -> tuple[Tensor | None, ...]:
        layer, _ = _calls[ctx.number]
        kinds = zip(all_grads, layer.run.differentiable, strict=True)
        grads = [grad for grad, has_grad in kinds if has_grad]
        given = [grad.contiguous() for grad in grads if grad is not None]
        if not given:
            return None, *(None for _ in layer.wanted)
        if len(given) < len(grads):
            raise _PartOfGradientsError
        # What the layer read is known from its forward, whatever has been written there since.
        found = iter(torch.ops.fxzero.layer_backward(given, ctx.number))
        return None, *(next(found) if wanted else None for wanted in layer.wanted)


def _forward_fake(inputs: list[Tensor], number: int) -> list[Tensor]:
    layer, _ = _calls[number]
    return [_like(output.meta["val"]) for output in layer.outputs]


def _backward_fake(grads: list[Tensor], number: int) -> list[Tensor]:
    layer, _ = _calls[number]
    return [_like(gradient.meta["val"]) for gradient in layer.gradients]


def _like(value: Tensor) -> Tensor:
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)


_library = torch.library.Library("fxzero", "FRAGMENT")
_library.define("layer_forward(Tensor[] inputs, int number) -> Tensor[]")
_library.define("layer_backward(Tensor[] grads, int number) -> Tensor[]")
torch.library.register_fake("fxzero::layer_forward", _forward_fake, lib=_library)
torch.library.register_fake("fxzero::layer_backward", _backward_fake, lib=_library)

_FORWARD = torch.ops.fxzero.layer_forward.default
# Backward needs to know what its forward read, even if nobody reads what it returned.
fx.node.has_side_effect(_FORWARD)
_BACKWARD = torch.ops.fxzero.layer_backward.default
_MARKERS = (torch.ops.fxzero.unshard.default, torch.ops.fxzero.reshard_grad.default)


class _Copy:
    """A layer's nodes in a joint graph, as one of its runs has them."""

    def __init__(self, layer: Layer, run: Run, first_sequence: int, module: nn.Module):
        self._module = module
        self._first_sequence = first_sequence
        self._keys = dict(zip(layer.run.keys, run.keys, strict=True))
        self._modules = {
            _stack_key(theirs): ours.meta.get("nn_module_stack")
            for theirs, ours in zip(layer.run.nodes, run.nodes, strict=True)
        }
        self._copies: dict[fx.Node, fx.Node] = {}

    def bind(self, placeholders: Iterable[fx.Node], values: Iterable[fx.Node]) -> None:
        """Say what the layer's graph reads."""
        self._copies.update(zip(placeholders, values, strict=True))

    def nodes(self, wanted: Sequence[fx.Node], graph: fx.Graph) -> list[fx.Node]:
        """The copies of some nodes, made at the graph's insertion point with all they need."""
        needed: set[fx.Node] = set()
        queue = [n for n in wanted if n not in self._copies]
        while queue:
            node = queue.pop()
            if node not in needed:
                needed.add(node)
                queue.extend(n for n in node.all_input_nodes if n not in self._copies)
        for node in sorted(needed):
            is_constant = node.op == "get_attr"
            copy = _compat.create_node(
                graph,
                node.op,
                constants.adopt(self._module, node) if is_constant else node.target,
                fx.map_arg(node.args, self._copies.__getitem__),
                fx.map_arg(node.kwargs, self._copies.__getitem__),
                node.name,
            )
            if node.target in _MARKERS:
                copy.args = tuple(
                    self._keys.get(a, a) if isinstance(a, str) else a for a in copy.args
                )
            copy.meta = dict(node.meta)
            if (sequence := node.meta.get("seq_nr")) is not None:
                copy.meta["seq_nr"] = self._first_sequence + sequence
            if (modules := self._modules.get(_stack_key(node))) is not None:
                copy.meta["nn_module_stack"] = modules
            self._copies[node] = copy
        return [self._copies[node] for node in wanted]

    def replace(self, call: fx.Node, values: Sequence[fx.Node], graph: fx.Graph) -> None:
        """Put copies in the place of a call, for what is read of it."""
        parts = list(call.users)
        with graph.inserting_before(call):
            copies = self.nodes([values[part.args[1]] for part in parts], graph)  # type: ignore[index]
        for part, value in zip(parts, copies, strict=True):
            part.replace_all_uses_with(value)
            graph.erase_node(part)
        graph.erase_node(call)


def _stack_key(node: fx.Node) -> str:
    return str(node.meta.get("nn_module_stack"))


def unfold(module: fx.GraphModule, folds: Folds) -> None:
    """Put the layers' own nodes back into a traced graph, in place."""
    graph = module.graph
    constants.record(module)
    last = max((n.meta.get("seq_nr") or 0 for n in graph.nodes), default=0)
    copies: dict[int, _Copy] = {}
    for node in list(graph.nodes):
        if node.target is _FORWARD:
            inputs, number = node.args
            layer, run = folds.layers[number]
            copy = copies[number] = _Copy(layer, run, last + 1, module)
            last += 1 + layer.last_sequence
            copy.bind(layer.placeholders[: len(inputs)], inputs)
            copy.replace(node, layer.outputs, graph)
        elif node.target is _BACKWARD:
            gradients, number = node.args
            layer, run = folds.layers[number]
            copy = copies[number]
            copy.bind(layer.placeholders[len(run.inputs) :], gradients)
            copy.replace(node, layer.gradients, graph)
    if copies:
        module.recompile()
