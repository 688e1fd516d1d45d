"""``optimizer``: what DeepSpeed would make of a name, made by torch where torch computes the same.

"Adam" is AdamW there unless ``adam_w_mode`` says otherwise; its weight decay is 0 by default, but
torch's, under ``torch_adam``, is torch's: 0.01 for AdamW. Any other name is one of `torch.optim`,
to the letter. What torch does not have (Lamb, Lion, 1-bit Adam, Muon as DeepSpeed splits it) is
refused: an optimizer of somebody's own is passed to `compile_step` or `engine`.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from fxzero.integrations.deepspeed.arguments import check_arguments
from fxzero.integrations.deepspeed.kinds import ANY, BOOL, PAIR, Kind, at_least
from fxzero.integrations.deepspeed.lines import Found
from fxzero.integrations.deepspeed.near import near

TYPE, PARAMS = "optimizer.type", "optimizer.params"

ADAM: Mapping[str, Kind] = {
    "lr": at_least(0),
    "betas": PAIR,
    "eps": at_least(0),
    "weight_decay": at_least(0),
    "bias_correction": BOOL,
    "amsgrad": BOOL,
    "adam_w_mode": BOOL,
    "torch_adam": BOOL,
    "foreach": BOOL.or_null,
    "fused": BOOL.or_null,
    "fp32_optimizer_states": BOOL,
    "set_grad_none": BOOL,
}
HOW = {
    "foreach": "fxzero updates by torch's fused kernels",
    "fused": "fxzero updates by torch's fused kernels",
    "fp32_optimizer_states": "optimizer state has the masters' dtype: fp32, as a rule",
    "set_grad_none": "gradients are let go behind their update",
    "capturable": "fxzero updates by torch's fused kernels",
}
"""Parameters that say how an update is computed, and not what."""
NOT_IN_TORCH = {
    "lamb": "Lamb",
    "lion": "Lion",
    "muon": "Muon, as DeepSpeed splits a model between it and Adam",
    "muadam": "MuAdam",
    "muadamw": "MuAdamW",
    "musgd": "MuSGD",
    "onebitadam": "1-bit Adam",
    "zerooneadam": "0/1 Adam",
    "onebitlamb": "1-bit Lamb",
}
NAME_ONE = "Choose AdamW, say, or leave_out=['optimizer'] and pass your own."
NO_LOSS_TWICE = {"LBFGS": "it computes the loss several times a step, which DeepSpeed does not"}


@dataclass(frozen=True)
class MadeOptimizer:
    """An optimizer that the configuration asks for: call it with parameters, or groups of them."""

    kind: type[Optimizer]
    settings: dict[str, Any]

    def __call__(self, parameters: Iterable[Any]) -> Optimizer:
        """Make it over what `fxzero.shard` has left as a model's parameters."""
        return self.kind(parameters, **self.settings)

    @property
    def has_betas(self) -> bool:
        """Whether its momentum can be cycled."""
        return "betas" in inspect.signature(self.kind).parameters

    def __str__(self) -> str:
        said = ", ".join(f"{name}={value}" for name, value in self.settings.items())
        return f"torch.optim.{self.kind.__name__}({said})"


def map_optimizer(found: Found) -> MadeOptimizer | None:
    """Map ``optimizer``; None where none is asked for, or it cannot be."""
    name, settings = found.get(TYPE), dict(found.get(PARAMS, {}))
    if name is None:
        if settings:
            found.refuse(PARAMS, "optimizer.type is missing: Adam, AdamW, SGD, …")
        return None
    if "max_grad_norm" in settings:
        found.refuse(PARAMS, "max_grad_norm is no optimizer's. Say gradient_clipping.")
        return None
    low = name.lower()
    if low == "auto":
        found.refuse(TYPE, f'"auto" is resolved by nobody. {NAME_ONE}')
        return None
    if low in NOT_IN_TORCH:
        found.refuse(
            TYPE,
            f"torch has no {NOT_IN_TORCH[low]}. {NAME_ONE}",
        )
        return None
    if low in ("adam", "adamw"):
        return _adam(found, low, settings)
    return _of_torch(found, "Adagrad" if low == "adagrad" else name, settings)


def _adam(found: Found, low: str, settings: dict[str, Any]) -> MadeOptimizer | None:
    held = check_arguments(found, PARAMS, settings, ADAM, (), f"DeepSpeed's {found.get(TYPE)}")
    if held is None:
        return None
    by_torch = held.pop("torch_adam", False)
    decoupled = held.pop("adam_w_mode", True) or low == "adamw"
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    if by_torch:
        found.mapped(f"{PARAMS}.torch_adam", f"the defaults are those of torch's {kind.__name__}")
    else:
        found.needless(f"{PARAMS}.torch_adam", "torch computes it anyway")
    found.mapped(f"{PARAMS}.adam_w_mode", f"weight decay as in {kind.__name__}")
    if not _adam_extras(found, held, by_torch):
        return None
    if not by_torch:
        held.setdefault("weight_decay", 0.0)  # of AdamW torch's default is 0.01
    said = "" if low == kind.__name__.lower() else f": DeepSpeed's {found.get(TYPE)} is AdamW"
    return _made(found, kind, held, said)


def _adam_extras(found: Found, held: dict[str, Any], by_torch: bool) -> bool:
    """What FusedAdam and DeepSpeedCPUAdam take beside torch's Adam; False if it cannot be."""
    for name in ("bias_correction", "amsgrad"):
        value = held.pop(name, None)
        path = f"{PARAMS}.{name}"
        if value is None:
            continue
        if name == "bias_correction" and not value:
            found.refuse(path, "torch's Adam always corrects. Say true.")
            return False
        if name == "amsgrad" and value and not by_torch:
            found.refuse(path, "DeepSpeed's Adam has no AMSGrad. Say torch_adam too, or drop it.")
            return False
        if name == "amsgrad" and by_torch:
            held[name] = value
            continue
        found.needless(path, "it is so anyway")
    return True


def _of_torch(found: Found, name: str, settings: dict[str, Any]) -> MadeOptimizer | None:
    known = {
        each
        for each, made in vars(torch.optim).items()
        if isinstance(made, type) and issubclass(made, Optimizer) and made is not Optimizer
    }
    if name not in known:
        found.refuse(TYPE, f"DeepSpeed has no such optimizer: {near(name, known)}")
        return None
    if name in NO_LOSS_TWICE:
        found.refuse(TYPE, f"{NO_LOSS_TWICE[name]}. Choose another.")
        return None
    kind = getattr(torch.optim, name)
    taken = [each for each in inspect.signature(kind).parameters if each != "params"]
    kinds = {each: ADAM.get(each, ANY) for each in (*taken, "fp32_optimizer_states")}
    held = check_arguments(found, PARAMS, settings, kinds, (), f"torch's {name}")
    if held is None:
        return None
    if held.get("differentiable"):
        found.refuse(f"{PARAMS}.differentiable", "updates are not differentiated. Say false.")
        return None
    return _made(found, kind, held, "")


def _made(
    found: Found, kind: type[Optimizer], held: dict[str, Any], said: str
) -> MadeOptimizer | None:
    for name, reason in HOW.items():
        if name in held:
            held.pop(name)
            found.needless(f"{PARAMS}.{name}", reason)
    made = MadeOptimizer(kind, held)
    try:
        made([nn.Parameter(torch.zeros(1))])
    except (TypeError, ValueError, RuntimeError) as error:
        found.refuse(PARAMS, f"torch's {kind.__name__} does not take it: {error}")
        return None
    found.mapped(TYPE, f"make_optimizer: {made}{said}")
    return made
