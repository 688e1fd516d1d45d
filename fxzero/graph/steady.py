"""Many micro-steps in a graph of five: the fourth stands for all between the third and the last.

    in the graph    0   1   2   3                  4
    in the step     0   1   2   3, 4, 5, … k − 2   k − 1

The first micro-steps differ from the others (nothing is in flight when the first begins, and the
second has the first sums), and so does the last (it gathers nothing ahead, and updates follow).
What is between runs alike, transfers that reach into the next micro-step included. So a step of 64
micro-batches is compiled, verified, scheduled and simulated as one of five, and the stretch from
the beginning of micro-step 3 to that of micro-step 4 is run 60 times.

`find_loop` proves that a graph allows that: the stretch before must do the same with values that
are one micro-step older.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from torch import fx

from fxzero.errors import PassError
from fxzero.graph.stamps import Lane, Phase, Role, Stamp, stamp_of
from fxzero.graph.step_graph import StepGraph

UNROLLED = 5
"""As how many micro-steps a step of more is compiled."""
STEADY = 3
"""The micro-step among them that stands for several."""


class NotSteadyError(PassError):
    """A schedule whose steady micro-step cannot stand for others."""


def steady_runs(micro_batches: int) -> int:
    """How many micro-steps of a step the steady one stands for."""
    return max(micro_batches - UNROLLED + 1, 1)


def runs_of(graph: StepGraph, stamp: Stamp) -> int:
    """How often a node of the graph runs in a step."""
    return graph.steady_runs if stamp.micro_step == STEADY else 1


def begins(node: fx.Node, micro_step: int) -> bool:
    """Whether a node computes something of a micro-step's forward."""
    if node.op != "call_function":
        return False
    stamp = stamp_of(node)
    return (
        (stamp.phase, stamp.micro_step, stamp.lane) == (Phase.FORWARD, micro_step, Lane.COMPUTE)
    ) and stamp.role in (Role.COMPUTE, Role.REGION)


@dataclass(frozen=True)
class Loop:
    """A graph in three parts, of which the second runs several times."""

    before: tuple[fx.Node, ...]
    body: tuple[fx.Node, ...]
    after: tuple[fx.Node, ...]
    carried: dict[fx.Node, fx.Node]
    """By a value of `before` that the body reads, its own that the next run reads instead."""
    kept: tuple[fx.Node, ...]
    """Other values of `before` that are read later."""
    collected: tuple[fx.Node, ...]
    """Values of the body of which `after` reads every run's: the losses."""


def is_remade(node: fx.Node) -> bool:
    """Whether a node is made again wherever it is read: constants, and rows of the batch."""
    if node.op == "get_attr":
        return True
    return node.op == "call_function" and stamp_of(node).role is Role.ROWS


def is_of_all_losses(node: fx.Node) -> bool:
    """Whether a node reads the losses of all micro-steps."""
    if node.op != "call_function":
        return False
    stamp = stamp_of(node)
    return stamp.made_by == "accumulate" and stamp.phase is Phase.OPTIMIZER


def find_loop(graph: StepGraph) -> Loop:
    """Take a scheduled graph apart.

    Raises:
        NotSteadyError: the steady micro-step does something else than the one before.
    """
    nodes = [n for n in graph.graph.nodes if n.op == "call_function" and not is_remade(n)]
    cuts: list[int] = []
    for micro_step in range(STEADY - 1, UNROLLED):
        cut = next((i for i, node in enumerate(nodes) if begins(node, micro_step)), None)
        if cut is None or (cuts and cut <= cuts[-1]):
            raise NotSteadyError(f"micro-step {micro_step} does not follow the one before")
        cuts.append(cut)
    earlier, body = (nodes[begin:end] for begin, end in pairwise(cuts))
    before, after = nodes[: cuts[1]], nodes[cuts[2] :]
    carried, kept = _matched(earlier, body)
    collected = _read_after(after, graph.output, earlier, body, carried, kept)
    return Loop(tuple(before), tuple(body), tuple(after), carried, tuple(kept), tuple(collected))


def _matched(
    earlier: list[fx.Node], body: list[fx.Node]
) -> tuple[dict[fx.Node, fx.Node], dict[fx.Node, None]]:
    """See that two stretches do the same; what goes from the first into the second, and on."""
    if len(earlier) != len(body):
        raise NotSteadyError(
            f"micro-step {STEADY - 1} takes {len(earlier)} nodes, the next one {len(body)}"
        )
    later = dict(zip(earlier, body, strict=True))
    inside = set(body)
    carried: dict[fx.Node, fx.Node] = {}
    kept: dict[fx.Node, None] = {}
    for old, new in later.items():
        if not _is_alike(old, new):
            raise NotSteadyError(f"{new.name} stands where {old.name} stood a micro-step before")
        for mine, theirs in zip(_leaves(old), _leaves(new), strict=True):
            if not isinstance(theirs, fx.Node):
                if mine != theirs:
                    raise NotSteadyError(f"{new.name} is called with {theirs}, {old.name} not")
                continue
            if mine is theirs:
                if theirs.op != "placeholder" and not is_remade(theirs):
                    kept[theirs] = None
            elif is_remade(theirs):
                _check_remade(mine, theirs)
            elif theirs in inside:
                if later.get(mine) is not theirs:
                    raise NotSteadyError(f"{new.name} reads {theirs.name}, {old.name} another")
            elif theirs in later:
                carried[theirs] = later[theirs]
            else:
                raise NotSteadyError(f"{new.name} reads {theirs.name} of two micro-steps before")
    both = carried.keys() & kept.keys()
    if both:
        raise NotSteadyError(f"{min(both).name} is read as a value of two micro-steps")
    return carried, kept


def _read_after(
    after: list[fx.Node],
    output: fx.Node,
    earlier: list[fx.Node],
    body: list[fx.Node],
    carried: dict[fx.Node, fx.Node],
    kept: dict[fx.Node, None],
) -> list[fx.Node]:
    """See that what is read after the last run is what that run leaves; add to what is kept.

    Returns:
        What is read of every run.
    """
    inside, before, last = set(body), set(earlier), set(carried.values())
    behind = set(after)
    collected: dict[fx.Node, None] = {}
    for node in (*after, output):
        for source in node.all_input_nodes:
            if source.op == "placeholder" or source in behind or is_remade(source):
                continue
            if is_of_all_losses(node):
                (collected if source in inside else kept)[source] = None
            elif source in inside:
                if source not in last:
                    raise NotSteadyError(f"{node.name} reads {source.name}, which no run hands on")
            elif source in before:
                raise NotSteadyError(f"{node.name} reads {source.name} of two micro-steps before")
            else:
                kept[source] = None
    if len(collected) > 1:
        raise NotSteadyError(f"{min(collected).name} is not the only value read of every run")
    return list(collected)


def _is_alike(old: fx.Node, new: fx.Node) -> bool:
    """Whether two nodes call the same for the same parameters, a micro-step apart or shared."""
    mine, theirs = stamp_of(old), stamp_of(new)
    known = (mine.phase, mine.lane, mine.role, mine.layer, mine.params)
    if known != (theirs.phase, theirs.lane, theirs.role, theirs.layer, theirs.params):
        return False
    if theirs.micro_step - mine.micro_step != 1:
        return False
    if len(_leaves(old)) != len(_leaves(new)):
        return False
    structure = getattr(new.target, "structure", None)
    if structure is not None:
        return getattr(old.target, "structure", None) is structure
    return old.target is new.target


def _check_remade(mine: Any, theirs: fx.Node) -> None:
    """Rows are those of the next micro-batch; constants would have been the same node."""
    is_next = (
        isinstance(mine, fx.Node)
        and mine.op == theirs.op == "call_function"
        and is_remade(mine)
        and mine.target is theirs.target
        and mine.args[:2] == theirs.args[:2]
        and all(isinstance(bound, int) for bound in theirs.args[2:])
        and (stamp_of(mine).micro_step, stamp_of(theirs).micro_step) == (STEADY - 1, STEADY)
    )
    if not is_next:
        raise NotSteadyError(f"{theirs.name} does not follow {mine}")


def _leaves(node: fx.Node) -> list[Any]:
    """A node's arguments, nested ones one by one; what is no node as its text."""
    return list(_flat((node.args, tuple(sorted(node.kwargs.items())))))


def _flat(argument: Any) -> Iterator[Any]:
    if isinstance(argument, (list, tuple)):
        yield len(argument)
        for part in argument:
            yield from _flat(part)
    elif isinstance(argument, dict):
        yield from _flat(tuple(sorted(argument.items())))
    elif isinstance(argument, slice):
        yield from _flat((argument.start, argument.stop, argument.step))
    else:
        yield argument if isinstance(argument, fx.Node) else repr(argument)
