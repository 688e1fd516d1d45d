"""Let Dynamo trace one of equal layers, and copy the others from it, guards and all.

    for block in self.blocks:    block 0   traced: nodes, and guards on all that was read
        x = block(x)             block 1   block 0's guards hold: its nodes, with other parameters
                                 block 2   …

What Dynamo writes down for a call is a function of what it reads: the arguments, the state of the
tracing, and Python objects, each of which it guards. So a call is copied only where all of these
are alike:

- The arguments are alike, and so are grad mode, autocast and their kin (`layer_calls.Call`).
- Nothing that exists outside of the compiled function has been changed while it was traced, and
  the traced call did nothing but compute (`layer_calls.Trace`).
- The guards of the traced module, read as guards of the other module, hold (`layer_guards.Alike`),
  as they would have been found if it had been traced. The only thing that may differ are its
  parameters' keys, which stand in the graph as constants and are replaced in the copy
  (`layer_copies`).
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
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import nn

from fxzero._compat.frames import with_room_for_frames
from fxzero._compat.layer_calls import Before, Call, Trace
from fxzero._compat.layer_copies import copy_call
from fxzero._compat.layer_guards import NotAlikeError

log = logging.getLogger("fxzero")

_CANDIDATES = 8
"""How many traced calls of one class of modules are compared with a new one."""


def trace_equal_layers_once(
    is_layer: Callable[[nn.Module], bool], keys: str, kind_of: Callable[[str], object]
) -> None:
    """Let Dynamo copy calls of modules that are alike; done once for the process.

    Args:
        is_layer: whether copies of a module's calls are wanted.
        keys: the attribute in which a module keeps the names, unique in the process, that its
            parameters have in graphs.
        kind_of: by such a name, all that a graph says of the parameter besides; a guard sees this
            rank's part of it alone, and parts of other parameters may be of one shape.
    """
    from torch._dynamo.variables.nn_module import UnspecializedNNModuleVariable

    traced = UnspecializedNNModuleVariable.call_function
    if hasattr(traced, "fxzero_original"):
        return

    trace = with_room_for_frames(traced)

    @functools.wraps(traced)
    def call_function(self: Any, tx: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        if not _enabled or not _may_repeat(self, tx) or not is_layer(self.value):
            return trace(self, tx, args, kwargs)
        return _call(self, tx, args, kwargs, trace, keys, kind_of)

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
    kind_of: Callable[[str], object],
) -> Any:
    """A call of a layer: copied from one that is alike, or traced and kept for the next."""
    book: list[Trace] = tx.output.__dict__.setdefault("_fxzero_traces", [])
    call = Call.of(module, tx, args, kwargs)
    if call is None:
        return traced(module, tx, args, kwargs)
    same = [t for t in book if type(t.call.module.value) is type(module.value)]
    for trace in same:
        if trace.call.arguments == call.arguments and trace.call.state == call.state:
            try:
                alike = trace.alike(tx, keys)
                names = alike.keys_of(module, tx, kind_of)
            except NotAlikeError as why:
                log.debug("%s is traced by itself: %s", module.source.name, why)
                continue
            if not trace.copied:
                alike.guard(trace.call.module)  # it may then also not get hooks
            trace.copied = True
            alike.guard(module)
            return copy_call(trace, call, tx, names)
    if len(same) >= _CANDIDATES:
        return traced(module, tx, args, kwargs)
    before = Before.of(tx)
    result = traced(module, tx, args, kwargs)
    try:
        book.append(Trace.of(call, tx, before, result))
    except NotAlikeError as why:
        log.debug("%s cannot stand for other layers: %s", module.source.name, why)
    return result
