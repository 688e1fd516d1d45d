"""Let Dynamo trace one of equal layers, and copy the others from it, guards and all.

    for block in self.blocks:    block 0   traced: nodes, and guards on all that was read
        x = block(x)             block 1   block 0's guards hold: its nodes, with other parameters
                                 block 2   …

What Dynamo writes down for a call is a function of what it reads: the arguments, the state of the
tracing, and Python objects, each of which it guards. So a call is copied only where all of these
are alike:

- The arguments are alike (`_describe`), and so are grad mode, autocast and their kin (`_state`).
- Nothing that exists outside of the compiled function has been changed while it was traced, and
  the traced call did nothing but compute (`_Trace.of`).
- The guards of the traced module, read as guards of the other module, hold (`_Alike`), as they
  would have been found if it had been traced. The only thing that may differ are its parameters'
  keys, which stand in the graph as constants and are replaced in the copy.
- Objects that are one in the first layer are one in the other, and none that is new in the first
  was known before in the other: Dynamo guards that two paths lead to one object, not that they
  lead to two.

The copy's guards are the same again: one guard manager, built for the first layer, is asked about
every other one in each later call (8 µs a layer; the guards of an own trace take 50).

Known to hold for torch 2.11 and 2.13. Whatever is not as expected is traced as ever.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import re
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import fx, nn
from torch.distributed.tensor import DTensor

log = logging.getLogger("fxzero")

_CANDIDATES = 8
"""How many traced calls of one class of modules are compared with a new one."""
_NAME = "__layer"


class _NotAlikeError(Exception):
    """A traced call cannot stand for others; the message says why."""


def trace_equal_layers_once(is_layer: Callable[[nn.Module], bool], keys: str) -> None:
    """Let Dynamo copy calls of modules that are alike; done once for the process.

    Args:
        is_layer: whether copies of a module's calls are wanted.
        keys: the attribute in which a module keeps the names, unique in the process, that its
            parameters have in graphs.
    """
    from torch._dynamo.variables.nn_module import UnspecializedNNModuleVariable

    traced = UnspecializedNNModuleVariable.call_function
    if hasattr(traced, "fxzero_original"):
        return

    @functools.wraps(traced)
    def call_function(self: Any, tx: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        if not _enabled or not _may_repeat(self, tx) or not is_layer(self.value):
            return traced(self, tx, args, kwargs)
        return _call(self, tx, args, kwargs, traced, keys)

    call_function.fxzero_original = traced  # type: ignore[attr-defined]
    UnspecializedNNModuleVariable.call_function = call_function  # type: ignore[method-assign]


_enabled = True


@contextlib.contextmanager
def tracing_every_layer() -> Iterator[None]:
    """Let Dynamo trace every layer by itself, to compare with."""
    global _enabled
    before, _enabled = _enabled, False
    try:
        yield
    finally:
        _enabled = before


def _may_repeat(module: Any, tx: Any) -> bool:
    """Whether a module is an element of a container, called in the outermost graph."""
    from torch._dynamo.source import DictGetItemSource, GetItemSource, NNModuleSource

    if tx.output.current_tracer.parent is not None or tx.output.export:
        return False
    source = module.source
    while isinstance(source, NNModuleSource):
        source = source.base
    index = getattr(source, "index", None)
    return isinstance(source, DictGetItemSource | GetItemSource) and str(index).isdigit()


def _call(
    module: Any,
    tx: Any,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    traced: Callable[..., Any],
    keys: str,
) -> Any:
    """A call of a layer: copied from one that is alike, or traced and kept for the next."""
    book: list[_Trace] = tx.output.__dict__.setdefault("_fxzero_traces", [])
    call = _Call.of(module, tx, args, kwargs)
    if call is None:
        return traced(module, tx, args, kwargs)
    same = [t for t in book if type(t.call.module.value) is type(module.value)]
    for trace in same:
        if trace.call.arguments == call.arguments and trace.call.state == call.state:
            try:
                alike = trace.alike(tx, keys)
                names = alike.keys_of(module, tx)
            except _NotAlikeError as why:
                log.debug("%s is traced by itself: %s", module.source.name, why)
                continue
            if not trace.copied:
                alike.guard(trace.call.module)  # it may then also not get hooks
            trace.copied = True
            alike.guard(module)
            return trace.copy(call, tx, names)
    if len(same) >= _CANDIDATES:
        return traced(module, tx, args, kwargs)
    before = _Before.of(tx)
    result = traced(module, tx, args, kwargs)
    try:
        book.append(_Trace.of(call, tx, before, result))
    except _NotAlikeError as why:
        log.debug("%s cannot stand for other layers: %s", module.source.name, why)
    return result


@dataclass(frozen=True)
class _Call:
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
    def of(cls, module: Any, tx: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> _Call | None:
        tensors: dict[fx.Node, int] = {}
        sources: list[Any] = []
        try:
            arguments = (
                *(_describe(a, tensors, sources) for a in args),
                *((name, _describe(a, tensors, sources)) for name, a in kwargs.items()),
            )
        except _NotAlikeError as why:
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
        _NotAlikeError: it can change while the function is traced, and its contents cannot be
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
    raise _NotAlikeError(f"an argument is a {type(value).__name__}")


def _metadata(value: Any) -> tuple[Any, ...]:
    from torch._subclasses.fake_tensor import FakeTensor

    if type(value) is not FakeTensor or value.is_nested or value.layout is not torch.strided:
        raise _NotAlikeError(f"an argument is a {type(value).__name__}")
    numbers = (*value.shape, *value.stride(), value.storage_offset())
    if not all(type(number) is int for number in numbers):
        raise _NotAlikeError("an argument has a symbolic shape")
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
class _Before:
    """Where a tracing stands before a call."""

    last: fx.Node | None
    depth: int
    """How many modules are being called."""
    random_calls: int

    @classmethod
    def of(cls, tx: Any) -> _Before:
        nodes = tx.output.current_tracer.graph.nodes
        last = next(iter(reversed(nodes)), None)
        return cls(last, len(tx.nn_module_stack), len(tx.output.random_calls))


def _changed_objects(tx: Any) -> bool:
    """Whether the traced function has changed anything that exists outside of it."""
    from torch._dynamo.variables.base import AttributeMutationExisting, ValueMutationExisting

    effects = tx.output.side_effects
    if effects.tensor_hooks or effects.save_for_backward:
        return True
    if effects.ignore_mutation_on_these_variables:  # functional_call gives it other parameters
        return True
    return any(
        isinstance(value.mutation_type, AttributeMutationExisting | ValueMutationExisting)
        and effects.is_modified(value)
        for value in effects.id_to_variable.values()
    )


@dataclass
class _Trace:
    """A call that Dynamo has traced."""

    call: _Call
    depth: int
    nodes: list[fx.Node]
    inputs: dict[fx.Node, Any]
    """The graph's inputs that are reached through the module, with their sources."""
    result: Any
    fresh: set[fx.Node]
    """What a copy computes anew on fake tensors: what shares memory with arguments or results."""
    found: _Alike | _NotAlikeError | None = None
    copied: bool = False

    @classmethod
    def of(cls, call: _Call, tx: Any, before: _Before, result: Any) -> _Trace:
        """What was traced since, if it can stand for other calls.

        Raises:
            _NotAlikeError: it cannot.
        """
        if _changed_objects(tx):
            raise _NotAlikeError("objects outside of the compiled function were changed")
        if len(tx.output.random_calls) != before.random_calls:
            raise _NotAlikeError("it draws random numbers in Python")
        graph = tx.output.current_tracer.graph
        node = before.last.next if before.last is not None else next(iter(graph.nodes))
        nodes = []
        while node.op != "root":
            if node.op in ("call_function", "call_method"):
                nodes.append(node)
            elif node.op != "placeholder":
                raise _NotAlikeError(f"it holds a {node.op} node")
            node = node.next
        inside = set(nodes)
        inputs: dict[fx.Node, Any] = {}
        for node in nodes:
            for used in node.all_input_nodes:
                if used in inside or used in call.tensors or used in inputs:
                    continue
                source = used.meta["grapharg"].source if used.op == "placeholder" else None
                if source is not None and _is_below(source, call.module.source):
                    inputs[used] = source
                elif source is None or not any(_is_below(source, given) for given in call.sources):
                    raise _NotAlikeError(f"it reads {used} besides its arguments")
        for node in inputs:
            if not _is_readable(node, inside):
                raise _NotAlikeError(f"it does more with {node} than to read it")
        _check_result(result, inside)
        trace = cls(call, before.depth, nodes, inputs, result, set())
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

    def alike(self, tx: Any, keys: str) -> _Alike:
        """The guards of this call's module, to be asked about others.

        Raises:
            _NotAlikeError: they cannot be.
        """
        if self.found is None:
            try:
                parameters = [source for node, source in self.inputs.items() if _is_parameter(node)]
                self.found = _Alike.of(self.call.module, parameters, tx, keys)
            except _NotAlikeError as why:
                self.found = why
        if isinstance(self.found, _NotAlikeError):
            raise self.found
        return self.found

    def copy(self, call: _Call, tx: Any, keys: dict[str, str]) -> Any:
        """Write the nodes of this call again, for another, and give its result."""
        from torch._dynamo import variables as v
        from torch._dynamo.utils import get_fake_value
        from torch._dynamo.variables.builder import wrap_fx_proxy

        tracer = tx.output.current_tracer
        old, new = self.call.module.source, call.module.source
        copies: dict[fx.Node, fx.Node] = dict(zip(self.call.tensors, call.tensors, strict=True))
        stacks = _Stacks(self, call, tx)
        for node, source in self.inputs.items():
            copies[node] = _copy_input(node, _moved(source, old, new), tx)
            stacks.describe(node, copies[node])

        def argument(value: Any) -> Any:
            if isinstance(value, fx.Node):
                return copies.get(value, value)
            return keys.get(value, value) if isinstance(value, str) else value

        for node in self.nodes:
            args, kwargs = (
                fx.node.map_aggregate(part, argument) for part in (node.args, node.kwargs)
            )
            copy = copies[node] = tracer.create_node(
                node.op, node.target, args, kwargs, re.sub(r"_\d+$", "", node.name)
            )
            stacks.describe(node, copy)
            if node in self.fresh:
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

        return value_of(self.result)


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
        raise _NotAlikeError(f"its result holds a {type(item).__name__}")


def _result_nodes(result: Any) -> list[fx.Node]:
    from torch._dynamo import variables as v

    items = result.items if type(result) is v.TupleVariable else [result]
    return [item.as_proxy().node for item in items if isinstance(item, v.TensorVariable)]


def _storages(node: fx.Node) -> list[int]:
    """The identities of the memory in which a node's value lies."""
    values = node.meta.get("example_value")
    values = values if isinstance(values, tuple | list) else [values]
    return [
        value.untyped_storage()._cdata
        for value in values
        if isinstance(value, torch.Tensor) and not isinstance(value, DTensor)
    ]


def _is_parameter(node: fx.Node) -> bool:
    return isinstance(node.meta["grapharg"].example, nn.Parameter)


def _is_readable(node: fx.Node, inside: set[fx.Node]) -> bool:
    """Whether an input of the graph is a plain tensor, or a DTensor that is read locally."""
    from fxzero._compat import is_plain_to_local

    if node.meta["grapharg"].pass_arg_as_tensor:  # a number that may change
        return False
    value = node.meta["grapharg"].example
    if isinstance(value, DTensor):
        readers = [user for user in node.users if user in inside]
        return isinstance(value, nn.Parameter) and all(map(is_plain_to_local, readers))
    return type(value) in (torch.Tensor, nn.Parameter, nn.Buffer)


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
    value = _value(source, tx)
    if not isinstance(value, nn.Parameter):
        return VariableBuilder(tx, source)(value).as_proxy().node
    if value in output.side_effects:  # tied: that it is this parameter is guarded
        return output.side_effects[value].as_proxy().node
    mark_static_address(value, guard=False)
    example = node.meta["example_value"]
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
        local = example._local_tensor
        with output.fake_mode:  # the example is another parameter's
            own = torch.empty_strided(
                local.shape, local.stride(), dtype=local.dtype, device=local.device
            )
        proxy.node.meta["fxzero_local"] = own
    return proxy.node


def _take_context(contexts: Any, like: torch.Tensor, value: torch.Tensor) -> None:
    """Let a tensor's shape be as static as another's."""
    context = contexts.get(like)
    if context is not None:
        contexts[value] = context


class _Stacks:
    """Where copied nodes come from: the modules and lines of the traced call, moved."""

    def __init__(self, trace: _Trace, call: _Call, tx: Any) -> None:
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


def _is_below(source: Any, root: Any) -> bool:
    from torch._dynamo.source import is_from_source

    return bool(is_from_source(source, root))


def _moved(source: Any, old: Any, new: Any) -> Any:
    """The source that leads from `new` to where this one leads from `old`."""
    return source.clone(lambda part: new if part == old else part)


def _value(source: Any, tx: Any) -> Any:
    """The object to which a source leads in the function that is traced."""
    root = tx.output.root_tx
    return _evaluator([source])({}, {"L": root.f_locals, "G": root.f_globals})[0]


def _evaluator(sources: Iterable[Any]) -> Callable[..., tuple[Any, ...]]:
    """A function that gives the objects to which sources lead from the globals it is given."""
    from torch._dynamo.guards import _get_closure_vars

    text = "".join(f"{source.name}, " for source in sources)
    code = compile(f"({text})", "<sources>", "eval")

    def evaluate(names: dict[str, Any], scope: dict[str, Any] | None = None) -> tuple[Any, ...]:
        values: tuple[Any, ...] = eval(code, closure, scope or {"G": names})
        return values

    closure = dict(_get_closure_vars())
    return evaluate


class _Guards:
    """The guards that Dynamo found in tracing one module, to be asked about others.

    They live as long as what was compiled, so they keep nothing alive that belongs to the model.
    """

    def __init__(self, name: str, keys: Sequence[Any], parameters: Sequence[Any]) -> None:
        """Begin without guards.

        Args:
            name: where the module was.
            keys: sources of its parameters' keys.
            parameters: sources of its parameters.
        """
        self.name = name
        self.valid = True
        self.scope: dict[str, Any] = {_NAME: None}
        self.root: Any = None
        self._kept: dict[int, Any] = {}
        self._keys = _evaluator(keys)
        self._parameters = _evaluator(parameters)

    def identity(self, value: Any, _: str = "") -> int:
        """An object's id, which no other object will have as long as this answers True."""
        if id(value) not in self._kept:
            self._kept[id(value)] = self._reference(value)
        return id(value)

    def is_object(self, value: Any) -> Callable[[Any], bool]:
        """A function that tells whether something is this object."""
        reference = self._reference(value)
        return lambda found: found is reference()

    def _reference(self, value: Any) -> Callable[[], Any]:
        guards = weakref.ref(self)

        def died(_: Any) -> None:
            if (these := guards()) is not None:
                these.valid = False

        try:
            return weakref.ref(value, died)
        except TypeError:  # a plain value, which is kept
            return lambda: value

    def hold(self, module: nn.Module) -> bool:
        """Whether the guards that the first module passed hold of another."""
        self.scope[_NAME] = module
        try:
            return self.valid and bool(self.root.check({}))
        finally:
            self.scope[_NAME] = None

    def broken(self, module: nn.Module) -> str:
        """Which guard does not hold."""
        self.scope[_NAME] = module
        try:
            return "; ".join(self.root.check_verbose({}).verbose_code_parts)
        finally:
            self.scope[_NAME] = None

    def keys(self, module: nn.Module) -> tuple[Any, ...]:
        """The keys of a module's parameters."""
        return self._keys({_NAME: module})

    def parameters(self, module: nn.Module) -> tuple[nn.Parameter, ...]:
        """Its parameters."""
        return self._parameters({_NAME: module})


@dataclass(frozen=True)
class _Alike:
    """One module as it was traced, and what tells another that is alike from it."""

    guards: _Guards
    keys: tuple[Any, ...]
    values: tuple[Any, ...]
    """The objects that were guarded."""
    sources: dict[Any, bool]
    """Where they are, and whether each is guarded to be one that lies outside of the module."""
    read: Callable[[dict[str, Any]], tuple[Any, ...]]
    """The same objects of another module."""

    @classmethod
    def of(cls, module: Any, parameters: Iterable[Any], tx: Any, keys: str) -> _Alike:
        """Make Dynamo's guards of a module guards of any.

        Args:
            parameters: where those are that its graph reads.

        Raises:
            _NotAlikeError: there is one that this cannot do with.
        """
        old, place = module.source, _place()
        sources: dict[Any, bool] = {}
        key_sources: list[Any] = []
        found: list[Any] = []
        parameters = [_moved(source, old, place) for source in parameters]
        guards = None
        moved = [
            (guard, _moved(guard.originating_source, old, place)) for guard in tx.output.guards
        ]
        moved = [(guard, source) for guard, source in moved if source != guard.originating_source]
        key_sources = [source for _, source in moved if f".{keys}[" in source.name]
        guards = _Guards(old.name, key_sources, parameters)
        for guard, source in moved:
            if source in key_sources:
                continue
            create, outside = _moved_create(guard, old, guards, tx)
            sources[source] = sources.get(source, False) or outside
            new = replace(guard, originating_source=source, create_fn=create, _hash=None)
            for fact in ("guard_types", "code_list", "obj_weakref", "guarded_class_weakref"):
                setattr(new, fact, None)
            found.append(new)
        _build(guards, found, module, tx)
        read = _evaluator(list(sources))
        names = {_NAME: module.value}
        values = read(names)
        alike = cls(guards, guards.keys(module.value), values, sources, read)
        if not guards.hold(module.value):
            raise _NotAlikeError(f"its guards do not hold of itself: {guards.broken(module.value)}")
        return alike

    def keys_of(self, module: Any, tx: Any) -> dict[str, str]:
        """The first module's keys, and those of another that is alike.

        Raises:
            _NotAlikeError: it is not.
        """
        guards, effects = self.guards, tx.output.side_effects
        if _changed_objects(tx):
            raise _NotAlikeError("objects outside of the compiled function were changed")
        if not guards.hold(module.value):
            raise _NotAlikeError(f"not like {guards.name}: {guards.broken(module.value)}")
        values = self.read({_NAME: module.value})
        if _partition(values) != _partition(self.values):
            raise _NotAlikeError(f"other objects are one and the same than in {guards.name}")
        for source, value, own in zip(self.sources, values, self.values, strict=True):
            variable = effects.id_to_variable.get(id(value))
            if variable is None or value is own or self.sources[source]:
                continue
            if variable.source != _moved(source, _place(), module.source):
                raise _NotAlikeError(
                    f"{variable.source.name} is in it, and nothing like it in {guards.name}"
                )
        keys = dict(zip(self.keys, guards.keys(module.value), strict=True))
        if len(set(keys.values())) != len(keys):
            raise _NotAlikeError(f"other parameters are tied than in {guards.name}")
        return keys

    def guard(self, module: Any) -> None:
        """Let later calls find the module as it is now."""
        from torch._dynamo.guards import install_guard

        guards, name = self.guards, module.source.name
        keys = guards.keys(module.value)
        parameters = [weakref.ref(parameter) for parameter in guards.parameters(module.value)]
        why = f"{name} is like {guards.name}, which was traced for both"

        def holds(module: nn.Module) -> bool:
            if not guards.hold(module) or guards.keys(module) != keys:
                return False
            found = guards.parameters(module)
            return all(ref() is value for ref, value in zip(parameters, found, strict=True))

        def create(builder: Any, guard: Any) -> None:
            _add_guard(builder, guard, holds, why)

        install_guard(module.source.make_guard(create))


def _place() -> Any:
    from torch._dynamo.source import GlobalSource

    return GlobalSource(_NAME)


def _build(guards: _Guards, found: list[Any], module: Any, tx: Any) -> None:
    """Make one guard manager of guards that were moved to `_place`."""
    from torch._dynamo.guards import CheckFunctionManager
    from torch._guards import Guard
    from torch.utils._ordered_set import OrderedSet

    output, old, place = tx.output, module.source, _place()
    sizes = output.input_source_to_sizes_strides
    order = {_moved(source, old, place) for source in output.guard_on_key_order}
    state: Any = SimpleNamespace(
        local_scope={},
        global_scope=guards.scope,
        guard_on_key_order={source for source in order if _NAME in source.name},
        input_source_to_sizes_strides={_moved(s, old, place): size for s, size in sizes.items()},
        export=False,
    )
    owner: Any = SimpleNamespace(
        output_graph=state,
        runtime_global_scope=None,
        id_ref=guards.identity,
        lookup_weakrefs=lambda _: None,
        used_builtin_vars=set(),
        additional_used_local_vars=set(),
        additional_used_global_vars=set(),
    )
    found.sort(key=Guard.sort_key)
    guards.scope[_NAME] = module.value
    try:
        with (
            torch._C.DisableTorchFunction(),
            torch._dynamo.config.patch(skip_nnmodule_hook_guards=False),
        ):
            builder, manager = CheckFunctionManager.build_guards(
                owner, found, OrderedSet(), tx.f_code, state, False
            )
            if codes := builder.object_aliasing_guard_codes:
                parts, verbose = map(list, zip(*codes, strict=True))
                builder.add_python_lambda_leaf_guard_to_root(parts, verbose)
    except Exception as error:
        raise _NotAlikeError(f"its guards cannot be built: {error!r}") from error
    finally:
        guards.scope[_NAME] = None
    guards.root = manager.root


def _add_guard(builder: Any, guard: Any, holds: Callable[[Any], bool], why: str) -> None:
    """Add a guard of our own to Dynamo's; what it takes has changed between 2.11 and 2.13."""
    guard._unserializable = True
    manager = builder.get_guard_manager(guard)
    try:
        manager.add_lambda_guard(holds, [why], guard.user_stack)
    except TypeError:
        manager.add_lambda_guard(holds, [why])


def _partition(values: Sequence[Any]) -> list[int]:
    """By object, the position of the first that is the same one; plain values are not objects."""
    plain = (int, float, str, bytes, tuple, type, torch.dtype, torch.device, torch.Size)
    first: dict[int, int] = {}
    return [
        -1 if value is None or isinstance(value, plain) else first.setdefault(id(value), position)
        for position, value in enumerate(values)
    ]


def _moved_create(guard: Any, old: Any, guards: _Guards, tx: Any) -> tuple[Any, bool]:
    """How a guard is made of another module, and whether it says that an object lies outside.

    That two paths lead to one object becomes, where one of them leads around the module, that
    the other leads to that very object: in later calls only the module is at hand.

    Raises:
        _NotAlikeError: the guard compares with another place in a way that is not known here.
    """
    from torch._dynamo.guards import GuardBuilder
    from torch._guards import Source

    create = guard.create_fn
    if not isinstance(create, functools.partial):
        return create, False
    values = (*create.args, *create.keywords.values())
    other = [value for value in values if isinstance(value, Source)]
    if not other:
        return create, False
    if create.func is not GuardBuilder.DUPLICATE_INPUT or len(other) > 1:
        raise _NotAlikeError(f"it has a guard {guard.create_fn_name()}")
    moved = _moved(other[0], old, _place())
    if moved != other[0]:
        return functools.partial(create.func, source_b=moved), False
    is_object = guards.is_object(_value(other[0], tx))
    why = f"{guard.name} is {other[0].name}"

    def is_that_object(builder: Any, guard: Any) -> None:
        _add_guard(builder, guard, is_object, why)

    return is_that_object, True
