"""What a graph computes, by what it is: graphs with other outputs can then be held to each other.

A joint graph returns losses and gradients; behind the update it returns a loss, and what else it
has computed is in its inputs. Parameters, gradients and optimizer states are put together from the
ranks' parts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fxzero.graph import StepGraph
from fxzero.sharding.params import ParamSpec

Named = dict[str, list[Tensor]]
"""Tensors by what they are, on each rank."""

LOSS = "loss"
AFTER = " after the update"
"""What names end with that are read from a step's inputs."""


def named(
    graphs: Sequence[StepGraph], results: Sequence[Sequence[Any]], *, updates: bool = False
) -> Named:
    """A joint graph's outputs by what they are; gradients in full.

    Args:
        updates: whether it ends in the update: then it returns the loss, the norm and whether the
            step was skipped.
    """
    graph = graphs[0]
    if updates:
        return {LOSS: [result[0] for result in results]}
    loss = _loss_position(graph, results[0])
    found: Named = {}
    for position in range(len(results[0])):
        values = [result[position] for result in results]
        if not all(isinstance(value, Tensor) for value in values):
            continue
        if position in graph.gradients:
            specs = [one.specs[one.gradients[position]] for one in graphs]
            found[f"gradient of {specs[0].name}"] = _full(values, specs)
        elif position == loss:
            found[LOSS] = values
        elif position in graph.changed:
            found[f"{graph.changed[position].name} as it is left"] = values
        elif graph.loss is None:  # of a whole step, outputs are others behind its update
            found[f"output {position}"] = values
    return found


def _loss_position(graph: StepGraph, results: Sequence[Any]) -> int | None:
    """The output that a step minimises; of a loop's graph the only number among what forward
    returns, if there is one."""
    if graph.loss is not None:
        return graph.loss
    numbers = [
        position
        for position, value in enumerate(results[: graph.num_forward_outputs])
        if isinstance(value, Tensor)
        and value.dim() == 0
        and value.dtype.is_floating_point
        and position not in graph.changed
    ]
    return numbers[0] if len(numbers) == 1 else None


def updated(graphs: Sequence[StepGraph], inputs: Sequence[Sequence[Any]]) -> Named:
    """What parameters, their optimizer states and buffers are once the graph has run, in full."""
    found: Named = {}
    placeholders = zip(*(g.graph.find_nodes(op="placeholder") for g in graphs), strict=True)
    for position, nodes in enumerate(placeholders):
        values = [values[position] for values in inputs]
        if not all(isinstance(value, Tensor) for value in values):
            continue
        source = nodes[0].meta.get("fxzero_source")
        if source is not None and source[0] == "state":
            keys = [node.meta["fxzero_source"][1] for node in nodes]
            word = f"{source[2]} of "
        elif source is None and nodes[0] in graphs[0].inputs:
            keys = [g.inputs[node] for g, node in zip(graphs, nodes, strict=True)]
            word = ""
        else:
            found[f"{nodes[0].name} as it is left"] = values
            continue
        specs = [g.specs[key] for g, key in zip(graphs, keys, strict=True)]
        found[f"{word}{specs[0].name}{AFTER}"] = _full(values, specs)
    return found


def _full(values: Sequence[Tensor], specs: Sequence[ParamSpec]) -> list[Tensor]:
    """A parameter's parts, or gradients, put together; as they are where every rank has all."""
    if specs[0].shard_group is None or tuple(values[0].shape) != specs[0].local_shape:
        return list(values)
    return [torch.cat(list(values))] * len(values)


def missing(found: Named, expected: Named, updates: bool) -> str:
    """Something that a graph must compute, and does not; empty if there is nothing.

    Args:
        updates: whether it ends in the update, behind which no gradient is returned.
    """
    for name in expected:
        is_gradient = name.startswith("gradient of ")
        is_due = updates if name.endswith(AFTER) else not (is_gradient and updates)
        if is_due and name not in found:
            return name
    return ""


def kind_of(name: str) -> str:
    """What tensors are of one kind: gradients, or a state of all parameters."""
    word = name.partition(" of ")[0] if " of " in name else ""
    return f"{word}{AFTER}" if name.endswith(AFTER) else word or name


def largest_by_kind(expected: Named) -> dict[str, float]:
    """By kind, the largest element of all tensors of it."""
    found: dict[str, float] = {}
    for name, values in expected.items():
        kind = kind_of(name)
        found[kind] = max(found.get(kind, 0.0), *(_largest(_exactly(value)) for value in values))
    return found


def _exactly(value: Tensor) -> Tensor:
    return value.to(torch.complex128 if value.is_complex() else torch.float64)


def _largest(value: Tensor) -> float:
    finite = value[value.isfinite()]
    return finite.abs().max().item() if finite.numel() else 0.0


def difference(value: Tensor, right: Tensor, least: float = 0.0) -> float:
    """The largest difference, as a share of the largest element that is right.

    Args:
        least: a share of this at least: of what is nothing but rounding (the gradient of a bias
            in front of a norm, or of attention's keys), no digit is right.
    """
    if value.shape != right.shape:
        return math.inf
    if not value.numel():
        return 0.0
    value, right = _exactly(value), _exactly(right)
    # What is infinite, or no number, on both sides is the same.
    differs = ~((value == right) | (value.isnan() & right.isnan()))
    if not differs.any():
        return 0.0
    scale = max(_largest(right), least)
    return (value - right)[differs].abs().max().item() / (scale or 1.0)
