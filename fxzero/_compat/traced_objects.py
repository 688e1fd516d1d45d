"""Objects that a traced function reads: where they are, and whether it has changed any."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any


def is_below(source: Any, root: Any) -> bool:
    """Whether a source leads through another."""
    while source is not None and source != root:
        source = getattr(source, "base", None)
    return source is not None


def moved_to(source: Any, old: Any, new: Any) -> Any:
    """The source that leads from `new` to where this one leads from `old`."""
    from torch._guards import Source

    if source == old:
        return new
    moved = {}
    for field in dataclasses.fields(source):
        part = getattr(source, field.name)
        if isinstance(part, Source):
            moved[field.name] = moved_to(part, old, new)
    changed = any(value is not getattr(source, name) for name, value in moved.items())
    return dataclasses.replace(source, **moved) if changed else source


def value_at(source: Any, tx: Any) -> Any:
    """The object to which a source leads in the function that is traced."""
    root = tx.output.root_tx
    return evaluator([source])({}, {"L": root.f_locals, "G": root.f_globals})[0]


def evaluator(sources: Iterable[Any]) -> Callable[..., tuple[Any, ...]]:
    """A function that gives the objects to which sources lead from the globals it is given."""
    from torch._dynamo.guards import _get_closure_vars

    text = "".join(f"{source.name}, " for source in sources)
    code = compile(f"({text})", "<sources>", "eval")

    def evaluate(names: dict[str, Any], scope: dict[str, Any] | None = None) -> tuple[Any, ...]:
        values: tuple[Any, ...] = eval(code, closure, scope or {"G": names})
        return values

    closure = dict(_get_closure_vars())
    return evaluate


class _Watched(dict[str, Any]):
    """What was set on an object, by attribute; counts how often somebody looked or wrote."""

    touches = 0

    def entries(self) -> list[tuple[str, Any]]:
        """What is in it, unnoticed."""
        return list(dict.items(self))


def _noticed(name: str) -> Callable[..., Any]:
    original = getattr(dict, name)

    @functools.wraps(original)
    def method(self: _Watched, *args: Any, **kwargs: Any) -> Any:
        self.touches += 1
        return original(self, *args, **kwargs)

    return method


for _name in (
    *("__contains__", "__getitem__", "__setitem__", "__delitem__", "__iter__", "__len__"),
    *("__eq__", "__ne__", "copy", "get", "items", "keys", "values"),
    *("clear", "pop", "popitem", "setdefault", "update"),
):
    setattr(_Watched, _name, _noticed(_name))


@dataclass(frozen=True)
class Changes:
    """What a traced function has set so far on objects that exist outside of it.

    It takes effect when the function is called; until then only what Dynamo keeps knows of it. What
    was traced without a look there does not depend on it.
    """

    objects: frozenset[int]
    """The ids of the objects."""
    entries: tuple[tuple[Any, str, Any], ...]
    """Variable of the object, attribute, variable of the new value."""
    watched: tuple[_Watched, ...]
    touches: tuple[int, ...]

    @classmethod
    def of(cls, tx: Any) -> Changes | None:
        """What was set; None where more was changed than attributes, which nobody could follow."""
        from torch._dynamo.variables.base import (
            AttributeMutationExisting,
            ValueMutationExisting,
        )

        effects = tx.output.side_effects
        if effects.tensor_hooks or effects.save_for_backward:
            return None
        if effects.ignore_mutation_on_these_variables:  # functional_call gives it other parameters
            return None
        objects: list[int] = []
        entries: list[tuple[Any, str, Any]] = []
        watched: list[_Watched] = []
        for identity, variable in effects.id_to_variable.items():
            kind = variable.mutation_type
            if not isinstance(kind, AttributeMutationExisting | ValueMutationExisting):
                continue
            if not effects.is_modified(variable):
                continue
            if isinstance(kind, ValueMutationExisting) or _has_changed_contents(variable, effects):
                return None
            attributes = effects.store_attr_mutations[variable]
            if not isinstance(attributes, _Watched):
                attributes = effects.store_attr_mutations[variable] = _Watched(attributes)
            objects.append(identity)
            watched.append(attributes)
            entries += ((variable, name, value) for name, value in attributes.entries())
        counts = tuple(one.touches for one in watched)
        return cls(frozenset(objects), tuple(entries), tuple(watched), counts)

    def same_as(self, other: Changes) -> bool:
        """Whether the same values were set on the same objects."""
        return self.objects == other.objects and [
            (id(variable), name, id(value)) for variable, name, value in self.entries
        ] == [(id(variable), name, id(value)) for variable, name, value in other.entries]

    def untouched(self) -> bool:
        """Whether nobody has looked at them, or written to them, since."""
        return self.touches == tuple(one.touches for one in self.watched)


def _has_changed_contents(variable: Any, effects: Any) -> bool:
    """Whether an object that is a dict or a list as well was changed as such."""
    if variable not in effects.store_attr_mutations:
        return True
    names = ("is_base_vt_modified", "is_underlying_vt_modified")  # of torch 2.13, of 2.11
    asked = (getattr(variable, name, None) for name in names)
    return any(changed(effects) for changed in asked if changed is not None)
