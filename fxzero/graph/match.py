"""Find a small graph inside a large one.

A pattern is a graph that was traced from the code that it stands for. It is matched from one of
its nodes outwards, along arguments and along users, with backtracking where there is a choice:
the order of a product's factors, and which of several users is the one meant.

    pattern   mul(x, rsqrt(add(mean(pow(x, 2)), eps)))
    graph     … mul_7 = mul(rsqrt_3, hidden) …           matches: x ↦ hidden, factors swapped

Numbers are compared in an exact match only; a loose one finds candidates whatever their sizes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from fxzero._compat import pytree

_aten = torch.ops.aten

# Their sizes may be written in many ways, [-1, 64] or [24, 64]: what counts is the result.
_RESHAPES = {_aten.view.default, _aten._unsafe_view.default, _aten.reshape.default}
_COMMUTATIVE = {_aten.add.Tensor, _aten.mul.Tensor}

Mapping = dict[fx.Node, fx.Node]
"""Nodes of the graph by nodes of the pattern, its inputs among them."""


@dataclass(frozen=True)
class Pattern:
    """A graph to look for.

    Its placeholders match any node. Those that nothing reads match nothing.
    """

    graph: fx.Graph
    numbers: dict[float, str] = field(default_factory=dict)
    """Names of the constants that stand for any number: read from the graph by `captured`."""

    def calls(self) -> list[fx.Node]:
        """The nodes that must be found, in order."""
        return [n for n in self.graph.nodes if n.op == "call_function"]

    def outputs(self) -> list[fx.Node | None]:
        """What the pattern returns."""
        (values,) = next(iter(reversed(self.graph.nodes))).args
        flat = values if isinstance(values, (list, tuple)) else (values,)
        return [v if isinstance(v, fx.Node) else None for v in flat]


Allowed = Callable[[fx.Node, fx.Node], bool]
"""Whether a node of the pattern may be a node of the graph, besides being the same call."""


def matches(
    pattern: Pattern,
    begin: fx.Node,
    candidates: Sequence[fx.Node],
    *,
    exact: bool,
    allowed: Allowed = lambda wanted, node: True,
) -> Iterator[Mapping]:
    """Matches that take the pattern's node `begin` to one of some nodes, at most one for each.

    Args:
        exact: whether numbers count.
        allowed: asked of each call of the pattern and the node that it would be.
    """
    rules = _Rules(_same if exact else _same_but_numbers, allowed)
    steps = _steps(begin)
    for candidate in candidates:
        mapping: Mapping = {}
        if _fits(begin, candidate, mapping, rules) and _extend(
            steps, 0, mapping | {begin: candidate}, rules, mapping
        ):
            yield mapping


@dataclass(frozen=True)
class _Rules:
    """What counts as equal."""

    same: Callable[[Any, Any], bool]
    allowed: Allowed


@dataclass(frozen=True)
class _Step:
    """How the next node of the pattern is reached from one that is matched already."""

    node: fx.Node
    known: fx.Node
    argument: int | None
    """Its place among the arguments of `known`; None where it is a user of it."""


def _steps(begin: fx.Node) -> list[_Step]:
    """A walk over a connected pattern; arguments first, which leave least choice."""
    seen = {begin}
    steps: list[_Step] = []
    queue = [begin]
    waiting: list[fx.Node] = []
    while queue or waiting:
        if queue:
            known = queue.pop(0)
            waiting.append(known)
            for place, argument in enumerate(_leaves(known)):
                if isinstance(argument, fx.Node) and argument not in seen:
                    seen.add(argument)
                    steps.append(_Step(argument, known, place))
                    queue.append(argument)
            continue
        known = waiting.pop(0)
        for user in known.users:
            if user.op != "output" and user not in seen:
                seen.add(user)
                steps.append(_Step(user, known, None))
                queue.append(user)
                waiting.insert(0, known)  # its other users wait until this one's arguments are in
                break
    return steps


def _leaves(node: fx.Node) -> list[Any]:
    """A node's arguments, lists and keywords taken apart."""
    if not node.kwargs and not any(isinstance(a, (list, tuple, dict)) for a in node.args):
        return list(node.args)
    return pytree.tree_leaves((node.args, node.kwargs), is_leaf=lambda a: isinstance(a, fx.Node))


def _extend(
    steps: list[_Step],
    position: int,
    mapping: Mapping,
    rules: _Rules,
    found: Mapping,
) -> bool:
    """Match what is left of the pattern; put the whole match into `found`."""
    if position == len(steps):
        found.update(mapping)
        return True
    step = steps[position]
    taken = set(mapping.values())
    for candidate in _candidates(step, mapping[step.known]):
        if candidate in taken and step.node.op != "placeholder":
            continue
        if _fits(step.node, candidate, mapping, rules) and _extend(
            steps, position + 1, mapping | {step.node: candidate}, rules, found
        ):
            return True
    return False


def _candidates(step: _Step, known: fx.Node) -> list[fx.Node]:
    if step.argument is None:
        return [user for user in known.users if _kind(user) == _kind(step.node)]
    leaves = _leaves(known)
    places = [step.argument]
    if known.target in _COMMUTATIVE and step.argument < 2:
        places.append(1 - step.argument)
    found = [leaves[p] for p in places if p < len(leaves)]
    return list(dict.fromkeys(n for n in found if isinstance(n, fx.Node)))


def _fits(wanted: fx.Node, node: fx.Node, mapping: Mapping, rules: _Rules) -> bool:
    """Whether a node can be the pattern's, as far as its neighbours are matched."""
    trial = mapping | {wanted: node}
    users = [(u, mapping[u]) for u in wanted.users if u in mapping]
    if wanted.op != "placeholder":
        if node.op != wanted.op or _kind(node) != _kind(wanted):
            return False
        if not rules.allowed(wanted, node) or not _arguments_fit(wanted, node, trial, rules):
            return False
    return all(_arguments_fit(u, g, trial, rules) for u, g in users)


def _kind(node: fx.Node) -> object:
    """What a node does: reshapes are one thing."""
    return _aten.view.default if node.target in _RESHAPES else node.target


def _arguments_fit(wanted: fx.Node, node: fx.Node, mapping: Mapping, rules: _Rules) -> bool:
    ours, theirs = _leaves(wanted), _leaves(node)
    if wanted.target in _RESHAPES:
        if rules.same is _same and wanted.meta["val"].shape != node.meta["val"].shape:
            return False
        ours, theirs = ours[:1], theirs[:1]
    if len(ours) != len(theirs):
        return False

    def fits(a: Any, b: Any) -> bool:
        if isinstance(a, fx.Node):
            return isinstance(b, fx.Node) and mapping.get(a, b) is b
        return not isinstance(b, fx.Node) and rules.same(a, b)

    if all(map(fits, ours, theirs)):
        return True
    if wanted.target not in _COMMUTATIVE or len(ours) < 2:
        return False
    swapped = [theirs[1], theirs[0], *theirs[2:]]
    return all(map(fits, ours, swapped))


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, float) and isinstance(b, float):
        # A number that was captured may have gone through a subtraction.
        return math.isclose(a, b, rel_tol=1e-12)
    return type(a) is type(b) and bool(a == b)


def _same_but_numbers(a: Any, b: Any) -> bool:
    number = (int, float, torch.SymInt, torch.device)
    if isinstance(a, number) and isinstance(b, number):
        return True
    return _same(a, b)


def captured(pattern: Pattern, mapping: Mapping) -> dict[str, float] | None:
    """The numbers that stand where the pattern has named constants; None if they disagree."""
    found: dict[str, float] = {}
    for node in pattern.calls():
        for ours, theirs in zip(_leaves(node), _leaves(mapping[node]), strict=True):
            name = _name_of(ours, pattern.numbers)
            if name is not None and found.setdefault(name, theirs) != theirs:
                return None
    return found


def _name_of(value: Any, numbers: dict[float, str]) -> str | None:
    """The name of a constant, which a trace may have rounded to float32."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    close = (name for number, name in numbers.items() if math.isclose(value, number, rel_tol=1e-6))
    return next(close, None)


def accumulated_terms(node: fx.Node) -> list[fx.Node]:
    """The summands of a gradient: autograd adds up what arrives from each use of a value."""
    if node.op == "call_function" and node.target is _aten.add.Tensor and len(node.args) == 2:
        a, b = node.args
        if isinstance(a, fx.Node) and isinstance(b, fx.Node) and not node.kwargs:
            return [*accumulated_terms(a), *accumulated_terms(b)]
    return [node]
