"""In which dtypes a step computes, and how fp16 keeps small gradients above zero.

fp16 gradients underflow, so the loss is multiplied by a scale, and gradients divided by it
before the update. The scale is dynamic: it halves when gradients overflow, in a step that
then changes nothing, and doubles after a window of steps without overflow (Micikevicius et
al., Mixed Precision Training, section 3.2). The fields mean what they mean in DeepSpeed's
``fp16`` configuration.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fxzero.errors import ConfigError, NonFiniteGradientError, nearest
from fxzero.sharding.markers import KEYS, cast_inputs, compute_in_fp32, mark
from fxzero.sharding.params import KEY
from fxzero.sharding.shard import MIXED, model_state, param_specs, replace_specs, sharded_module

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Precision:
    """How `fxzero.compile_step` computes. Master parameters and optimizer state stay fp32."""

    param_dtype: torch.dtype | None = None
    """Dtype to compute in; None keeps what `fxzero.shard` was told."""
    reduce_dtype: torch.dtype | None = None
    """Dtype in which gradients travel; default: the compute dtype."""
    fp32_modules: tuple[str | type[nn.Module], ...] = ()
    """Classes of modules, or their names, that compute in fp32: ``("LayerNorm",)``."""
    fp32_loss: bool = True
    """Whether `loss_fn` gets the model's output as fp32."""
    loss_scale: float = 0.0
    """A fixed loss scale for fp16; 0 is dynamic."""
    initial_scale_power: int = 16
    """The dynamic scale starts at two to this power."""
    loss_scale_window: int = 1000
    """Steps without overflow after which the next one of its kind doubles the dynamic scale."""
    hysteresis: int = 2
    """Overflows that it takes to lower the dynamic scale: the first ones only skip a step."""
    consecutive_hysteresis: bool = False
    """Whether every step without overflow forgets the overflows before it."""
    min_loss_scale: float = 1.0
    """The dynamic scale never falls below this."""

    def __post_init__(self) -> None:
        for name in ("param_dtype", "reduce_dtype"):
            dtype = getattr(self, name)
            if dtype is not None and not (
                isinstance(dtype, torch.dtype) and dtype.is_floating_point
            ):
                raise ConfigError(f"precision.{name}={dtype!r} must be a floating-point dtype")
        for name in ("initial_scale_power", "loss_scale"):
            if getattr(self, name) < 0:
                raise ConfigError(f"precision.{name}={getattr(self, name)} must be 0 or more")
        for name in ("loss_scale_window", "hysteresis"):
            if getattr(self, name) < 1:
                raise ConfigError(f"precision.{name}={getattr(self, name)} must be 1 or more")
        if not self.min_loss_scale > 0:
            raise ConfigError(f"precision.min_loss_scale={self.min_loss_scale} must be positive")

    def refuse_loss_scale(self) -> None:
        """See that nobody expects the loss of a model without fp16 to be scaled.

        Raises:
            ConfigError: a field of the loss scale was set.
        """
        plain = Precision()
        for name in _SCALE_FIELDS:
            if getattr(self, name) != getattr(plain, name):
                raise ConfigError(
                    f"precision.{name}={getattr(self, name)} has no effect: only fp16 scales the "
                    "loss, and no parameter computes in it. Drop it, or ask for "
                    "param_dtype=torch.float16."
                )

    @classmethod
    def of(cls, value: Precision | str | torch.dtype | None) -> Precision:
        """Read what `compile_step` was given.

        Raises:
            ConfigError: a name that means nothing.
        """
        if isinstance(value, Precision):
            return value
        if value is None:
            return cls()
        if isinstance(value, torch.dtype):
            return cls(param_dtype=value)
        if value not in _DTYPES:
            raise ConfigError(f"precision={value!r}: {nearest(str(value), _DTYPES)}")
        return cls(param_dtype=_DTYPES[value])


_SCALE_FIELDS = (
    "loss_scale",
    "initial_scale_power",
    "loss_scale_window",
    "hysteresis",
    "consecutive_hysteresis",
    "min_loss_scale",
)
_PRECISION = "_fxzero_precision"
"""Attribute of a model: the dtypes that `set_precision` has given it."""


def set_precision(model: nn.Module, precision: Precision) -> None:
    """Let a model that `fxzero.shard` has seen compute in other dtypes, as if shard had said so.

    A wrapper around the sharded module, which computes the loss say, is left as it is.

    Raises:
        ConfigError: it computes in yet another dtype already, or a name in `fp32_modules`
            belongs to no module. The model is then untouched.
    """
    module = sharded_module(model)
    assert module is not None
    model = module
    specs = param_specs(model)
    floating = [s for s in specs.values() if s.dtype.is_floating_point]
    lowered = {s.compute_dtype for s in floating if s.compute_dtype != s.dtype}
    dtype = precision.param_dtype
    if dtype is None and len(lowered) == 1:
        dtype = next(iter(lowered))
    asked = (dtype, precision.reduce_dtype, precision.fp32_modules)
    before = vars(model).get(_PRECISION)
    if before == asked:
        return
    if before is not None or not lowered <= {dtype}:
        had = before or sorted(str(d) for d in lowered)
        raise ConfigError(
            f"precision asks for {asked}, and the model computes in {had} already. Ask for the "
            "same, or build and shard the model anew."
        )
    exceptions = _fp32_modules(model, precision.fp32_modules)
    state = model_state(model)
    assert state is not None
    kept = {id(p) for m in exceptions for p in m.parameters()}
    kept |= {id(p) for m in model.modules() if isinstance(m, MIXED) for p in m.parameters()}
    new = {}
    for name, spec in specs.items():
        parameter = spec.parameter() if spec.parameter is not None else None
        compute = spec.dtype if id(parameter) in kept else dtype or spec.compute_dtype
        if not spec.dtype.is_floating_point:
            compute = spec.dtype
        reduce_dtype = precision.reduce_dtype or compute
        if compute == spec.compute_dtype and precision.reduce_dtype is None:
            reduce_dtype = spec.reduce_dtype
        new[name] = dataclasses.replace(spec, compute_dtype=compute, reduce_dtype=reduce_dtype)
    replace_specs(model, new)
    by_identity = {id(s.parameter()): s for s in new.values() if s.parameter is not None}
    for module in model.modules():
        own = {n: by_identity.get(id(p)) for n, p in module._parameters.items()}
        keys = {n: s.key for n, s in own.items() if s is not None and s.compute_dtype != s.dtype}
        if KEYS not in vars(module):
            for name, key in keys.items():
                setattr(module._parameters[name], KEY, key)
            mark(module, keys, state)
    for module in exceptions:
        if dtype is not None:
            compute_in_fp32(module, dtype)
    if dtype is not None and not lowered and any(s.dtype != dtype for s in floating):
        cast_inputs(model, dtype)
    setattr(model, _PRECISION, asked)


def _fp32_modules(model: nn.Module, wanted: tuple[str | type[nn.Module], ...]) -> list[nn.Module]:
    """The modules that one of the classes, or names of classes, describes."""
    names = {c.__name__ for m in model.modules() for c in type(m).__mro__}
    for item in wanted:
        if isinstance(item, str) and item not in names:
            raise ConfigError(f"precision.fp32_modules has {item!r}: {nearest(item, names)}")
    return [
        m
        for m in model.modules()
        if any(
            item in {c.__name__ for c in type(m).__mro__}
            if isinstance(item, str)
            else isinstance(m, item)
            for item in wanted
        )
    ]


class LossScale:
    """The loss scale of a training run."""

    def __init__(self, precision: Precision) -> None:
        self._rule = precision
        self._dynamic = precision.loss_scale == 0
        self.value = precision.loss_scale or math.ldexp(1.0, precision.initial_scale_power)
        """What the next step's loss is multiplied by."""
        self._steps = 0
        self._last_overflow = -1
        self._overflows_left = precision.hysteresis

    def update(self, overflow: bool) -> None:
        """Account for one step.

        Raises:
            NonFiniteGradientError: an overflow although the scale is as low as it may be.
        """
        if self._dynamic and overflow:
            self._lower()
        elif self._dynamic:
            if self._rule.consecutive_hysteresis:
                self._overflows_left = self._rule.hysteresis
            stable = self._steps - self._last_overflow - 1  # steps before this one
            if stable > 0 and stable % self._rule.loss_scale_window == 0:
                self._overflows_left = self._rule.hysteresis
                self.value *= 2
        self._steps += 1

    def _lower(self) -> None:
        self._last_overflow = self._steps
        if self._overflows_left > 1:
            self._overflows_left -= 1
            return
        if self.value <= self._rule.min_loss_scale:
            self._steps += 1
            raise NonFiniteGradientError(
                f"gradients overflow although the loss scale is {self.value}, its minimum. The "
                "step was skipped and nothing was changed. Lower the learning rate, look at the "
                "batch, let fxzero.find_non_finite(step, *batch) say where it begins, or train in "
                "bf16."
            )
        self.value = max(self.value / 2, self._rule.min_loss_scale)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs to go on alike."""
        return {
            "value": self.value,
            "steps": self._steps,
            "last_overflow": self._last_overflow,
            "overflows_left": self._overflows_left,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where a checkpoint left.

        Raises:
            ConfigError: the state is of something else.
        """
        if set(state) != set(self.state_dict()):
            raise ConfigError(
                f"a loss scale's state has {sorted(self.state_dict())}, found {sorted(state)}"
            )
        self.value = float(state["value"])
        self._steps = int(state["steps"])
        self._last_overflow = int(state["last_overflow"])
        self._overflows_left = int(state["overflows_left"])
