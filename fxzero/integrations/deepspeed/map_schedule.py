"""``scheduler``: one of DeepSpeed's own, or one of torch's by its name, as in DeepSpeed."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer, lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from fxzero.integrations.deepspeed.arguments import check_arguments
from fxzero.integrations.deepspeed.lines import Found
from fxzero.integrations.deepspeed.map_optimizer import MadeOptimizer
from fxzero.integrations.deepspeed.near import near
from fxzero.integrations.deepspeed.schedules import RULES, DeepSpeedSchedule, Rule
from fxzero.integrations.deepspeed.versions import (
    COSINE_STAYS,
    STAIRS_COUNT,
    WARMS_UP_TO_OPTIMIZER,
    Version,
)

TYPE, PARAMS = "scheduler.type", "scheduler.params"


@dataclass(frozen=True)
class MadeSchedule:
    """A schedule that the configuration asks for: call it with an optimizer."""

    kind: str
    """The class's name."""
    rule: Rule | None
    """DeepSpeed's, or None for a schedule of torch's."""
    settings: dict[str, Any]

    def __call__(self, optimizer: Optimizer) -> LRScheduler:
        """Make it, to be stepped behind each optimizer step."""
        if self.rule is not None:
            return DeepSpeedSchedule(optimizer, self.rule)
        made: LRScheduler = getattr(lr_scheduler, self.kind)(optimizer, **self.settings)
        return made


def map_schedule(
    found: Found, optimizer: MadeOptimizer | None, version: Version | None
) -> MadeSchedule | None:
    """Map ``scheduler``; None where none is asked for, or it cannot be."""
    kind, settings = found.get(TYPE), dict(found.get(PARAMS, {}))
    if kind is None:
        if settings:
            found.refuse(
                PARAMS, f"scheduler.type is missing: {', '.join(RULES)}, or one of torch's."
            )
        return None
    if kind in RULES:
        found.mapped(TYPE, f"make_scheduler: DeepSpeed's {kind}, stepped behind the optimizer")
        return _own(found, kind, settings, optimizer, version)
    return _of_torch(found, kind, settings)


def _own(
    found: Found,
    kind: str,
    settings: dict[str, Any],
    optimizer: MadeOptimizer | None,
    version: Version | None,
) -> MadeSchedule | None:
    rule = RULES[kind]
    held = check_arguments(found, PARAMS, settings, rule.kinds, rule.required, kind)
    if held is None:
        return None
    if kind == "WarmupLR" and held.get("warmup_max_lr") is None:
        if version is None:
            found.refuse(
                f"{PARAMS}.warmup_max_lr",
                "without it that is 0.001 before DeepSpeed 0.17.2, and since then the optimizer's "
                "lr. Say it, or deepspeed_version.",
            )
            return None
        held["warmup_max_lr"] = None if version >= WARMS_UP_TO_OPTIMIZER else 0.001
    stairs = ("cycle_first_stair_count", "cycle_second_stair_count")
    for name in stairs:
        if held.get(name) and version is not None and version < STAIRS_COUNT:
            found.refuse(f"{PARAMS}.{name}", "DeepSpeed counts stairs since 0.19.4. Say 0.")
            return None
    if kind == "WarmupCosineLR":
        held["stays"] = version is None or version >= COSINE_STAYS
    if kind == "OneCycle" and optimizer is not None and not optimizer.has_betas:
        for name in ("cycle_min_mom", "cycle_max_mom", "decay_mom_rate", "cycle_momentum"):
            found.needless(f"{PARAMS}.{name}", f"{optimizer.kind.__name__} has no betas to cycle")
    made = rule(**held)
    return MadeSchedule(kind, made, held)


def _of_torch(found: Found, kind: str, settings: dict[str, Any]) -> MadeSchedule | None:
    known = {
        name
        for name, made in vars(lr_scheduler).items()
        if isinstance(made, type) and issubclass(made, LRScheduler) and not name.startswith("_")
    } - {"LRScheduler"}
    if kind not in known:
        found.refuse(TYPE, f"DeepSpeed has no such schedule: {near(kind, {*RULES, *known})}")
        return None
    if kind == "ReduceLROnPlateau":
        found.refuse(TYPE, "it is stepped with a metric, which no step of DeepSpeed's gives.")
        return None
    made = MadeSchedule(kind, None, settings)
    problem = _cannot_be_made(made)
    if problem:
        found.refuse(PARAMS, f"torch's {kind} does not take it: {problem}")
        return None
    found.mapped(TYPE, f"make_scheduler: torch's {kind}, stepped behind the optimizer")
    found.mapped(PARAMS, f"make_scheduler: torch's {kind}")
    return made


def _cannot_be_made(made: MadeSchedule) -> str:
    optimizer = torch.optim.AdamW([nn.Parameter(torch.zeros(1))])
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            made(optimizer)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""
