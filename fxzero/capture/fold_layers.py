"""Trace equal layers once: a hundred of them cost AOTAutograd one.

    Dynamo's graph    x_1 = …thirty calls…(x, w_0);  x_2 = …the same thirty…(x_1, w_1)
    folded            x_1 = call_layer(7, x, w_0);   x_2 = call_layer(8, x_1, w_1)
    joint graph       layer_forward and layer_backward, one node each per layer
    unfolded          the layer's own nodes again, forward and backward, for every call

AOTAutograd traces the folded graph, and one layer of each kind on its own. After
`unfold` nobody can tell the difference, but for the names of nodes. What is no run equal to
another one (see `layer_runs`) is traced as it stands; and so are layers of several outputs of
which only some turn out to have gradients, as soon as that is known.
"""

from __future__ import annotations

import functools
import itertools
import logging
import operator
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, fx, nn

from fxzero import _compat
from fxzero.capture.layer_runs import Run, equal_runs
from fxzero.graph import constants

log = logging.getLogger("fxzero")

T = TypeVar("T")


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
    def stacks(self) -> dict[fx.Node, str]:
        """The modules that each node comes from, as text."""
        return {node: _stack_key(node) for node in self.graph.nodes}

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
    # Dynamo traced in another mode.
    inputs = [
        _compat.empty_fake(v, fake_mode).requires_grad_(v.requires_grad and joint) for v in examples
    ]
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
    """A layer was traced in the mode in which the whole graph is."""
    return _compat.empty_fake(value, _compat.fake_mode_of_tensor(value))


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
        self._stacks = layer.stacks
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
                own = (self._keys.get(a, a) if isinstance(a, str) else a for a in copy.args)
                _compat.set_args(copy, tuple(own))
            meta = dict(node.meta)
            if (sequence := meta.get("seq_nr")) is not None:
                meta["seq_nr"] = self._first_sequence + sequence
            if (modules := self._modules.get(self._stacks[node])) is not None:
                meta["nn_module_stack"] = modules
            _compat.set_meta(copy, meta)
            self._copies[node] = copy
        return [self._copies[node] for node in wanted]

    def replace(
        self, call: fx.Node, values: Sequence[fx.Node], graph: fx.Graph
    ) -> dict[fx.Node, fx.Node]:
        """Put copies in the place of a call, for what is read of it.

        Returns:
            Parts of the call that the graph returns, with what it shall return instead: one by
            one, each of a thousand gradients would go through the list of all of them.
        """
        parts = list(call.users)
        with graph.inserting_before(call):
            copies = self.nodes([values[part.args[1]] for part in parts], graph)  # type: ignore[index]
        returned: dict[fx.Node, fx.Node] = {}
        for part, value in zip(parts, copies, strict=True):
            part.replace_all_uses_with(value, delete_user_cb=lambda user: user.op != "output")
            if part.users:
                returned[part] = value
            else:
                graph.erase_node(part)
        if not call.users:
            graph.erase_node(call)
        return returned


def _stack_key(node: fx.Node) -> str:
    return str(node.meta.get("nn_module_stack"))


def unfold(module: fx.GraphModule, folds: Folds) -> None:
    """Put the layers' own nodes back into a traced graph, in place."""
    graph = module.graph
    constants.record(module)
    last = max((n.meta.get("seq_nr") or 0 for n in graph.nodes), default=0)
    copies: dict[int, _Copy] = {}
    returned: dict[fx.Node, fx.Node] = {}
    for node in list(graph.nodes):
        if node.target is _FORWARD:
            inputs, number = node.args
            layer, run = folds.layers[number]
            copy = copies[number] = _Copy(layer, run, last + 1, module)
            last += 1 + layer.last_sequence
            copy.bind(layer.placeholders[: len(inputs)], inputs)
            returned |= copy.replace(node, layer.outputs, graph)
        elif node.target is _BACKWARD:
            gradients, number = node.args
            layer, run = folds.layers[number]
            copy = copies[number]
            copy.bind(layer.placeholders[len(run.inputs) :], gradients)
            returned |= copy.replace(node, layer.gradients, graph)
    _return(graph, returned)
    if copies:
        module.recompile()


def _return(graph: fx.Graph, replaced: dict[fx.Node, fx.Node]) -> None:
    """Let a graph return other nodes than some of its own, which go with the calls that they are
    parts of."""
    if not replaced:
        return

    def end(node: fx.Node) -> fx.Node:
        while node in replaced:
            node = replaced[node]
        return node

    output = graph.output_node()
    output.args = fx.map_arg(output.args, end)
    calls = dict.fromkeys(part.all_input_nodes[0] for part in replaced)
    for node in (*replaced, *calls):
        graph.erase_node(node)
