"""Which operators move no bytes, and which nodes share memory.

Read from operator schemas: an output annotated as a view shares its first aliased
input's storage. The few operators whose schema hides an alias are named here.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from fxzero._compat import OpOverload, by_identity
from fxzero.graph.stamps import Role, stamp_of

_aten = torch.ops.aten

# Documented to return a view although the schema does not say so, or that may be one.
_HIDDEN_VIEWS = {
    _aten._unsafe_view.default,
    _aten._reshape_alias.default,
    _aten.unsafe_split.Tensor,
    _aten.unsafe_split_with_sizes.default,
}


def view_base(node: fx.Node) -> fx.Node | None:
    """The node whose memory this one looks at, None if it owns its memory."""
    if node.op != "call_function":
        return None
    target = node.target
    if target is operator.getitem:
        source = node.args[0]
        assert isinstance(source, fx.Node)
        return view_base(source)
    if not isinstance(target, OpOverload):
        return None
    if _is_view(target):
        first = node.args[0] if node.args else None
        return first if isinstance(first, fx.Node) else None
    return None


@by_identity
def _is_view(target: OpOverload) -> bool:
    """Whether a schema annotates a return as an alias that is not written to, or should."""
    return target in _HIDDEN_VIEWS or any(
        r.alias_info is not None and not r.alias_info.is_write for r in target._schema.returns
    )


def is_view(node: fx.Node) -> bool:
    """Whether a node only looks at another node's memory."""
    return view_base(node) is not None


def root(node: fx.Node) -> fx.Node:
    """The node that owns the memory that this one looks at."""
    while (base := view_base(node)) is not None:
        node = base
    return node


def readers(*sources: fx.Node) -> set[fx.Node]:
    """Everything that reads nodes' memory: through views, and in collectives until joined."""
    found: set[fx.Node] = set()
    queue = list(sources)
    while queue:
        for user in queue.pop().users:
            if user in found or user.op == "output":
                continue
            found.add(user)
            if is_view(user) or stamp_of(user).role in (Role.PREPARE, Role.LAUNCH):
                queue.append(user)
    return found
