"""What a step graph is, in a few bytes: equal for graphs that decisions mean the same for.

Operators, arguments, shapes, dtypes, layers and parameters count. What differs between two
processes that compile the same model does not: the model's number, names of process groups, and
the sizes of shards, of which the last ranks have smaller ones where rows do not divide.
"""

from __future__ import annotations

import hashlib
from typing import Any

from torch import fx

from fxzero.graph.node_text import describe_value
from fxzero.graph.pieces import Piece
from fxzero.graph.stamps import Role, has_stamp, stamp_of
from fxzero.graph.step_graph import StepGraph


def graph_digest(graph: StepGraph, setup: str = "") -> str:
    """A hash of a graph: 16 hexadecimal digits.

    Args:
        setup: what else decisions are made for: the passes that do not choose, with their options.
    """
    digest = hashlib.blake2b(f"{setup}\n".encode(), digest_size=8)
    labels = graph.labels
    local = _local(graph)
    for key, spec in graph.specs.items():
        axes = [(axis.role.value, axis.group.size) for axis in spec.layout.axes]
        dtypes = (spec.dtype, spec.compute_dtype, spec.reduce_dtype)
        layout = (labels[key], spec.zero, spec.shape, *dtypes, *axes)
        digest.update(("|".join(map(str, layout)) + "\n").encode())
    for node in graph.graph.nodes:
        words = [node.name, node.op, _target(node)]
        words += [describe_value(node.meta.get("val"))] if node not in local else []
        if has_stamp(node):
            stamp = stamp_of(node)
            words += [stamp.phase.value, stamp.role.value, stamp.layer, str(stamp.micro_step)]
            words += [labels.get(key, key) for key in stamp.params]
        if node in local:
            words += [source.name for source in node.all_input_nodes]
        elif not has_stamp(node) or stamp_of(node).transfer is None:
            words.append(_described((node.args, node.kwargs), labels))
        else:
            record = stamp_of(node).transfer
            assert record is not None
            words += [record.kind.value, str(record.size), record.op, str(record.full_bytes)]
            words += [source.name for source in node.all_input_nodes]
        digest.update(("|".join(words) + "\n").encode())
    return digest.hexdigest()


def _local(graph: StepGraph) -> set[fx.Node]:
    """Nodes that work on this rank's shards: up to where they are whole, and from the gradients
    that become shards on."""
    found = {node for node, key in graph.inputs.items() if graph.specs[key].shard_group is not None}
    for node in graph.nodes():
        role = stamp_of(node).role
        if role is Role.RESHARD or (
            role is not Role.UNSHARD and not found.isdisjoint(node.all_input_nodes)
        ):
            found.add(node)
    return found


def _target(node: fx.Node) -> str:
    """A name for what a node calls that is equal in all processes."""
    if node.op != "call_function":
        return "" if node.op in ("placeholder", "output") else str(node.target)
    if isinstance(node.target, Piece):
        return f"{node.target.__name__} {node.target.digest}"
    module = getattr(node.target, "__module__", "")
    return f"{module}.{getattr(node.target, '__name__', type(node.target).__name__)}"


def _described(argument: Any, labels: dict[str, str]) -> str:
    if isinstance(argument, (list, tuple)):
        return f"({','.join(_described(part, labels) for part in argument)})"
    if isinstance(argument, dict):
        return f"({','.join(f'{k}={_described(v, labels)}' for k, v in argument.items())})"
    if isinstance(argument, str):
        return labels.get(argument, argument)
    return str(argument)
