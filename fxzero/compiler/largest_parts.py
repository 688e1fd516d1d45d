"""A step graph as the rank with the largest parts of all parameters has it.

    this rank's    grad = clone(slice(part, 0, 0, 18))    exp_avg: (18, 113)
    the first's    grad = clone(slice(part, 0, 0, 19))    exp_avg: (19, 113)

By the rule of `torch.chunk` the first rank of a group has as many rows of every parameter as any
other one, or more: what it holds at every moment is what all of them need at most. Every rank can
say how much that is without asking, so that all answer alike.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fxzero.graph import StepGraph
from fxzero.graph.stamps import has_stamp, stamp_of
from fxzero.sharding.params import ParamSpec


def take_largest_parts(graph: StepGraph) -> None:
    """Let values that are this rank's rows of a parameter be as large as they are anywhere. Only
    to look at: the graph's calls still work on this rank's."""
    smaller = _smaller_parts(graph)
    for node in graph.graph.nodes:
        keys = _params_of(graph, node)
        if smaller.keys().isdisjoint(keys):
            continue
        value = node.meta.get("val")
        if isinstance(value, (list, tuple)):
            pairs = zip(keys, value, strict=False)
            grown = [_grown(v, smaller.get(key)) for key, v in pairs]
            node.meta["val"] = [*grown, *value[len(grown) :]]
        else:
            node.meta["val"] = _grown(value, smaller.get(keys[0]))


def has_smaller_parts(graph: StepGraph) -> bool:
    """Whether another rank has a larger part of some parameter."""
    return bool(_smaller_parts(graph))


def _smaller_parts(graph: StepGraph) -> dict[str, ParamSpec]:
    return {key: s for key, s in graph.specs.items() if largest_shape(s) != s.local_shape}


def largest_shape(spec: ParamSpec) -> tuple[int, ...]:
    """The shape of a parameter's largest part."""
    return (spec.chunk_rows, *spec.shape[1:]) if spec.is_padded else spec.local_shape


def _params_of(graph: StepGraph, node: fx.Node) -> tuple[str, ...]:
    """Of what a node's value is a part: a parameter, its state, or several in the same order."""
    source = node.meta.get("fxzero_source")
    if source is not None and source[0] == "state":
        return (source[1],)
    if node in graph.inputs:
        return (graph.inputs[node],)
    return stamp_of(node).params if has_stamp(node) else ()


def _grown(value: Any, spec: ParamSpec | None) -> Any:
    """A value with the rows that others have; as it is if it has no rows, or all of them."""
    if spec is None or not isinstance(value, torch.Tensor) or value.shape != spec.local_shape:
        return value
    return value.new_empty(largest_shape(spec))
