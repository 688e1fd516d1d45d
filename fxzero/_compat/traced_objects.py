"""Objects that a traced function reads: where they are, and whether it has changed any."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any


def is_below(source: Any, root: Any) -> bool:
    """Whether a source leads through another."""
    from torch._dynamo.source import is_from_source

    return bool(is_from_source(source, root))


def moved_to(source: Any, old: Any, new: Any) -> Any:
    """The source that leads from `new` to where this one leads from `old`."""
    return source.clone(lambda part: new if part == old else part)


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


def changed_objects(tx: Any) -> bool:
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
