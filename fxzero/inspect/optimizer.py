"""The optimizer that commands train with."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def adamw(parameters: list[nn.Parameter], **settings: Any) -> torch.optim.AdamW:
    """AdamW by torch's fused kernel, which has none for complex numbers: of these it is refused,
    and a training loop has AdamW's own step.

    Args:
        parameters: that are trained.
        settings: AdamW's.
    """
    fused = all(parameter.is_floating_point() for parameter in parameters)
    return torch.optim.AdamW(parameters, fused=fused or None, **settings)
