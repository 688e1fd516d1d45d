"""The guards of a traced layer, asked whether another is like it, now and in later calls."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from fxzero._compat.traced_objects import Changes, evaluator, moved_to, value_at

_NAME = "__layer"


class NotAlikeError(Exception):
    """A traced call cannot stand for others; the message says why."""


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
        self._keys = evaluator(keys)
        self._parameters = evaluator(parameters)

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
            with _plain_dispatch():
                return self.valid and bool(self.root.check({}))
        finally:
            self.scope[_NAME] = None

    def broken(self, module: nn.Module) -> str:
        """Which guard does not hold."""
        self.scope[_NAME] = module
        try:
            with _plain_dispatch():
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
class Alike:
    """One module as it was traced, and what tells another that is alike from it."""

    guards: _Guards
    keys: tuple[Any, ...]
    values: tuple[Any, ...]
    """The objects that were guarded."""
    sources: dict[Any, bool]
    """Where they are, and whether each is guarded to be one that lies outside of the module."""
    read: Callable[[dict[str, Any]], tuple[Any, ...]]
    """The same objects of another module."""
    changes: Changes
    """What the compiled function had changed before, none of it among them."""

    @classmethod
    def of(
        cls, module: Any, parameters: Iterable[Any], tx: Any, keys: str, changes: Changes
    ) -> Alike:
        """Make Dynamo's guards of a module guards of any.

        Args:
            parameters: where those are that its graph reads.
            changes: what had been changed when it was traced.

        Raises:
            NotAlikeError: there is one that this cannot do with.
        """
        old, place = module.source, _place()
        sources: dict[Any, bool] = {}
        key_sources: list[Any] = []
        found: list[Any] = []
        parameters = [moved_to(source, old, place) for source in parameters]
        guards = None
        moved = [
            (guard, moved_to(guard.originating_source, old, place)) for guard in tx.output.guards
        ]
        moved = [(guard, source) for guard, source in moved if source != guard.originating_source]
        key_sources = [source for _, source in moved if f".{keys}[" in source.name]
        guards = _Guards(old.name, key_sources, parameters)
        for guard, source in moved:
            if source in key_sources:
                continue
            create, outside = _moved_create(guard, old, guards, tx)
            asked = _guarded(guard, source)
            sources[asked] = sources.get(asked, False) or outside
            new = replace(guard, originating_source=source, create_fn=create, _hash=None)
            for fact in ("guard_types", "code_list", "obj_weakref", "guarded_class_weakref"):
                setattr(new, fact, None)
            found.append(new)
        _build(guards, found, module, tx)
        read = evaluator(list(sources))
        names = {_NAME: module.value}
        values = read(names)
        alike = cls(guards, guards.keys(module.value), values, sources, read, changes)
        alike._refuse_changed(module, values)
        if not guards.hold(module.value):
            raise NotAlikeError(f"its guards do not hold of itself: {guards.broken(module.value)}")
        return alike

    def keys_of(self, module: Any, tx: Any, kind_of: Callable[[str], object]) -> dict[str, str]:
        """The first module's keys, and those of another that is alike.

        Args:
            kind_of: by a key, what is the same of parameters that are alike.

        Raises:
            NotAlikeError: it is not.
        """
        guards, effects = self.guards, tx.output.side_effects
        changes = Changes.of(tx)
        if changes is None or not changes.same_as(self.changes):
            raise NotAlikeError("objects outside of the compiled function were changed")
        if not guards.hold(module.value):
            raise NotAlikeError(f"not like {guards.name}: {guards.broken(module.value)}")
        values = self.read({_NAME: module.value})
        self._refuse_changed(module, values)
        if _partition(values) != _partition(self.values):
            raise NotAlikeError(f"other objects are one and the same than in {guards.name}")
        for source, value, own in zip(self.sources, values, self.values, strict=True):
            variable = effects.id_to_variable.get(id(value))
            if variable is None or value is own or self.sources[source]:
                continue
            if variable.source != moved_to(source, _place(), module.source):
                raise NotAlikeError(
                    f"{variable.source.name} is in it, and nothing like it in {guards.name}"
                )
        keys = dict(zip(self.keys, guards.keys(module.value), strict=True))
        if len(set(keys.values())) != len(keys):
            raise NotAlikeError(f"other parameters are tied than in {guards.name}")
        if any(kind_of(own) != kind_of(key) for own, key in keys.items()):
            raise NotAlikeError(f"its parameters are of other shapes than those of {guards.name}")
        return keys

    def _refuse_changed(self, module: Any, values: Iterable[Any]) -> None:
        """See that a module reads nothing that the compiled function has changed.

        Raises:
            NotAlikeError: it does, and a guard would see what was there before.
        """
        if any(id(value) in self.changes.objects for value in (module.value, *values)):
            raise NotAlikeError("it reads an object that the compiled function has changed")

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


@contextlib.contextmanager
def _plain_dispatch() -> Iterator[None]:
    """Outside of autocast and of inference mode.

    A guard of a tensor compares its dispatch keys with those of when the guard was made. A layer is
    traced inside of the forward's own autocast, and outside of any inference mode; it is checked
    where the model is called. What holds there, Dynamo and `Call.state` compare.
    """
    with torch._C._DisableAutocast():
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False):
                yield
        else:
            yield


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
    order = {moved_to(source, old, place) for source in output.guard_on_key_order}
    state: Any = SimpleNamespace(
        local_scope={},
        global_scope=guards.scope,
        guard_on_key_order={source for source in order if _NAME in source.name},
        input_source_to_sizes_strides={moved_to(s, old, place): size for s, size in sizes.items()},
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
            _plain_dispatch(),
            torch._dynamo.config.patch(skip_nnmodule_hook_guards=False),
        ):
            builder, manager = CheckFunctionManager.build_guards(
                owner, found, OrderedSet(), tx.f_code, state, False
            )
            if codes := builder.object_aliasing_guard_codes:
                parts, verbose = map(list, zip(*codes, strict=True))
                builder.add_python_lambda_leaf_guard_to_root(parts, verbose)
    except Exception as error:
        raise NotAlikeError(f"its guards cannot be built: {error!r}") from error
    finally:
        guards.scope[_NAME] = None
    guards.root = manager.root


def _add_guard(builder: Any, guard: Any, holds: Callable[[Any], bool], why: str) -> None:
    """Add a guard of our own to Dynamo's: what it computes of the object must be True.

    It is a value below the object, not a guard on it: where nothing else below a module is guarded,
    Dynamo takes the module for unchanged as long as its own ``__dict__`` is
    (``use_recursive_dict_tags_for_guards``, torch 2.11's default), and asks no guard on it again.
    """
    from torch._dynamo.guards import GuardManagerType

    guard._unserializable = True
    builder.get_guard_manager(guard).lambda_manager(
        python_lambda=holds,
        source=why,
        example_value=True,
        guard_manager_enum=GuardManagerType.GUARD_MANAGER,
    ).add_true_match_guard([why], guard.user_stack)


def _partition(values: Sequence[Any]) -> list[int]:
    """By object, the position of the first that is the same one; plain values are not objects."""
    plain = (int, float, str, bytes, tuple, type, torch.dtype, torch.device, torch.Size)
    first: dict[int, int] = {}
    return [
        -1 if value is None or isinstance(value, plain) else first.setdefault(id(value), position)
        for position, value in enumerate(values)
    ]


def _guarded(guard: Any, source: Any) -> Any:
    """Where the object is that a guard asks.

    Whether an object has an attribute torch 2.11 guards at the attribute, which may be missing.
    """
    from torch._dynamo.guards import GuardBuilder
    from torch._dynamo.source import NNModuleSource

    if guard.create_fn is not GuardBuilder.HASATTR:
        return source
    holder = source.base
    return holder.base if isinstance(source, NNModuleSource) else holder


def _moved_create(guard: Any, old: Any, guards: _Guards, tx: Any) -> tuple[Any, bool]:
    """How a guard is made of another module, and whether it says that an object lies outside.

    That two paths lead to one object becomes, where one of them leads around the module, that
    the other leads to that very object: in later calls only the module is at hand.

    Raises:
        NotAlikeError: the guard compares with another place in a way that is not known here.
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
        raise NotAlikeError(f"it has a guard {guard.create_fn_name()}")
    moved = moved_to(other[0], old, _place())
    if moved != other[0]:
        return functools.partial(create.func, source_b=moved), False
    is_object = guards.is_object(value_at(other[0], tx))
    why = f"{guard.name} is {other[0].name}"

    def is_that_object(builder: Any, guard: Any) -> None:
        _add_guard(builder, guard, is_object, why)

    return is_that_object, True
