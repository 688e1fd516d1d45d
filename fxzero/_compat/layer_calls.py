"""Calls of layers: what may decide what Dynamo traces in one, and what it has traced."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.distributed.tensor import DTensor

from fxzero._compat.fakes import is_plain_fake
from fxzero._compat.layer_guards import Alike, NotAlikeError
from fxzero._compat.nodes import is_plain_to_local
from fxzero._compat.traced_objects import Changes, is_below

log = logging.getLogger("fxzero")


@dataclass(frozen=True)
class Call:
    """A call of a module: all that may decide what is traced, but for the module itself."""

    module: Any
    arguments: tuple[Any, ...]
    """Equal for calls with like arguments."""
    tensors: tuple[fx.Node, ...]
    """The values among them that were computed in this graph, in order."""
    state: tuple[Any, ...]
    sources: tuple[Any, ...]
    """Of those that come from outside of the graph, where from."""
    kept: tuple[Any, ...]
    """Keeps objects alive that `arguments` tells apart by their ids."""

    @classmethod
    def of(cls, module: Any, tx: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Call | None:
        """What is called, and how; None where the arguments cannot be compared."""
        tensors: dict[fx.Node, int] = {}
        sources: list[Any] = []
        try:
            arguments = (
                *(_describe(a, tensors, sources) for a in args),
                *((name, _describe(a, tensors, sources)) for name, a in kwargs.items()),
            )
        except NotAlikeError as why:
            log.debug("%s is traced by itself: %s", module.source.name, why)
            return None
        arguments = (len(args), *arguments)
        given = tuple(sources)
        return cls(module, arguments, tuple(tensors), _state(tx), given, (args, kwargs))


def _describe(value: Any, tensors: dict[fx.Node, int], sources: list[Any]) -> Any:
    """All that a trace may depend on in an argument.

    Args:
        value: Dynamo's variable.
        tensors: gets what was computed in the graph, by position.
        sources: gets where the rest comes from.

    Raises:
        NotAlikeError: it can change while the function is traced, and its contents cannot be
            compared.
    """
    from torch._dynamo import variables as v

    if isinstance(value, v.ConstantVariable):
        return ("constant", type(value.value), value.value)
    if isinstance(value, v.LazyVariableTracker) or value.source is not None:
        sources.append(value.source)
        return ("same", id(value))
    if type(value) is v.TensorVariable:
        node = value.as_proxy().node
        if node.op != "placeholder":
            position = tensors.setdefault(node, len(tensors))
            return ("tensor", position, *_metadata(node.meta.get("example_value")))
    if type(value) in (v.TupleVariable, v.ListVariable):
        return (type(value), *(_describe(item, tensors, sources) for item in value.items))
    raise NotAlikeError(f"an argument is a {type(value).__name__}")


def _metadata(value: Any) -> tuple[Any, ...]:
    from torch._subclasses.fake_tensor import FakeTensor

    if type(value) is not FakeTensor or value.is_nested or value.layout is not torch.strided:
        raise NotAlikeError(f"an argument is a {type(value).__name__}")
    numbers = (*value.shape, *value.stride(), value.storage_offset())
    if not all(type(number) is int for number in numbers):
        raise NotAlikeError("an argument has a symbolic shape")
    facts = (value.dtype, value.device, value.requires_grad, value.is_leaf, value._is_view())
    return (*numbers, value.ndim, *facts, value.is_conj(), value.is_neg(), value.is_inference())


def _state(tx: Any) -> tuple[Any, ...]:
    """What a trace may depend on besides objects: modes, and the defaults of torch."""
    found: dict[str, Any] = {}
    tx.output.save_global_state(found)
    modes = tx.symbolic_torch_function_state
    return (
        *(value for _, value in found.values()),
        torch.get_default_dtype(),
        torch.is_inference_mode_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        modes.torch_function_subclass_enabled,
        modes.torch_function_mode_enabled,
        *(id(mode) for mode in modes.mode_stack),
    )


@dataclass(frozen=True)
class Before:
    """Where a tracing stands before a call."""

    last: fx.Node | None
    depth: int
    """How many modules are being called."""
    random_calls: int
    changes: Changes | None

    @classmethod
    def of(cls, tx: Any) -> Before:
        nodes = tx.output.current_tracer.graph.nodes
        last = next(iter(reversed(nodes)), None)
        depth, random_calls = len(tx.nn_module_stack), len(tx.output.random_calls)
        return cls(last, depth, random_calls, Changes.of(tx))


@dataclass
class Trace:
    """A call that Dynamo has traced."""

    call: Call
    depth: int
    nodes: list[fx.Node]
    inputs: dict[fx.Node, Any]
    """The graph's inputs that are reached through the module, with their sources."""
    result: Any
    changes: Changes
    """What the compiled function had changed before it, and this call does not read."""
    fresh: set[fx.Node]
    """What a copy computes anew on fake tensors: what shares memory with arguments or results."""
    found: Alike | NotAlikeError | None = None
    copied: bool = False

    @classmethod
    def of(cls, call: Call, tx: Any, before: Before, result: Any) -> Trace:
        """What was traced since, if it can stand for other calls.

        Raises:
            NotAlikeError: it cannot.
        """
        earlier, now = before.changes, Changes.of(tx)
        if earlier is None or now is None or not now.same_as(earlier):
            raise NotAlikeError("objects outside of the compiled function were changed")
        if not earlier.untouched():
            raise NotAlikeError("it reads an object that the compiled function has changed")
        if len(tx.output.random_calls) != before.random_calls:
            raise NotAlikeError("it draws random numbers in Python")
        graph = tx.output.current_tracer.graph
        node = before.last.next if before.last is not None else next(iter(graph.nodes))
        nodes = []
        while node.op != "root":
            if node.op in ("call_function", "call_method"):
                nodes.append(node)
            elif node.op != "placeholder":
                raise NotAlikeError(f"it holds a {node.op} node")
            node = node.next
        inside = set(nodes)
        inputs: dict[fx.Node, Any] = {}
        for node in nodes:
            for used in node.all_input_nodes:
                if used in inside or used in call.tensors or used in inputs:
                    continue
                source = used.meta["grapharg"].source if used.op == "placeholder" else None
                if source is not None and is_below(source, call.module.source):
                    inputs[used] = source
                elif source is None or not any(is_below(source, given) for given in call.sources):
                    raise NotAlikeError(f"it reads {used} besides its arguments")
        for node in inputs:
            if not _is_readable(node, inside):
                raise NotAlikeError(f"it does more with {node} than to read it")
        _check_result(result, inside)
        trace = cls(call, before.depth, nodes, inputs, result, now, set())
        trace.fresh = trace._sharing_memory()
        return trace

    def _sharing_memory(self) -> set[fx.Node]:
        """The nodes that share memory with an argument, a buffer or a result.

        The values of all others can be the very ones of the first layer: nobody sees them but
        nodes of the same layer, and theirs are the same, too.
        """
        found: set[fx.Node] = set()
        shared: set[int] = set()
        buffers = [node for node in self.inputs if not _is_parameter(node)]
        for node in (*self.call.tensors, *buffers, *_result_nodes(self.result)):
            shared |= set(_storages(node))
        for node in self.nodes:
            if not shared.isdisjoint(_storages(node)):
                found.add(node)
        return found

    def alike(self, tx: Any, keys: str) -> Alike:
        """The guards of this call's module, to be asked about others.

        Raises:
            NotAlikeError: they cannot be.
        """
        if self.found is None:
            try:
                parameters = [source for node, source in self.inputs.items() if _is_parameter(node)]
                self.found = Alike.of(self.call.module, parameters, tx, keys, self.changes)
            except NotAlikeError as why:
                self.found = why
        if isinstance(self.found, NotAlikeError):
            raise self.found
        return self.found


def _check_result(result: Any, inside: set[fx.Node]) -> None:
    from torch._dynamo import variables as v

    items = result.items if type(result) is v.TupleVariable else [result]
    for item in items:
        if type(item) is v.TensorVariable and item.source is None:
            node = item.as_proxy().node
            if node in inside:
                _metadata(node.meta.get("example_value"))
                continue
        elif isinstance(item, v.ConstantVariable):
            continue
        raise NotAlikeError(f"its result holds a {type(item).__name__}")


def _result_nodes(result: Any) -> list[fx.Node]:
    from torch._dynamo import variables as v

    items = result.items if type(result) is v.TupleVariable else [result]
    return [item.as_proxy().node for item in items if isinstance(item, v.TensorVariable)]


def _storages(node: fx.Node) -> list[int]:
    """The identities of the memory in which a node's value lies.

    Raises:
        NotAlikeError: it lies in none that can be asked: in a batch of ``torch.vmap``, say.
    """
    values = node.meta.get("example_value")
    values = values if isinstance(values, tuple | list) else [values]
    try:
        return [
            value.untyped_storage()._cdata
            for value in values
            if isinstance(value, torch.Tensor) and not isinstance(value, DTensor)
        ]
    except NotImplementedError as why:
        raise NotAlikeError(f"{node} has no memory of its own: {why}") from why


def _is_parameter(node: fx.Node) -> bool:
    return isinstance(node.meta["grapharg"].example, nn.Parameter)


def _is_readable(node: fx.Node, inside: set[fx.Node]) -> bool:
    """Whether an input of the graph is a plain tensor, or a DTensor that is read locally."""
    if node.meta["grapharg"].pass_arg_as_tensor:  # a number that may change
        return False
    value = node.meta["grapharg"].example
    if isinstance(value, DTensor):
        readers = [user for user in node.users if user in inside]
        return isinstance(value, nn.Parameter) and all(map(is_plain_to_local, readers))
    return type(value) in (torch.Tensor, nn.Parameter, nn.Buffer) or is_plain_fake(value)
