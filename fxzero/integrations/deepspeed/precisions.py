"""In which dtypes DeepSpeed computes and reduces, and how it scales an fp16 loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from fxzero.integrations.deepspeed.lines import Found
from fxzero.integrations.deepspeed.versions import CHECKS_BF16, WINDOW_AFTER, Version
from fxzero.sharding.precision import Precision

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
SCALE = (
    "loss_scale",
    "initial_scale_power",
    "loss_scale_window",
    "hysteresis",
    "consecutive_hysteresis",
    "min_loss_scale",
)
"""Fields of ``fp16``, which `Precision` has by the same names and with the same defaults."""


OF_STAGES = ("hysteresis", "consecutive_hysteresis")
"""Those of them that DeepSpeed has at stages 1 to 3."""
AT_MINIMUM = ": an overflow at it is an error, where DeepSpeed at stage 0 skips on"
STAGE = "zero_optimization.stage"


@dataclass(frozen=True)
class Dtypes:
    """What `shard` and `compile_step` are told."""

    param_dtype: torch.dtype | None
    reduce_dtype: torch.dtype | None
    precision: Precision
    stop_unless_finite: bool
    """Whether gradients that are not finite must change nothing, without a loss scale."""

    @property
    def element_bytes(self) -> int:
        """What an element takes where it is gathered; parameters are fp32, as a rule."""
        return (self.param_dtype or torch.float32).itemsize


def map_precision(found: Found, version: Version | None) -> Dtypes:
    """Map ``fp16``, ``bf16``, ``communication_data_type`` and ``data_types``."""
    fp16, bf16 = found.get("fp16.enabled", False), found.get("bf16.enabled", False)
    if fp16 and bf16:
        found.refuse("fp16.enabled", "bf16.enabled is true too. Leave one.")
    param = torch.float16 if fp16 else torch.bfloat16 if bf16 else None
    for name in ("fp16", "bf16"):
        on = found.get(f"{name}.enabled", False)
        found.mapped(
            f"{name}.enabled",
            _computed(found, name, version) if on else "not computed in it",
        )
    communicated = found.get("communication_data_type")
    reduce = DTYPES[communicated] if communicated else None
    found.mapped("communication_data_type", f"shard(reduce_dtype={reduce})")
    _check_param_dtype(found, param)
    scale = _loss_scale(found, fp16)
    stops = _stops(found, bf16, version)
    if stops and "bf16.check_grad_overflow" not in found.values:
        found.mapped(
            "bf16.enabled",
            f"{_computed(found, 'bf16', version)}; options stop_unless_finite=true, as "
            "check_grad_overflow is on by default",
        )
    # DeepSpeed hands a loss function what the model computes, in the dtype that it computes in.
    precision = Precision(param_dtype=param, reduce_dtype=reduce, fp32_loss=param is None, **scale)
    return Dtypes(param, reduce, precision, stops)


def _computed(found: Found, name: str, version: Version | None) -> str:
    said = f"shard(param_dtype={DTYPES[name]}), fp32 masters"
    stage = found.get(STAGE, 0)
    if stage and name == "fp16" and version is not None and version < WINDOW_AFTER:
        said += "; the loss scale's window ends a step later, as since DeepSpeed 0.17"
    if not stage and str(found.get("optimizer.type", "")).lower() in ("adam", "adamw"):
        said += (
            "; at stage 0 DeepSpeed begins with an update by zeros, so that its Adam counts a step "
            "more and decays once more: that is not repeated"
        )
    return said


def _check_param_dtype(found: Found, param: torch.dtype | None) -> None:
    said = found.get("data_types.param_dtype")
    if said is not None and DTYPES[said] != (param or torch.float32):
        found.refuse(
            "data_types.param_dtype",
            f"fp16 and bf16 say {param or torch.float32}. Let them say the same.",
        )


def _loss_scale(found: Found, fp16: bool) -> dict[str, Any]:
    stage = found.get(STAGE, 0)
    fields: dict[str, Any] = {} if stage or not fp16 else {"hysteresis": 1}
    for name in SCALE:
        path = f"fp16.{name}"
        if not fp16:
            found.needless(path, "fp16.enabled is false")
        elif not stage and name in OF_STAGES:
            found.needless(path, "at stage 0 DeepSpeed lowers the scale at each overflow")
        elif found.has(path):
            value = found.get(path)
            fields[name] = float(value) if name in ("loss_scale", "min_loss_scale") else value
            ends = "" if stage or name != "min_loss_scale" else AT_MINIMUM
            found.mapped(path, f"Precision({name}={fields[name]}){ends}")
    return fields


def _stops(found: Found, bf16: bool, version: Version | None) -> bool:
    path = "bf16.check_grad_overflow"
    if not bf16:
        found.needless(path, "bf16.enabled is false")
        return False
    checks = found.get(path, version is None or version >= CHECKS_BF16)
    found.mapped(
        path,
        "options stop_unless_finite=true: compile_step stops and names the parameters, where "
        "DeepSpeed skips the step; engine() skips it too; the loop of a plugin() looks at nothing"
        if checks
        else "gradients are not looked at",
    )
    return bool(checks)
