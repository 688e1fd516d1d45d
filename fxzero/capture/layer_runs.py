"""Find the layers of Dynamo's graph that trace alike.

    x_1 = …thirty calls…(x, w_0);  x_2 = …the same thirty…(x_1, w_1);  y = head(x_2)
    └── a run ─────────────────┘   └── an equal one ───────────────┘

A run is what one layer calls, with plain outputs; it is equal to another one in everything that
tracing looks at. What writes its inputs, returns views of them, has symbolic shapes or stands in a
context (autocast, no_grad) is none.
"""

from __future__ import annotations

import itertools
import operator
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, fx

from fxzero import _compat
from fxzero._compat import set_grad_enabled
from fxzero.graph.modules import module_path
from fxzero.sharding.params import is_key, layer_of, spec_of

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
            # Layers of other stages of a pipeline are others, on every rank alike.
            return ("key", keys.setdefault(argument, len(keys)), spec_of(argument).stages)
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


@dataclass(frozen=True)
class Chain:
    """Equal runs right behind each other, each of which reads what the one before returns.

        x_1 = layer(x, mask, w_0);  x_2 = layer(x_1, mask, w_1);  …

    Nothing else reads what is passed on, and nobody else what is a layer's own.
    """

    runs: tuple[Run, ...]
    own: tuple[int, ...] = ()
    """By number, the inputs that each has for itself: the graph's. The others are shared, but for
    the one that is passed on. A single run's inputs are whatever they are."""
    passed: int = 0
    """The number of the input that the run before returns."""

    @property
    def inputs(self) -> tuple[fx.Node, ...]:
        """What the first run reads, then what the others have for themselves."""
        first, *others = self.runs
        return (*first.inputs, *(run.inputs[i] for run in others for i in self.own))

    def per_input(self, of_run: Sequence[T]) -> tuple[T, ...]:
        """By input of the chain, what is known by input of a run."""
        return (*of_run, *(of_run[i] for _ in self.runs[1:] for i in self.own))

    def inputs_of(self, values: Sequence[T]) -> list[tuple[T | None, ...]]:
        """The inputs of each run among the chain's: None for what the run before returns."""
        first = values[: len(self.runs[0].inputs)]
        found: list[tuple[T | None, ...]] = [tuple(first)]
        rest = iter(values[len(first) :])
        for _ in self.runs[1:]:
            inputs: list[T | None] = [*first]
            inputs[self.passed] = None
            for i in self.own:
                inputs[i] = next(rest)
            found.append(tuple(inputs))
        return found

    def part(self, begin: int, end: int) -> Chain:
        """Some of its runs."""
        return Chain(self.runs[begin:end], self.own, self.passed)


def chains(runs: Sequence[Run]) -> list[Chain]:
    """Equal runs, those of a chain together.

    Args:
        runs: in the order of the graph.
    """
    found: list[Chain] = []
    for run in runs:
        link = _link(found[-1].runs[-1], run) if found else None
        before = found[-1] if found else None
        if before is not None and link is not None and len(before.runs) == 1:
            found[-1] = Chain((*before.runs, run), link[0], link[1])
        elif before is not None and link == (before.own, before.passed):
            found[-1] = Chain((*before.runs, run), *link)
        else:
            found.append(Chain((run,)))
    return found


def _link(run: Run, following: Run) -> tuple[tuple[int, ...], int] | None:
    """What two runs of a chain have for themselves, and where the second reads the first; None if
    they are not of one."""
    last = run.nodes[-1].next
    while last.op == "placeholder":
        last = last.next
    if len(run.outputs) != 1 or last is not following.nodes[0]:
        return None
    (output,) = run.outputs
    if not set(output.users) <= set(following.nodes) or output not in following.inputs:
        return None
    passed = following.inputs.index(output)
    own = []
    for i, (mine, theirs) in enumerate(zip(run.inputs, following.inputs, strict=True)):
        if i == passed:
            continue
        if mine is not theirs:
            for node, reader in ((mine, run), (theirs, following)):
                if node.op != "placeholder" or not set(node.users) <= set(reader.nodes):
                    return None
            own.append(i)
        elif not _is_constant(mine.meta["example_value"]):
            return None  # its gradient would be a sum over the runs
    return tuple(own), passed


def _is_constant(value: Any) -> bool:
    return isinstance(value, Tensor) and not value.requires_grad


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
