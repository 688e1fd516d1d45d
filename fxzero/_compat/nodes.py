"""What stands on the nodes of torch's graphs: Dynamo's, and AOTAutograd's joint ones."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import fx
from torch.fx._lazy_graph_module import _LazyGraphModule

from fxzero._compat.fakes import fake_mode_of_tensor

T = TypeVar("T")

pytree = torch.utils._pytree
"""Torch's walks through nested containers."""
OpOverload = torch._ops.OpOverload
"""The type of an operator as it stands in a graph."""
set_grad_enabled = torch._C._set_grad_enabled
"""What Dynamo writes for ``torch.no_grad``."""


def by_identity(of: Callable[[Any], T]) -> Callable[[Any], T]:
    """A fact about an operator, found once; the operator is kept, so that no other has its place.

    ``functools.cache`` would ask for their hash, which torch computes in Python.
    """
    known: dict[int, tuple[Any, T]] = {}

    @functools.wraps(of)
    def ask(target: Any) -> T:
        found = known.get(id(target))
        if found is None:
            found = known[id(target)] = (target, of(target))
        return found[1]

    return ask


def log_usage() -> Callable[..., Any]:
    """What tells torch's own statistics that a part of its interface is used; no value."""
    return torch._C._log_api_usage_once


def is_higher_order(node: fx.Node) -> bool:
    """Whether a node of Dynamo's graph runs a graph of its own: a checkpoint, say."""
    return isinstance(node.target, torch._ops.HigherOrderOperator)


def is_plain_to_local(node: fx.Node) -> bool:
    """Whether a node of Dynamo's graph is ``x.to_local()`` without arguments.

    A method call in torch 2.13; in 2.11 a function that has closed over its arguments.
    """
    if len(node.args) != 1 or node.kwargs:
        return False
    if node.op == "call_function" and getattr(node.target, "__name__", "") == "prim_to_local":
        assert callable(node.target)
        bound = inspect.getclosurevars(node.target).nonlocals
        return not any(bound.values())
    return node.op == "call_method" and node.target == "to_local"


def is_script_object(value: Any) -> bool:
    """Whether a graph input is an opaque object, such as a DTensor's mesh."""
    return type(value).__name__ == "FakeScriptObject" or isinstance(value, torch.ScriptObject)


def own_local_fake(node: fx.Node) -> torch.Tensor:
    """A fake input that stands for the local tensor of the fake DTensor that a graph takes."""
    value = node.meta["example_value"]
    local = node.meta.get("fxzero_local")
    if local is None:
        local = value._local_tensor
        with fake_mode_of_tensor(local):
            local = local.detach()
    # Otherwise it is the node's own already: of a copy, `layer_copies` has made it.
    return local.requires_grad_(value.requires_grad)


def input_source_name(node: fx.Node) -> str:
    """Where Dynamo took a graph input from: ``"L['self']._modules['h']._parameters['w']"``."""
    source = getattr(node, "_dynamo_source", None)
    name = getattr(source, "name", "") if source is not None else ""
    return name() if callable(name) else name


def copy_input_source(node: fx.Node, copy: fx.Node) -> None:
    """Let a copy of a graph input come from where Dynamo took the input."""
    if hasattr(node, "_dynamo_source"):
        setattr(copy, "_dynamo_source", getattr(node, "_dynamo_source"))  # noqa: B009, B010


def input_index(node: fx.Node) -> int | None:
    """Which input of Dynamo's graph a joint graph's placeholder is, or is a part of."""
    desc = node.meta.get("desc")
    while desc is not None and not hasattr(desc, "idx"):
        desc = getattr(desc, "base", None)
    return getattr(desc, "idx", None) if type(desc).__name__ == "PlainAOTInput" else None


def mutated_index(desc: Any) -> int | None:
    """Of which input a joint graph's output is the value after the graph has changed it."""
    if type(desc).__name__ == "SubclassGetAttrAOTOutput":
        desc = desc.base
    if type(desc).__name__ != "InputMutationAOTOutput":
        return None
    mutated = desc.mutated_input
    while mutated is not None and not hasattr(mutated, "idx"):
        mutated = getattr(mutated, "base", None)
    return getattr(mutated, "idx", None)


def gradient_index(desc: Any) -> int | None:
    """Of which input a joint graph's output is the gradient."""
    if type(desc).__name__ == "SubclassGetAttrAOTOutput":
        desc = desc.base
    if type(desc).__name__ != "GradAOTOutput":
        return None
    grad_of = desc.grad_of
    while grad_of is not None and not hasattr(grad_of, "idx"):
        grad_of = getattr(grad_of, "base", None)
    return getattr(grad_of, "idx", None)


def is_output(desc: Any) -> bool:
    """Whether a joint graph's output is one of Dynamo's graph itself."""
    return type(desc).__name__ == "PlainAOTOutput"


def checkpoint_tag(node: fx.Node) -> str:
    """What `torch.utils.checkpoint` asked of a node: ``"save"``, ``"recompute"`` or ``""``."""
    policy = node.meta.get("recompute")
    name = getattr(policy, "name", "")
    if name in ("MUST_RECOMPUTE", "PREFER_RECOMPUTE"):
        return "recompute"
    return "save" if name in ("MUST_SAVE", "PREFER_SAVE") else ""


def checkpoint_number(node: fx.Node) -> int | None:
    """Which `torch.utils.checkpoint` a node is of, numbered in the order of their calls; its
    backward has the same number. None if it is of none."""
    number: int | None = node.meta.get("ac_graph_id")
    return number


def create_node(
    graph: fx.Graph,
    op: str,
    target: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    name: str | None = None,
) -> fx.Node:
    """``graph.create_node``, without looking for symbols among the arguments.

    torch 2.13 flattens the arguments of every node that it makes, to warn of symbolic sizes that
    are no nodes: a third of the time that making one takes. AOTAutograd's graphs have none.
    """
    if op in ("placeholder", "output", "get_attr"):  # there nothing is searched
        return graph.create_node(op, target, args, kwargs, name)
    node = graph.create_node(op, target, name=name)
    set_args(node, args)
    if kwargs:
        node.kwargs = kwargs
    return node


def copy_node(
    graph: fx.Graph, node: fx.Node, argument: Callable[[fx.Node], Any] = lambda n: n
) -> fx.Node:
    """``graph.node_copy``, as `create_node` makes nodes."""
    args, kwargs = fx.map_arg(node.args, argument), fx.map_arg(node.kwargs, argument)
    copy = create_node(graph, node.op, node.target, args, kwargs, node.name)
    if node.type is not None:
        copy.type = node.type
    set_meta(copy, dict(node.meta))
    return copy


def graph_module(root: torch.nn.Module, graph: fx.Graph) -> fx.GraphModule:
    """``fx.GraphModule(root, graph)``, whose code is written once somebody runs or reads it.

    Of the copies of a graph that a search tries and measures, none is run.
    """
    return _LazyGraphModule(root, graph)


def set_args(node: fx.Node, args: tuple[Any, ...]) -> None:
    """``node.args = args``, which leaves alone where the graph finds the node by its target.

    A node takes itself out of that index and puts itself back whenever an attribute is set, though
    the index goes by operation and target alone: half of the time that setting one takes.
    """
    _set_args(node, args)


def set_meta(node: fx.Node, meta: dict[str, Any]) -> None:
    """``node.meta = meta``, as `set_args` sets arguments."""
    object.__setattr__(node, "meta", meta)


_set_args: Any = fx.Node.args.fset  # type: ignore[attr-defined]  # a property


def arguments_of(
    node: fx.Node, value_of: Callable[[fx.Node], Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What a node is called with, in lists and dicts as code makes them: those of the node itself
    may not be changed, and what is called may want to.

    Args:
        value_of: the value of a node that it reads.
    """

    def made(part: Any) -> Any:
        if isinstance(part, fx.Node):
            return value_of(part)
        if isinstance(part, list):
            return [made(one) for one in part]
        if isinstance(part, dict):
            return {key: made(one) for key, one in part.items()}
        if isinstance(part, tuple):
            parts = [made(one) for one in part]
            return type(part)(*parts) if hasattr(part, "_fields") else tuple(parts)
        if isinstance(part, slice):
            return slice(made(part.start), made(part.stop), made(part.step))
        return part

    return tuple(made(part) for part in node.args), {k: made(v) for k, v in node.kwargs.items()}
