"""A model that nobody sharded is stage 0: its gradients are averaged over all ranks.

Its parameters are met when Dynamo hands over a graph in which some of them are.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from typing import Any

from torch import fx, nn
from torch.distributed.tensor import DTensor

from fxzero import _compat
from fxzero.ranks import watch
from fxzero.ranks.groups import Group, init_distributed
from fxzero.sharding.before_step import watch_optimizers
from fxzero.sharding.gradients import reduce_what_arrives
from fxzero.sharding.layout import Layout
from fxzero.sharding.params import (
    ModelState,
    ParamSpec,
    is_known,
    plain_spec_of,
    register,
    remember_plain,
)
from fxzero.sharding.replicas import check_equal
from fxzero.sharding.whereabouts import outermost_module

_plain_models = itertools.count()
"""Models that nobody sharded are met in the same order on all ranks."""
_PATH = re.compile(r"_(?:modules|parameters)\['([^']+)'\]")


def plain_parameters(module: fx.GraphModule, example_inputs: Sequence[Any]) -> dict[int, ParamSpec]:
    """Specs of the trainable parameters of a model that nobody sharded: stage 0."""
    if _compat.active_ddp_module() is not None:
        return {}  # DistributedDataParallel reduces the gradients itself
    placeholders = module.graph.find_nodes(op="placeholder")
    found = {
        i: (value, _qualified_name(node))
        for i, (node, value) in enumerate(zip(placeholders, example_inputs, strict=False))
        if isinstance(value, nn.Parameter)
        and value.requires_grad
        and not isinstance(value, DTensor)
        and not is_known(value)
    }
    if not found:
        return {}
    world = init_distributed(next(iter(found.values()))[0].device.type)
    if world is None:
        return {}
    group = Group.of(world)
    if group.size == 1:
        return {}
    watch.start()
    watch_optimizers()
    _replicate({name: parameter for parameter, name in found.values()}, group)
    specs = {i: plain_spec_of(parameter) for i, (parameter, _) in found.items()}
    return {i: spec for i, spec in specs.items() if spec is not None}


def _replicate(in_graph: dict[str, nn.Parameter], group: Group) -> None:
    """Take note of the parameters of a model that nobody sharded: stage 0.

    Not only of those in the graph. What the model computes outside of it (nn.LSTM, a layer that
    was not compiled) has gradients too, which are reduced when they arrive.
    """
    model = outermost_module()
    everything = dict(model.named_parameters()) if model is not None else {}
    names = {id(parameter): name for name, parameter in (*in_graph.items(), *everything.items())}
    parameters = {id(p): p for p in (*in_graph.values(), *everything.values())}
    new = {
        names[identity]: parameter
        for identity, parameter in parameters.items()
        if plain_spec_of(parameter) is None
        and not is_known(parameter)
        and not isinstance(parameter, DTensor)
    }
    if not new:
        return
    check_equal(new)
    state = ModelState(zero=0, number=-1)
    number = next(_plain_models)
    layout = Layout.replicated(group)
    for name, parameter in new.items():
        spec = ParamSpec.whole(parameter, name, f"plain{number}/{name}", state, layout)
        remember_plain(parameter, register(spec))
        reduce_what_arrives(parameter, spec)


def _qualified_name(node: fx.Node) -> str:
    """A parameter's name, from where Dynamo found it."""
    parts = [p for p in _PATH.findall(_compat.input_source_name(node)) if p != "_orig_mod"]
    return ".".join(parts) or node.name
