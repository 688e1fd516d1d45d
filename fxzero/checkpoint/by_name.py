"""A model's and an optimizer's tensors by the names that everybody knows them by.

    {"model": {"h.0.attn.weight": tensor, …},
     "optimizer": {"state": {"h.0.attn.weight": {"exp_avg": tensor, …}, …},
                   "param_groups": [{"params": ["h.0.attn.weight", …], "lr": 0.1, …}, …]}}

An optimizer counts its parameters; another order of groups, another stage of a pipeline or another
engine counts them otherwise. It is the form that `get_model_state_dict` and
`get_optimizer_state_dict` of torch.distributed.checkpoint have, without a step that fills states.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from fxzero.errors import CheckpointError

_OWN = ("params", "param_names", "foreach", "fused", "capturable", "differentiable")
"""What a group is of, and how its update is computed, not what: a run keeps its own."""
_COMPILED = "_orig_mod."
"""What torch.compile puts into names."""


def unwrapped(model: nn.Module) -> nn.Module:
    """The model that somebody has wrapped, by torch.compile or DistributedDataParallel."""
    while True:
        inner = getattr(model, "_orig_mod", model)
        if isinstance(inner, DistributedDataParallel):
            inner = inner.module
        if inner is model:
            return model
        model = inner


def plain_name(name: str) -> str:
    """A name as it is where nothing is compiled."""
    return name.replace(_COMPILED, "")


def model_state(model: nn.Module) -> dict[str, Any]:
    """The model's own state dict, under plain names; its tensors are the model's, as they are."""
    own = unwrapped(model).state_dict(keep_vars=True)  # each detached would take a while
    return {plain_name(name): value for name, value in own.items()}


def shared_names(model: nn.Module) -> dict[str, str]:
    """The further names of tensors that have several in the state dict, and the first of each."""
    first: dict[int, str] = {}
    found = {}
    inner = unwrapped(model)
    saved = inner.state_dict(keep_vars=True)
    named: Iterator[tuple[str, Tensor]]
    for named in (
        inner.named_parameters(remove_duplicate=False),
        inner.named_buffers(remove_duplicate=False),
    ):
        for name, tensor in named:
            if name not in saved:  # a buffer that does not persist
                continue
            known = first.setdefault(id(tensor), plain_name(name))
            if known != plain_name(name):
                found[plain_name(name)] = known
    return found


def parameter_names(model: nn.Module, optimizer: Optimizer) -> list[str]:
    """The names of an optimizer's parameters, as it counts them.

    Raises:
        CheckpointError: one of them is not the model's.
    """
    names = {id(p): plain_name(name) for name, p in unwrapped(model).named_parameters()}
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    strangers = [p for p in parameters if id(p) not in names]
    if strangers:
        shapes = ", ".join(str(list(p.shape)) for p in strangers[:4])
        raise CheckpointError(
            f"the optimizer has {len(strangers)} parameters (of shape {shapes}) that are not the "
            "model's: a checkpoint would not know their names. Make the optimizer over "
            "model.parameters(), after sharding it."
        )
    return [names[id(p)] for p in parameters]


def optimizer_state(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """The optimizer's own state dict, by names. Its tensors are the optimizer's.

    Raises:
        CheckpointError: one of its parameters is not the model's.
    """
    names = parameter_names(model, optimizer)
    counted = optimizer.state_dict()
    return {
        "state": {names[index]: dict(state) for index, state in counted["state"].items()},
        "param_groups": [
            {**group, "params": [names[index] for index in group["params"]]}
            for group in counted["param_groups"]
        ],
    }


def counted_state(
    model: nn.Module, optimizer: Optimizer, state: Mapping[str, Any]
) -> dict[str, Any]:
    """The state dict that an optimizer itself loads, of one by names. Its groups may hold other
    parameters than those that were saved, as long as what was saved says how each is updated.

    Raises:
        CheckpointError: parameters without a group, or parameters of one group here that were in
            groups with other settings.
    """
    names = parameter_names(model, optimizer)
    saved = {name: group for group in state["param_groups"] for name in group["params"]}
    missing = [name for name in names if name not in saved]
    if missing:
        raise CheckpointError(
            f"the optimizer here updates {len(missing)} parameters that the saved one did not: "
            f"{', '.join(missing[:4])}. Make it over the same parameters, or load the model alone."
        )
    groups = []
    number = iter(range(len(names)))
    for index, group in enumerate(optimizer.param_groups):
        own = [next(number) for _ in group["params"]]
        settings = [_settings(saved[names[i]]) for i in own]
        for i, other in zip(own, settings, strict=True):
            if other != settings[0]:
                raise CheckpointError(
                    f"group {index} of the optimizer holds {names[own[0]]} and {names[i]}, which "
                    f"were saved in groups with other settings: {settings[0]} and {other}. Make "
                    "the same groups."
                )
        kept = {key: group[key] for key in _OWN if key in group}
        groups.append({**group, **(settings[0] if settings else {}), **kept, "params": own})
    places = {name: i for i, name in enumerate(names)}
    by_number = {places[n]: dict(s) for n, s in state["state"].items() if n in places}
    return {"state": by_number, "param_groups": groups}


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """What a group says of how its parameters are updated."""
    return {k: v for k, v in group.items() if k not in _OWN}
