"""Run a scheduled graph: its printed Python, called with a list of inputs.

The generated code drops each name after its last use, so memory ends where the
schedule says.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from torch import fx

from fxzero._compat import below_autograd
from fxzero.graph import Lane, Phase, StepGraph
from fxzero.graph.operators import num_bytes
from fxzero.params import ModelState, Traffic


def traffic_of(graph: StepGraph) -> Traffic:
    """What one run of a graph communicates: buckets, and bytes of the full tensors in them."""
    total = Traffic()
    seen: set[str] = set()
    for transfer in graph.transfers():
        if transfer.stamp.phase is Phase.OPTIMIZER:
            continue  # the norm's single number
        bucket = transfer.stamp.bucket or transfer.launch.name
        new = bucket not in seen
        seen.add(bucket)
        if transfer.stamp.lane is Lane.GATHER:
            total.num_gathers += new
            total.gathered_bytes += sum(num_bytes(n) for n in transfer.waits)
        else:
            total.num_reduces += new
            total.reduced_bytes += sum(num_bytes(n) for n in transfer.tensors)
    return total


def executable(graph: StepGraph, states: list[ModelState]) -> Callable[[list[Any]], Any]:
    """The scheduled graph as a function of a list of inputs, which it empties.

    Only the generated function is kept: nodes and their fake values are free to go.

    Args:
        states: the models whose traffic counters each run adds to.
    """
    graph.graph.lint()
    # Not graph.module: AOTAutograd makes it lazy, and a lazy module has no code of its own.
    forward = type(fx.GraphModule(graph.module, graph.graph)).forward
    attributes = _attributes(graph.module)
    traffic = traffic_of(graph)

    def call(inputs: list[Any]) -> Any:
        arguments = list(inputs)
        inputs.clear()
        for state in states:
            state.traffic.add(traffic)
        with below_autograd():
            return forward(attributes, *arguments)

    call._boxed_call = True  # type: ignore[attr-defined]
    return call


def _attributes(module: fx.GraphModule) -> SimpleNamespace:
    """What the generated code reads from ``self``: constants and sub-graphs."""
    namespace = SimpleNamespace()
    for node in module.graph.find_nodes(op="get_attr"):
        name = str(node.target).partition(".")[0]
        setattr(namespace, name, getattr(module, name))
    return namespace
