"""A traced call of a layer, written into Dynamo's graph once more for another layer."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import fx, nn
from torch.distributed.tensor import DTensor

from fxzero._compat.fakes import empty_fake, fake_beside
from fxzero._compat.layer_calls import Call, Trace
from fxzero._compat.traced_objects import moved_to, value_at


def copy_call(trace: Trace, call: Call, tx: Any, keys: dict[str, str]) -> Any:
    """Write the nodes of a traced call again, for another, and give its result."""
    from torch._dynamo import variables as v
    from torch._dynamo.utils import get_fake_value
    from torch._dynamo.variables.builder import wrap_fx_proxy

    tracer = tx.output.current_tracer
    old, new = trace.call.module.source, call.module.source
    copies: dict[fx.Node, fx.Node] = dict(zip(trace.call.tensors, call.tensors, strict=True))
    stacks = _Stacks(trace, call, tx)
    for node, source in trace.inputs.items():
        copies[node] = _copy_input(node, moved_to(source, old, new), tx)
        stacks.describe(node, copies[node])

    def argument(value: Any) -> Any:
        if isinstance(value, fx.Node):
            return copies.get(value, value)
        return keys.get(value, value) if isinstance(value, str) else value

    for node in trace.nodes:
        args, kwargs = (fx.node.map_aggregate(part, argument) for part in (node.args, node.kwargs))
        copy = copies[node] = tracer.create_node(
            node.op, node.target, args, kwargs, re.sub(r"_\d+$", "", node.name)
        )
        stacks.describe(node, copy)
        if node in trace.fresh:
            copy.meta["example_value"] = get_fake_value(copy, tx)
        elif "example_value" in node.meta:
            copy.meta["example_value"] = node.meta["example_value"]

    def value_of(result: Any) -> Any:
        if type(result) is v.TupleVariable:
            return v.TupleVariable([value_of(item) for item in result.items])
        if isinstance(result, v.ConstantVariable):
            return result
        copy = copies[result.as_proxy().node]
        example = copy.meta.pop("example_value")
        return wrap_fx_proxy(tx, fx.Proxy(copy, tracer), example_value=example)

    return value_of(trace.result)


def _copy_input(node: fx.Node, source: Any, tx: Any) -> fx.Node:
    """Make a tensor of a layer an input of the graph, as the one of another layer is.

    Of a parameter, whose guards are the layer's, everything is taken over from the other.
    """
    from torch._dynamo.decorators import mark_static_address
    from torch._dynamo.variables.builder import GraphArg, VariableBuilder

    output = tx.output
    known = output.input_source_to_var.get(source)
    if known is not None:
        return known.as_proxy().node
    like = node.meta["grapharg"]
    value = value_at(source, tx)
    if not isinstance(value, nn.Parameter):
        return VariableBuilder(tx, source)(value).as_proxy().node
    if value in output.side_effects:  # tied: that it is this parameter is guarded
        return output.side_effects[value].as_proxy().node
    mark_static_address(value, guard=False)
    # Its own: sets, and `is`, know a tensor by it (`Module.parameters()` leaves out duplicates).
    example = fake_beside(node.meta["example_value"], output.fake_mode)
    proxy = output.root_tracer.create_graph_input(
        re.sub(r"[^a-zA-Z0-9]+", "_", source.name), type(value), example, source=source
    )
    contexts = output.tracing_context.tensor_to_context
    _take_context(contexts, like.example, value)
    variable = output.input_source_to_var[like.source].clone(proxy=proxy, source=source)
    output.side_effects.track_object_existing(value, variable)
    output.input_source_to_var[source] = variable
    proxy.node.meta["tensor_dict"] = dict(node.meta["tensor_dict"])
    proxy.node.meta["grapharg"] = GraphArg(source, value, False, example)
    if isinstance(value, DTensor):
        _take_context(contexts, like.example._local_tensor, value._local_tensor)
        assert isinstance(example, DTensor)
        local = empty_fake(example._local_tensor, output.fake_mode)
        proxy.node.meta["fxzero_local"] = local  # see `nodes.own_local_fake`
    return proxy.node


def _take_context(contexts: Any, like: torch.Tensor, value: torch.Tensor) -> None:
    """Let a tensor's shape be as static as another's."""
    context = contexts.get(like)
    if context is not None:
        contexts[value] = context


class _Stacks:
    """Where copied nodes come from: the modules and lines of the traced call, moved."""

    def __init__(self, trace: Trace, call: Call, tx: Any) -> None:
        self.outer = dict(tx.nn_module_stack)
        self.depth = trace.depth
        old, new = trace.call.module, call.module
        self.names = tuple(_path(module.get_nn_module_stack_source().name) for module in (old, new))
        pairs = zip(old.value.modules(), new.value.modules(), strict=False)
        self.ids = {str(id(a)): str(id(b)) for a, b in pairs}
        self.moved: dict[tuple[str, ...], dict[str, Any]] = {}

    def describe(self, node: fx.Node, copy: fx.Node) -> None:
        """Give a copy its node's metadata, in the place of the call."""
        stack = node.meta.get("nn_module_stack")
        if stack is not None:
            key = tuple(stack)
            if key not in self.moved:
                self.moved[key] = self._move(stack)
            copy.meta["nn_module_stack"] = self.moved[key]
        copy.meta["stack_trace"] = node.meta.get("stack_trace")
        sources = node.meta.get("source_fn_stack")
        if sources:
            copy.meta["source_fn_stack"] = [*sources[:-1], (copy.name, *sources[-1][1:])]

    def _move(self, stack: dict[str, Any]) -> dict[str, Any]:
        moved = dict(self.outer)
        for key, (name, *rest) in list(stack.items())[self.depth :]:
            identity, *occurrence = key.split("@")
            identity = self.ids.get(identity, identity)
            moved["@".join([identity, *occurrence])] = (name.replace(*self.names), *rest)
        return moved


def _path(name: str) -> str:
    """The name of a source as Dynamo writes it into module stacks."""
    return re.sub(r"\._(?:modules|parameters|buffers)\[(['\"])([^'\"\]]+)\1\]", r".\2", name)
