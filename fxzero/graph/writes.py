"""Find writes to gathered parameters in Dynamo's graph: they would be lost.

Dynamo ran every call on fake tensors. A call that may write, and whose first argument shares
its storage with a marker's result, writes to a full parameter.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fxzero._compat import storage_identity
from fxzero.errors import CaptureError
from fxzero.graph.node_text import source_line
from fxzero.sharding.full_parameter import HOW_TO_WRITE
from fxzero.sharding.params import spec_of

_UNSHARD = (torch.ops.fxzero.unshard, torch.ops.fxzero.unshard.default)
_IN_PLACE = {
    operator.setitem,
    operator.iadd,
    operator.isub,
    operator.imul,
    operator.itruediv,
    operator.ifloordiv,
    operator.imod,
    operator.ipow,
    operator.iand,
    operator.ior,
    operator.ixor,
}


def refuse_writes(module: fx.GraphModule, example_inputs: Sequence[Any]) -> dict[int, str]:
    """See that a graph of Dynamo's changes no gathered parameter.

    Returns:
        Names of the parameters whose copies, or views of them, the graph returns to eager code,
        by position among its outputs.

    Raises:
        CaptureError: it does; the message has the line.
    """
    owners = _owners(module, example_inputs)
    if not owners:
        return {}
    for node in module.graph.nodes:
        if _name_of(node) == "_get_data_attr":
            _refuse_data(node, owners)
        for written in may_write(node):
            name = _owner(written, owners)
            if name is not None:
                raise CaptureError(
                    f"the forward changes {name} in place ({_name_of(node)}), at "
                    f"{source_line(node)}. " + HOW_TO_WRITE.format(name=name)
                )
    (returned,) = module.graph.output_node().args
    names = {i: _owner(node, owners) for i, node in enumerate(returned)}  # type: ignore[arg-type]
    return {i: name for i, name in names.items() if name is not None}


def _owners(module: fx.GraphModule, example_inputs: Sequence[Any]) -> dict[int, str]:
    """Names of gathered parameters, by the identity of their memory.

    Those of this graph's markers, and those that an earlier graph of the forward has returned.
    """
    owners: dict[int, str] = {}
    placeholders = module.graph.find_nodes(op="placeholder")
    for node, given in zip(placeholders, example_inputs, strict=False):
        name = getattr(given, "_fxzero_name", None) if isinstance(given, Tensor) else None
        if name is not None:
            owners[storage_identity(node.meta["example_value"])] = name
    for node in module.graph.nodes:
        value = node.meta.get("example_value")
        if node.target in _UNSHARD and isinstance(value, Tensor):
            owners[storage_identity(value)] = spec_of(str(node.args[1])).name
    return owners


def _owner(node: Any, owners: dict[int, str]) -> str | None:
    """The name of the parameter whose copy a node's value is, or a view of it."""
    value = node.meta.get("example_value") if isinstance(node, fx.Node) else None
    return owners.get(storage_identity(value)) if isinstance(value, Tensor) else None


def _refuse_data(node: fx.Node, owners: dict[int, str]) -> None:
    """``self.weight.data`` in a forward: Dynamo drops what is assigned to it without a trace."""
    name = _owner(node.all_input_nodes[0], owners)
    if name is not None:
        raise CaptureError(
            f"the forward reads {name}.data, at {source_line(node)}. To read it write "
            f"{name}.detach(). " + HOW_TO_WRITE.format(name=name)
        )


def _name_of(node: fx.Node) -> str:
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "?")


def may_write(node: fx.Node) -> list[fx.Node]:
    """The arguments that a call may change."""
    if node.op not in ("call_function", "call_method"):
        return []
    name = _name_of(node)
    out = node.kwargs.get("out")
    found = [out] if isinstance(out, fx.Node) else []
    in_place = name.endswith("_") and not name.endswith("__") and name != "requires_grad_"
    if in_place or node.target in _IN_PLACE or _renormalises(node, name) or _is_inplace(node):
        weight = 1 if name == "embedding" and not in_place else 0
        candidates = list(node.args[weight : weight + 1])
        if in_place and node.args and isinstance(node.args[0], (list, tuple)):
            candidates = list(node.args[0])  # the foreach functions
        found += [c for c in candidates if isinstance(c, fx.Node)]
    schema = getattr(node.target, "_schema", None)
    if schema is not None:
        for argument, given in zip(schema.arguments, node.args, strict=False):
            if argument.is_write and isinstance(given, fx.Node):
                found.append(given)
    return found


def _is_inplace(node: fx.Node) -> bool:
    """Whether a function was told ``inplace=True``: ``F.relu(x, inplace=True)``."""
    if node.kwargs.get("inplace") is True:
        return True
    if node.op != "call_function" or True not in node.args:
        return False
    try:
        bound = inspect.signature(node.target).bind(*node.args, **node.kwargs)  # type: ignore[arg-type]
    except (TypeError, ValueError):  # built-in functions tell no signature
        return False
    return bound.arguments.get("inplace") is True


def _renormalises(node: fx.Node, name: str) -> bool:
    """Whether this is an embedding with a largest norm, which changes its weight."""
    if name not in ("embedding", "embedding_bag"):
        return False
    given = node.args[3] if len(node.args) > 3 else node.kwargs.get("max_norm")
    return isinstance(given, (int, float)) and not isinstance(given, bool)
