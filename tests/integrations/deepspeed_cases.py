"""Configurations that DeepSpeed and fxzero train alike, with their model and data.

Numbers come from sines, and from no generator: they are the same under every version of torch.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROWS, WIDTH, CLASSES, STEPS = 8, 6, 3, 6
"""Rows of a step over all ranks, their features, their classes; steps of a case."""


class Net(nn.Module):
    """Two layers and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 8)
        self.norm = nn.LayerNorm(8)
        self.last = nn.Linear(8, CLASSES)
        with torch.no_grad():
            for number, parameter in enumerate(self.parameters(), start=1):
                parameter.copy_(waves(parameter.numel(), number).view_as(parameter) * 0.7)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(torch.relu(self.first(x))))


def waves(count: int, phase: float) -> Tensor:
    """Numbers between -1 and 1."""
    return torch.sin(torch.arange(count, dtype=torch.float64) * 1.7 + phase).float()


def batch(step: int, rank: int, world_size: int) -> tuple[Tensor, Tensor]:
    """A rank's rows of a step: [rows, WIDTH], and their classes."""
    x = waves(ROWS * WIDTH, 0.3 * step + 0.1).view(ROWS, WIDTH) * 2
    y = (torch.arange(ROWS) * 5 + step) % CLASSES
    part = slice(rank * ROWS // world_size, (rank + 1) * ROWS // world_size)
    return x[part], y[part]


def loss_fn(outputs: Tensor, targets: Tensor) -> Tensor:
    """The loss of a micro-batch, in fp32 whatever the model computes in."""
    return F.cross_entropy(outputs.float(), targets) * 4  # large enough to be clipped


def loss_of_step(engine: Any, inputs: Tensor, targets: Tensor, micro_batches: int) -> float:
    """The mean loss of a step by the three calls, of DeepSpeed's engine or of ours."""
    losses = []
    for x, y in zip(inputs.chunk(micro_batches), targets.chunk(micro_batches), strict=True):
        loss = loss_fn(engine(x), y)
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach())
    return torch.stack(losses).mean().item()


BASE: dict[str, Any] = {
    "train_batch_size": ROWS,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 0.5,
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.02, "weight_decay": 0.1}},
}


def _case(world_size: int = 1, without: tuple[str, ...] = (), **keys: Any) -> dict[str, Any]:
    config = {**copy.deepcopy(BASE), **keys}
    return {
        "world_size": world_size,
        "config": {key: value for key, value in config.items() if key not in without},
    }


def _zero(stage: int, **keys: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, **keys}}


def _optimizer(kind: str, **params: Any) -> dict[str, Any]:
    return {"optimizer": {"type": kind, "params": params}}


def _schedule(kind: str, **params: Any) -> dict[str, Any]:
    return {"scheduler": {"type": kind, "params": params}, **_zero(1)}


CPU = {"device": "cpu"}
SGD = _optimizer("SGD", lr=0.05)
"""What a clip makes smaller steps: Adam makes steps of one size."""
BF16 = {"bf16": {"enabled": True}}
CASES: dict[str, dict[str, Any]] = {
    # stages, and where things live
    **{f"zero{stage}": _case(2, **_zero(stage)) for stage in range(4)},
    "zero1_alone": _case(**_zero(1)),
    "zero2_buckets": _case(
        2, **_zero(2, reduce_bucket_size=40, allgather_bucket_size=50, overlap_comm=False)
    ),
    "zero3_buckets": _case(
        2,
        **_zero(
            3,
            reduce_bucket_size=64,
            stage3_prefetch_bucket_size=30,
            stage3_param_persistence_threshold=10,
            stage3_max_live_parameters=200,
            stage3_max_reuse_distance=0,
        ),
    ),
    "zero1_offload": _case(2, **_zero(1, offload_optimizer=CPU)),
    "zero2_offload": _case(2, **_zero(2, offload_optimizer=CPU)),
    "zero2_cpu_offload": _case(2, **_zero(2, cpu_offload=True)),
    "zero3_offload": _case(2, **_zero(3, offload_optimizer=CPU)),
    "zero3_offload_param": _case(2, **_zero(3, offload_optimizer=CPU, offload_param=CPU)),
    # batches and clipping
    "one_micro_batch": _case(2, **_zero(1), gradient_accumulation_steps=1),
    "four_micro_batches": _case(1, **_zero(2), gradient_accumulation_steps=4),
    "clipping_zero": _case(2, **_zero(2), **SGD, gradient_clipping=0.0),
    "clipping_default": _case(2, ("gradient_clipping",), **_zero(2), **SGD),
    "clipping_half": _case(2, **_zero(3), **SGD),
    "clipping_default_zero0": _case(2, ("gradient_clipping",), **SGD),
    "prescale": _case(2, **_zero(0), prescale_gradients=True, gradient_predivide_factor=2.0),
    # optimizers
    "adam_is_adamw": _case(**_zero(1), **_optimizer("Adam", lr=0.02, weight_decay=0.3)),
    "adam_l2": _case(
        **_zero(1), **_optimizer("Adam", lr=0.02, weight_decay=0.3, adam_w_mode=False)
    ),
    "adam_defaults": _case(**_zero(1), **_optimizer("Adam")),
    "adamw_no_decay": _case(**_zero(1), **_optimizer("AdamW", lr=0.02)),
    "adamw_betas": _case(**_zero(1), **_optimizer("AdamW", lr=0.02, betas=[0.5, 0.7], eps=1e-3)),
    "torch_adamw": _case(**_zero(1), **_optimizer("AdamW", lr=0.5, torch_adam=True)),
    "torch_adam_l2": _case(
        **_zero(1),
        **_optimizer("Adam", lr=0.02, torch_adam=True, adam_w_mode=False, weight_decay=0.3),
    ),
    "adam_offload_l2": _case(
        **_zero(2, offload_optimizer=CPU),
        **_optimizer("Adam", lr=0.02, weight_decay=0.3, adam_w_mode=False),
    ),
    "adagrad": _case(**_zero(1), **_optimizer("Adagrad", lr=0.05)),
    "sgd": _case(**_zero(1), **_optimizer("SGD", lr=0.1, momentum=0.9, nesterov=True)),
    "rmsprop": _case(**_zero(1), **_optimizer("RMSprop", lr=0.01)),
    # schedules
    "warmup": _case(**_schedule("WarmupLR", warmup_max_lr=0.05, warmup_num_steps=4)),
    "warmup_linear": _case(
        **_schedule(
            "WarmupLR",
            warmup_min_lr=0.01,
            warmup_max_lr=0.05,
            warmup_num_steps=3,
            warmup_type="linear",
        )
    ),
    "warmup_own_lr": _case(**_schedule("WarmupLR", warmup_num_steps=3)),
    "warmup_one": _case(**_schedule("WarmupLR", warmup_max_lr=0.05, warmup_num_steps=1)),
    "warmup_decay": _case(
        **_schedule("WarmupDecayLR", total_num_steps=5, warmup_max_lr=0.05, warmup_num_steps=2)
    ),
    "warmup_cosine": _case(
        **_schedule("WarmupCosineLR", total_num_steps=4, warmup_num_steps=2, warmup_min_ratio=0.3)
    ),
    "one_cycle": _case(
        **_schedule(
            "OneCycle",
            cycle_min_lr=0.01,
            cycle_max_lr=0.06,
            cycle_first_step_size=2,
            cycle_second_step_size=1,
            decay_step_size=1,
            decay_lr_rate=0.5,
            decay_mom_rate=0.02,
        )
    ),
    "one_cycle_stairs": _case(
        **_schedule(
            "OneCycle",
            cycle_min_lr=0.01,
            cycle_max_lr=0.06,
            cycle_first_step_size=3,
            cycle_first_stair_count=2,
            cycle_momentum=False,
        )
    ),
    "range_test": _case(
        **_schedule("LRRangeTest", lr_range_test_min_lr=0.01, lr_range_test_step_size=2)
    ),
    "range_test_stairs": _case(
        **_schedule(
            "LRRangeTest",
            lr_range_test_min_lr=0.01,
            lr_range_test_step_size=2,
            lr_range_test_staircase=True,
        )
    ),
    # lower precision
    **{f"bf16_zero{stage}": _case(2, **_zero(stage), **BF16) for stage in (1, 2, 3)},
    "bf16_offload": _case(2, **_zero(2, offload_optimizer=CPU), **BF16),
    "bf16_fp32_reduced": _case(2, **_zero(2), **BF16, communication_data_type="fp32"),
}


def is_low(config: dict[str, Any]) -> bool:
    """Whether a case computes in bf16."""
    return bool(config.get("bf16", {}).get("enabled"))
