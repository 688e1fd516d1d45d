"""Let every read of a parameter in Dynamo's graph go through its marker.

    full = unshard(p);  y = mm(x, full);  z = mul(y, p)
    →   full = unshard(p);  y = mm(x, full);  z = mul(y, full)

A forward may reach a parameter around its module's property. A replicated parameter without
any marker in the graph stays as it is: `fxzero.sharding.gradients` reduces what autograd
accumulates there. A shard that is read as a shard cannot be part of a step graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.distributed.tensor import DTensor

from fxzero._compat import is_higher_order, is_plain_to_local
from fxzero.errors import CaptureError
from fxzero.graph.node_text import source_line
from fxzero.graph.writes import may_write
from fxzero.sharding.params import KEY, is_key, spec_of

_UNSHARD = (torch.ops.fxzero.unshard, torch.ops.fxzero.unshard.default)


def use_markers(module: fx.GraphModule, example_inputs: Sequence[Any]) -> None:
    """Replace reads around a parameter's marker, in place.

    Raises:
        CaptureError: a shard is read otherwise than through its marker.
    """
    changed = False
    placeholders = module.graph.find_nodes(op="placeholder")
    for node, value in zip(placeholders, example_inputs, strict=False):
        key = getattr(value, KEY, None) if isinstance(value, torch.Tensor) else None
        if key is None or not is_key(key):
            continue
        if isinstance(value, DTensor):
            _refuse_raw_reads(node, spec_of(key).name)
            continue
        markers = [user for user in node.users if user.target in _UNSHARD]
        others = [u for u in node.users if u not in markers and _is_recorded(u, node)]
        if markers and others:
            first = next(n for n in module.graph.nodes if n.op != "placeholder")
            if first is not markers[0]:
                first.prepend(markers[0])
            for user in others:
                user.replace_input_with(node, markers[0])
            changed = True
    if changed:
        module.recompile()


def _is_recorded(user: fx.Node, parameter: fx.Node) -> bool:
    """Whether a gradient comes back by a call. Without one, values are as good in either form:
    a teacher's average is one of shards. A write to the parameter itself is no read."""
    value = user.meta.get("example_value")
    if parameter in may_write(user):
        return False
    return not isinstance(value, torch.Tensor) or value.requires_grad


def _refuse_raw_reads(node: fx.Node, name: str) -> None:
    for user in node.users:
        # A checkpoint hands the shard to a graph of its own, which reads it as this one would.
        reads_locally = is_plain_to_local(user) or is_higher_order(user)
        if not reads_locally and _is_recorded(user, node):
            raise CaptureError(
                f"the forward uses {name} as this rank's shard ({user.name}), at "
                f"{source_line(user)}. Read it as module.{name.rpartition('.')[2]}, which is the "
                "full parameter inside of a forward."
            )
