"""Run a scheduled graph: its printed Python, called with a list of inputs.

The generated code drops each name after its last use, so memory ends where the
schedule says.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

from torch import Tensor, fx

from fxzero._compat import below_autograd, is_fake
from fxzero.graph import Lane, StepGraph
from fxzero.graph.steady import find_loop, runs_of
from fxzero.graph.verify import check_constants
from fxzero.ranks import agree, lost
from fxzero.runtime.account import account_of
from fxzero.runtime.lanes import drain
from fxzero.runtime.looped import looped
from fxzero.runtime.node_times import NodeTimes
from fxzero.runtime.streams import computing_on
from fxzero.sharding.full_parameter import check_returned_copies
from fxzero.sharding.gradients import note_reduced
from fxzero.sharding.params import ModelState, Traffic


def traffic_of(graph: StepGraph) -> Traffic:
    """What one run of a graph communicates: buckets, and bytes of the full tensors in them; and
    what of parameters and gradients it copies between pools."""
    total = Traffic()
    for transfer in graph.transfers():
        if not transfer.of_parameters:
            continue  # the norm's single number, and the model's own
        runs = runs_of(graph, transfer.stamp)
        if transfer.stamp.lane is Lane.H2D:
            total.num_uploads += runs
            total.uploaded_bytes += runs * transfer.record.full_bytes
        elif transfer.stamp.lane is Lane.D2H:
            total.num_downloads += runs
            total.downloaded_bytes += runs * transfer.record.full_bytes
        elif transfer.is_copy:
            continue  # of what is on disk
        elif transfer.stamp.lane is Lane.GATHER:
            total.num_gathers += runs
            total.gathered_bytes += runs * transfer.record.full_bytes
        else:
            total.num_reduces += runs
            total.reduced_bytes += runs * transfer.record.full_bytes
    return total


def executable(
    graph: StepGraph,
    states: list[ModelState],
    gradients: Mapping[int, str] | None = None,
    *,
    times: NodeTimes | None = None,
    is_kept: bool = False,
) -> Callable[[list[Any]], Any]:
    """The scheduled graph as a function of a list of inputs, which it empties.

    Each run of one that communicates is announced to the other ranks: see `agree`. Only the
    generated function is kept: nodes and their fake values are free to go.

    Args:
        states: the models whose traffic counters each run adds to.
        gradients: the keys of parameters whose reduced gradients it returns, by position.
        times: what measures some of its runs; nodes stay then.
        is_kept: whether somebody looks at the graph, and keeps it: its code is made when it is
            called, which may never be.

    Raises:
        NotSteadyError: a micro-step of the graph shall stand for others, and cannot.
    """
    graph.graph.lint()
    check_constants(graph, "executable")
    # Not graph.module: AOTAutograd makes it lazy, and a lazy module has no code of its own.
    make = generated if times is None else times.generated(generated)
    if is_kept and times is None:
        make = generated_when_called
    if graph.steady_runs > 1:
        forward = looped(graph, find_loop(graph), make)
    else:
        forward = make(graph, graph.graph)
    attributes = _attributes(graph.module)
    traffic = traffic_of(graph)
    returned = dict(gradients or {})
    account = account_of(graph)
    has_lanes = any(transfer.is_copy for transfer in graph.transfers())
    device = graph.device

    def call(inputs: list[Any]) -> Any:
        check_returned_copies()
        arguments = list(inputs)
        inputs.clear()
        for state in states:
            state.traffic.add(traffic)
        in_streams = has_lanes and not any(map(is_fake, arguments))
        try:
            with below_autograd(), computing_on(device) if in_streams else _NOWHERE:
                if account is None:
                    results = forward(attributes, *arguments)
                else:
                    results = run(account, arguments)
        except BaseException:
            if has_lanes:
                drain()
            raise
        for position, key in returned.items():
            if isinstance(results[position], Tensor):
                note_reduced(key, results[position])
        return results

    def run(account: agree.Account, arguments: list[Any]) -> Any:
        try:
            agree.begin(account)
            results = forward(attributes, *arguments)
            agree.end()
        except BaseException as error:
            agree.abandon()
            better = lost.explained(error)
            if better is not error:
                raise better from error
            raise
        return results

    call._boxed_call = True  # type: ignore[attr-defined]
    return call if times is None else times.around(call)


_NOWHERE = contextlib.nullcontext()


def generated(graph: StepGraph, part: fx.Graph) -> Callable[..., Any]:
    """The code of a part of a graph, a function of ``self`` and its inputs."""
    forward: Callable[..., Any] = type(fx.GraphModule(graph.module, part)).forward
    return forward


def generated_when_called(graph: StepGraph, part: fx.Graph) -> Callable[..., Any]:
    """What `generated` returns, made by the first call."""
    forward: Callable[..., Any] | None = None

    def call(*arguments: Any) -> Any:
        nonlocal forward
        if forward is None:
            forward = generated(graph, part)
        return forward(*arguments)

    return call


def _attributes(module: fx.GraphModule) -> SimpleNamespace:
    """What the generated code reads from ``self``: constants and sub-graphs."""
    namespace = SimpleNamespace()
    for node in module.graph.find_nodes(op="get_attr"):
        name = str(node.target).partition(".")[0]
        setattr(namespace, name, getattr(module, name))
    return namespace
