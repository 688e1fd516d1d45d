"""Trace equal layers once: a hundred of them cost AOTAutograd one.

    Dynamo's graph    x_1 = …thirty calls…(x, w_0);  x_2 = …the same thirty…(x_1, w_1)
    folded            x_1 = call_layer(7, x, w_0);   x_2 = call_layer(8, x_1, w_1)
    joint graph       layer_forward and layer_backward, one node each per call

AOTAutograd traces the folded graph, and one layer of each kind on its own. Of layers that pass
their result on to each other one call stands for all but the first and the last few. In the
joint graph `fxzero.capture.unfold_layers` puts the layers' own nodes in the place of the calls.
What is no run equal to another one (see `layer_runs`) is traced as it stands; and so are layers
of several outputs of which only some turn out to have gradients, as soon as that is known.
"""

from __future__ import annotations

import functools
import itertools
import logging
import operator
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, fx, nn

from fxzero import _compat
from fxzero.capture.layer_runs import Chain, Run, chains, equal_runs
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

    @property
    def gradient_of_input(self) -> list[fx.Node | None]:
        """The gradients of the inputs, None of those that have none; empty in inference."""
        return self._values[len(self.run.outputs) :]

    @property
    def gradients(self) -> list[fx.Node]:
        """The gradients of the inputs that have one."""
        return [value for value in self.gradient_of_input if value is not None]

    @functools.cached_property
    def stacks(self) -> dict[fx.Node, str]:
        """The modules that each node comes from, as text."""
        return {node: str(node.meta.get("nn_module_stack")) for node in self.graph.nodes}

    @functools.cached_property
    def last_sequence(self) -> int:
        """The largest sequence number in the graph."""
        return max((n.meta.get("seq_nr") or 0 for n in self.graph.nodes), default=0)


@dataclass(frozen=True)
class Call:
    """What a node of a folded graph stands for."""

    layer: Layer
    chain: Chain
    hidden: tuple[int | None, ...]
    """By input of the chain, which of the graph's inputs it is, if AOTAutograd shall not see that
    the chain reads it: it would take each of a thousand parameters through six layers of its own.
    `fxzero.capture.folded.reveal` puts it right."""
    before: tuple[Run, ...] = ()
    """Of the middle of a chain: the runs right before it, which have calls of their own."""
    behind: tuple[Run, ...] = ()

    @property
    def is_hidden(self) -> bool:
        """Whether AOTAutograd does not see all that it reads."""
        return any(i is not None for i in self.hidden)

    def shown(self, by_input: Iterable[T]) -> list[T]:
        """Of what is known by input of the chain, that of those that AOTAutograd sees."""
        pairs = zip(by_input, self.hidden, strict=True)
        return [value for value, hidden in pairs if hidden is None]

    @functools.cached_property
    def wanted(self) -> tuple[bool, ...]:
        """By input, whether it has a gradient; empty in inference."""
        return self.chain.per_input(self.layer.wanted) if self.layer.wanted else ()

    @functools.cached_property
    def gradients(self) -> tuple[fx.Node | None, ...]:
        """By input, the layer's value that is its gradient; empty in inference."""
        return self.chain.per_input(self.layer.gradient_of_input) if self.layer.wanted else ()

    @functools.cached_property
    def shown_gradients(self) -> list[fx.Node]:
        """Those that AOTAutograd sees."""
        if not self.wanted:
            return []
        return [value for value in self.shown(self.gradients) if value is not None]


@dataclass
class Folds:
    """The folded layers of one compilation."""

    calls: dict[int, Call] = field(default_factory=dict)
    """What the calls in the graph stand for, by number."""

    @property
    def leave_out(self) -> bool:
        """Whether a graph could do without some of the layers."""
        return any(call.behind for call in self.calls.values())

    def __enter__(self) -> Folds:
        _calls.update(self.calls)
        return self

    def __exit__(self, *_: object) -> None:
        for number in self.calls:
            _calls.pop(number, None)


_numbers = itertools.count()
_calls: dict[int, Call] = {}
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
    nodes: dict[fx.Node, Chain] = {}
    inputs = {node: i for i, node in enumerate(module.graph.find_nodes(op="placeholder"))}
    for equal in kinds:
        layer = trace_layer(equal[0], decompositions, fake_mode)
        for part in _parts(layer, equal, inputs) if layer is not None else ():
            number = next(_numbers)
            folds.calls[number] = part
            nodes[_call(module.graph, part, number)] = part.chain
    for node, chain in nodes.items():
        _take_outputs(module.graph, chain.runs[-1], node)
    replaced = [run for chain in nodes.values() for run in chain.runs]
    for run in reversed(replaced):
        for node in reversed(run.nodes):
            module.graph.erase_node(node)
    if folds.calls:
        module.recompile()
    log.info("folded %d equal layers", len(replaced))
    return folds


KEPT = (3, 2)
"""How many layers of a chain have calls of their own at its beginning, and at its end: what is
next to something else than an equal layer may be treated differently, and so may its neighbour.
The one between is the example for those that are left out: see `fxzero.passes.expand_layers`."""
LEAST_LEFT_OUT = 2


def _parts(layer: Layer, equal: list[Run], numbers: Mapping[fx.Node, int]) -> Iterator[Call]:
    """The calls that stand for equal runs: one for each, but for the middle of a long chain.

    Args:
        numbers: of the graph's inputs.
    """

    def singly(runs: Iterable[Run]) -> Iterator[Call]:
        for run in runs:
            yield Call(layer, Chain((run,)), (None,) * len(run.inputs))

    first, last = KEPT
    for chain in chains(equal):
        count = len(chain.runs)
        # Backward comes to the parameters of a chain through what is passed on.
        reached = not any(layer.wanted) or layer.wanted[chain.passed]
        if count < first + last + LEAST_LEFT_OUT or not reached:
            yield from singly(chain.runs)
            continue
        yield from singly(chain.runs[:first])
        middle = chain.part(first, count - last)
        own = set(middle.own)
        of_first = ((i, node) for i, node in enumerate(middle.runs[0].inputs))
        hidden = [numbers[node] if i in own else None for i, node in of_first]
        hidden += [numbers[run.inputs[i]] for run in middle.runs[1:] for i in middle.own]
        yield Call(layer, middle, tuple(hidden), chain.runs[:first], chain.runs[-last:])
        yield from singly(chain.runs[-last:])


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


def _call(graph: fx.Graph, of: Call, number: int) -> fx.Node:
    """Put a call next to the runs that it will replace."""
    last = of.chain.runs[-1]
    with graph.inserting_before(of.chain.runs[0].nodes[0]):
        call = graph.call_function(call_layer, (number, *of.shown(of.chain.inputs)))
    call.meta = dict(last.outputs[-1].meta)
    call.meta["example_value"] = tuple(node.meta["example_value"] for node in last.outputs)
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
    """Stand in for a folded layer, or a chain of them, while its model is traced."""
    if _calls[number].shown_gradients:
        return _Call.apply(number, *inputs)
    return tuple(torch.ops.fxzero.layer_forward(list(inputs), number))


class _Call(torch.autograd.Function):
    """The derivative of a folded layer is another opaque call."""

    @staticmethod
    def forward(ctx: Any, number: int, *inputs: Tensor) -> tuple[Tensor, ...]:
        layer = _calls[number].layer
        ctx.number = number
        ctx.set_materialize_grads(False)
        outputs = tuple(torch.ops.fxzero.layer_forward(list(inputs), number))
        kinds = zip(outputs, layer.run.differentiable, strict=True)
        ctx.mark_non_differentiable(*(output for output, has_grad in kinds if not has_grad))
        return outputs

    @staticmethod
    def backward(ctx: Any, *all_grads: Tensor | None) -> tuple[Tensor | None, ...]:
        call = _calls[ctx.number]
        kinds = zip(all_grads, call.layer.run.differentiable, strict=True)
        grads = [grad for grad, has_grad in kinds if has_grad]
        given = [grad.contiguous() for grad in grads if grad is not None]
        wanted = call.shown(call.wanted)
        if not given:
            return None, *(None for _ in wanted)
        if len(given) < len(grads):
            raise _PartOfGradientsError
        # What the layer read is known from its forward, whatever has been written there since.
        found = iter(torch.ops.fxzero.layer_backward(given, ctx.number))
        return None, *(next(found) if has_grad else None for has_grad in wanted)


def _forward_fake(inputs: list[Tensor], number: int) -> list[Tensor]:
    return [_like(output.meta["val"]) for output in _calls[number].layer.outputs]


def _backward_fake(grads: list[Tensor], number: int) -> list[Tensor]:
    return [_like(gradient.meta["val"]) for gradient in _calls[number].shown_gradients]


def _like(value: Tensor) -> Tensor:
    """A layer was traced in the mode in which the whole graph is."""
    return _compat.empty_fake(value, _compat.fake_mode_of_tensor(value))


_library = torch.library.Library("fxzero", "FRAGMENT")
_library.define("layer_forward(Tensor[] inputs, int number) -> Tensor[]")
_library.define("layer_backward(Tensor[] grads, int number) -> Tensor[]")
torch.library.register_fake("fxzero::layer_forward", _forward_fake, lib=_library)
torch.library.register_fake("fxzero::layer_backward", _backward_fake, lib=_library)

FORWARD = torch.ops.fxzero.layer_forward.default
# Backward needs to know what its forward read, even if nobody reads what it returned.
fx.node.has_side_effect(FORWARD)
BACKWARD = torch.ops.fxzero.layer_backward.default
