"""DeepSpeed's learning-rate schedules, to the letter.

Step n, from 0, is trained with the rate of "iteration" n − 1: DeepSpeed steps a scheduler behind
the optimizer, and its first rate is that of before the beginning. So a warm-up has its least rate
twice. (The first rate of WarmupCosineLR is 0 whatever its least ratio is, and OneCycle's first
momentum is the least one, not the largest.)

Sources: Smith 2018 (arXiv 1803.09820) for OneCycle and LRRangeTest.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from fxzero.errors import ConfigError
from fxzero.integrations.deepspeed.kinds import (
    BOOL,
    COUNT,
    EXACT_COUNT,
    NUMBER,
    NUMBERS,
    SIZE,
    Kind,
    at_least,
    one_of,
)

Rates = float | tuple[float, ...] | list[float]
"""One for all parameter groups, or one for each."""


def each(value: Rates, count: int) -> list[float]:
    """A value for each of so many parameter groups.

    Raises:
        ConfigError: there are more, or fewer.
    """
    if not isinstance(value, (list, tuple)):
        return [value] * count
    if len(value) != count:
        raise ConfigError(
            f"the schedule has {list(value)}, one for each of {len(value)} parameter groups, and "
            f"the optimizer has {count}. Say one number for all, or {count}."
        )
    return list(value)


def warm(iteration: int, steps: int, how: str) -> float:
    """How far a warm-up has come: 0 to 1, by the logarithm or in a line."""
    if how == "log":
        return math.log(iteration + 1) / math.log(steps)
    return iteration / steps


@dataclass(frozen=True)
class WarmupLR:
    """From a least rate to the largest, which stays."""

    kinds: ClassVar[dict[str, Kind]] = {
        "warmup_min_lr": NUMBERS,
        "warmup_max_lr": NUMBERS.or_null,
        "warmup_num_steps": EXACT_COUNT,
        "warmup_type": replace(
            one_of("log", "linear"), hints={"cosine": "that is scheduler.type: WarmupCosineLR."}
        ),
    }
    required: ClassVar[tuple[str, ...]] = ()

    warmup_min_lr: Rates = 0.0
    warmup_max_lr: Rates | None = None
    """None is the optimizer's own."""
    warmup_num_steps: int = 1000
    warmup_type: str = "log"

    def rates(self, step: int, base: list[float]) -> list[float]:
        """Each group's learning rate in a step, from 0."""
        least = each(self.warmup_min_lr, len(base))
        most = base if self.warmup_max_lr is None else each(self.warmup_max_lr, len(base))
        part = 0.0 if step == 0 else self._part(step - 1)
        return [low + (high - low) * part for low, high in zip(least, most, strict=True)]

    @property
    def _steps(self) -> int:
        return max(2, self.warmup_num_steps)  # log(1) is 0

    def _part(self, iteration: int) -> float:
        if iteration < self._steps:
            return warm(iteration, self._steps, self.warmup_type)
        return self._behind(iteration)

    def _behind(self, iteration: int) -> float:
        return 1.0


@dataclass(frozen=True)
class WarmupDecayLR(WarmupLR):
    """And from there in a line to 0."""

    kinds: ClassVar[dict[str, Kind]] = {**WarmupLR.kinds, "total_num_steps": COUNT}
    required: ClassVar[tuple[str, ...]] = ("total_num_steps",)

    warmup_max_lr: Rates | None = 0.001
    total_num_steps: int = 0

    def _behind(self, iteration: int) -> float:
        left = float(self.total_num_steps - iteration)
        return max(0.0, left / max(1.0, self.total_num_steps - self._steps))


@dataclass(frozen=True)
class WarmupCosineLR:
    """From a part of the optimizer's rate to all of it, then as a cosine to a small part."""

    kinds: ClassVar[dict[str, Kind]] = {
        "total_num_steps": COUNT,
        "warmup_min_ratio": NUMBER,
        "warmup_num_steps": EXACT_COUNT,
        "cos_min_ratio": NUMBER,
        "warmup_type": one_of("log", "linear"),
    }
    required: ClassVar[tuple[str, ...]] = ("total_num_steps",)

    total_num_steps: int = 0
    warmup_min_ratio: float = 0.0
    warmup_num_steps: int = 1000
    cos_min_ratio: float = 0.0001
    warmup_type: str = "log"
    stays: bool = True
    """Whether it stays at its end; before DeepSpeed 0.19.3 it rose again."""

    def rates(self, step: int, base: list[float]) -> list[float]:
        """Each group's learning rate in a step, from 0."""
        part = 0.0 if step == 0 else self._part(step - 1)
        return [rate * part for rate in base]

    def _part(self, iteration: int) -> float:
        steps = max(2, self.warmup_num_steps)
        if iteration < steps:
            done = warm(iteration, steps, self.warmup_type)
            return self.warmup_min_ratio + done * (1 - self.warmup_min_ratio)
        done = (iteration - steps + 1) / max(1, self.total_num_steps - steps)
        cosine = (1 + math.cos(math.pi * (min(1.0, done) if self.stays else done))) / 2
        return max(0.0, self.cos_min_ratio + (1 - self.cos_min_ratio) * cosine)


@dataclass(frozen=True)
class LRRangeTest:
    """A rate that grows, to find out how large it may be."""

    kinds: ClassVar[dict[str, Kind]] = {
        "lr_range_test_min_lr": NUMBERS,
        "lr_range_test_step_size": EXACT_COUNT,
        "lr_range_test_step_rate": NUMBER,
        "lr_range_test_staircase": BOOL,
    }
    required: ClassVar[tuple[str, ...]] = ()

    lr_range_test_min_lr: Rates = 1e-3
    lr_range_test_step_size: int = 2000
    lr_range_test_step_rate: float = 1.0
    lr_range_test_staircase: bool = False

    def rates(self, step: int, base: list[float]) -> list[float]:
        """Each group's learning rate in a step, from 0."""
        interval: float = step / self.lr_range_test_step_size
        if self.lr_range_test_staircase:
            interval = math.floor(interval)
        grown = 1 + self.lr_range_test_step_rate * interval
        return [rate * grown for rate in each(self.lr_range_test_min_lr, len(base))]


@dataclass(frozen=True)
class OneCycle:
    """A rate that rises and falls once, momentum against it, and then what decays."""

    kinds: ClassVar[dict[str, Kind]] = {
        "cycle_min_lr": NUMBERS,
        "cycle_max_lr": NUMBERS,
        "decay_lr_rate": NUMBER,
        "cycle_first_step_size": COUNT,
        "cycle_second_step_size": SIZE.or_null,
        "cycle_first_stair_count": SIZE,
        "cycle_second_stair_count": SIZE.or_null,
        "decay_step_size": at_least(0),
        "cycle_momentum": BOOL,
        "cycle_min_mom": NUMBERS,
        "cycle_max_mom": NUMBERS,
        "decay_mom_rate": NUMBER,
    }
    required: ClassVar[tuple[str, ...]] = ("cycle_min_lr", "cycle_max_lr")

    cycle_min_lr: Rates = 0.0
    cycle_max_lr: Rates = 0.0
    decay_lr_rate: float = 0.0
    cycle_first_step_size: int = 2000
    cycle_second_step_size: int | None = None
    cycle_first_stair_count: int = 0
    cycle_second_stair_count: int | None = None
    decay_step_size: float = 0.0
    cycle_momentum: bool = True
    cycle_min_mom: Rates = 0.8
    cycle_max_mom: Rates = 0.9
    decay_mom_rate: float = 0.0

    @property
    def _second(self) -> int:
        second = self.cycle_second_step_size
        return self.cycle_first_step_size if second is None else second

    @property
    def _length(self) -> int:
        return self.cycle_first_step_size + self._second

    def _height(self, step: int) -> float:
        """Where in the cycle a step is: 0 at its ends, 1 at its top."""
        first = float(self.cycle_first_step_size)
        position = step % self._length
        rising = position <= first
        part, length = (position, first) if rising else (self._length - position, self._second)
        stairs = self.cycle_first_stair_count
        if not rising and self.cycle_second_stair_count is not None:
            stairs = self.cycle_second_stair_count
        return math.floor(part * stairs / length) / stairs if stairs else part / length

    def _is_over(self, step: int) -> bool:
        return step > self._length

    def _intervals(self, step: int) -> float:
        """How often what decays has done so."""
        return (step - self._length) / self.decay_step_size

    def _decays(self, rate: float) -> bool:
        return not math.isclose(self.decay_step_size, 0) and not math.isclose(rate, 0)

    def rates(self, step: int, base: list[float]) -> list[float]:
        """Each group's learning rate in a step, from 0."""
        least = each(self.cycle_min_lr, len(base))
        if self._is_over(step):
            by = 1.0
            if self._decays(self.decay_lr_rate):
                by = 1 + self.decay_lr_rate * self._intervals(step)
            return [low / by for low in least]
        height = self._height(step)
        most = each(self.cycle_max_lr, len(base))
        return [low + (high - low) * height for low, high in zip(least, most, strict=True)]

    def momentums(self, step: int, count: int) -> list[float]:
        """Each group's first beta in a step, from 0; the second is 0.99."""
        least, most = each(self.cycle_min_mom, count), each(self.cycle_max_mom, count)
        if step == 0:
            return least
        if self._is_over(step):
            by = 1.0
            if self._decays(self.decay_mom_rate):
                by = 1 + self.decay_mom_rate * self._intervals(step)
            return [high * by for high in most]
        height = self._height(step)
        return [high - (high - low) * height for low, high in zip(least, most, strict=True)]


Rule = WarmupLR | WarmupCosineLR | LRRangeTest | OneCycle
RULES: dict[str, type[Rule]] = {
    rule.__name__: rule for rule in (WarmupLR, WarmupDecayLR, WarmupCosineLR, LRRangeTest, OneCycle)
}


class DeepSpeedSchedule(LRScheduler):
    """One of DeepSpeed's schedules over an optimizer: step it behind each optimizer step."""

    def __init__(self, optimizer: Optimizer, rule: Rule) -> None:
        """Set the rates, and momentum, of the first step."""
        self.rule = rule
        self._cycles_momentum = (
            isinstance(rule, OneCycle) and rule.cycle_momentum and "betas" in optimizer.defaults
        )
        super().__init__(optimizer)

    def get_lr(self) -> list[float | Tensor]:
        """Each group's learning rate in the next step."""
        return [*self.rule.rates(self.last_epoch, [float(rate) for rate in self.base_lrs])]

    def step(self, epoch: int | None = None) -> None:
        """Go on to the next step's rates, and momentum."""
        super().step(epoch)
        if self._cycles_momentum:
            assert isinstance(self.rule, OneCycle)
            groups = self.optimizer.param_groups
            momentums = self.rule.momentums(self.last_epoch, len(groups))
            for group, momentum in zip(groups, momentums, strict=True):
                group["betas"] = (momentum, 0.99)

    def state_dict(self) -> dict[str, Any]:
        """Where it is, and what it began with; not its rule, which the configuration says."""
        return {name: value for name, value in super().state_dict().items() if name != "rule"}
