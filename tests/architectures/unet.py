"""A U-Net for diffusion, small, of the parts of diffusers' ``UNet2DConditionModel``.

diffusers is no dependency of the tests. Its parts are here as they are there: sinusoids of
the time through an MLP, residual blocks of group norms that add the time, attention over the
picture and to a text, strided convolutions down, nearest neighbours up, skips between.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

TIME = 32
GROUPS = 4


def sinusoids(time: Tensor, width: int) -> Tensor:
    """``(B,) → (B, width)``."""
    half = width // 2
    rates = torch.exp(-math.log(10000) * torch.arange(half, device=time.device) / half)
    angles = time[:, None].float() * rates[None]
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


class ResnetBlock(nn.Module):
    """Two convolutions, the time between them, around what was given."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.norm1 = nn.GroupNorm(GROUPS, before)
        self.conv1 = nn.Conv2d(before, after, 3, padding=1)
        self.time_emb_proj = nn.Linear(TIME, after)
        self.norm2 = nn.GroupNorm(GROUPS, after)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1)
        self.conv_shortcut = nn.Conv2d(before, after, 1) if before != after else None

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        """``(B, before, H, W), (B, TIME) → (B, after, H, W)``."""
        hidden = self.conv1(F.silu(self.norm1(x)))
        hidden = hidden + self.time_emb_proj(F.silu(time))[:, :, None, None]
        hidden = self.conv2(F.silu(self.norm2(hidden)))
        return hidden + (self.conv_shortcut(x) if self.conv_shortcut is not None else x)


class Attention(nn.Module):
    """Of one sequence to another."""

    def __init__(self, width: int, context: int, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.to_q = nn.Linear(width, width, bias=False)
        self.to_k = nn.Linear(context, width, bias=False)
        self.to_v = nn.Linear(context, width, bias=False)
        self.to_out = nn.ModuleList([nn.Linear(width, width), nn.Dropout(0.0)])

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        """``(B, S, width), (B, T, context) → (B, S, width)``."""
        context = x if context is None else context
        q, k, v = (
            y.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for y in (self.to_q(x), self.to_k(context), self.to_v(context))
        )
        found = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        for module in self.to_out:
            found = module(found)
        return found


class TransformerBlock(nn.Module):
    """The picture looks at itself, then at the text."""

    def __init__(self, width: int, context: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(GROUPS, width)
        self.proj_in = nn.Conv2d(width, width, 1)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.attn1 = Attention(width, width)
        self.attn2 = Attention(width, context)
        self.geglu = nn.Linear(width, 4 * width)
        self.out = nn.Linear(2 * width, width)
        self.proj_out = nn.Conv2d(width, width, 1)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        """``(B, width, H, W), (B, T, context) → (B, width, H, W)``."""
        hidden = self.proj_in(self.norm(x)).flatten(2).transpose(1, 2)
        hidden = hidden + self.attn1(self.norms[0](hidden))
        hidden = hidden + self.attn2(self.norms[1](hidden), context)
        value, gate = self.geglu(self.norms[2](hidden)).chunk(2, dim=-1)
        hidden = hidden + self.out(value * F.gelu(gate))
        return x + self.proj_out(hidden.transpose(1, 2).reshape(x.shape))


class UNet(nn.Module):
    """Finds the noise in noisy pictures.

    Args:
        widths: channels of each resolution.
        context: the text's width.
    """

    def __init__(self, widths: tuple[int, ...] = (8, 16), context: int = 16) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(16, TIME), nn.SiLU(), nn.Linear(TIME, TIME))
        self.conv_in = nn.Conv2d(3, widths[0], 3, padding=1)
        self.down_blocks, self.up_blocks = nn.ModuleList(), nn.ModuleList()
        before = widths[0]
        for width in widths:
            block = [ResnetBlock(before, width), TransformerBlock(width, context)]
            self.down_blocks.append(
                nn.ModuleList([*block, nn.Conv2d(width, width, 3, stride=2, padding=1)])
            )
            before = width
        self.mid = nn.ModuleList([ResnetBlock(before, before) for _ in range(2)])
        for width in reversed(widths):
            block = [ResnetBlock(before + width, width), TransformerBlock(width, context)]
            self.up_blocks.append(nn.ModuleList([*block, nn.Conv2d(width, width, 3, padding=1)]))
            before = width
        self.norm_out = nn.GroupNorm(GROUPS, before)
        self.conv_out = nn.Conv2d(before, 3, 3, padding=1)

    def forward(self, sample: Tensor, time: Tensor, context: Tensor, target: Tensor) -> Tensor:
        """``(B, 3, H, W), (B,), (B, T, context), (B, 3, H, W) → a loss``."""
        embedded = self.time(sinusoids(time, 16).to(sample.dtype))
        x = self.conv_in(sample)
        skips = []
        for resnet, attend, shrink in self.down_blocks:
            x = attend(resnet(x, embedded), context)
            skips.append(x)
            x = shrink(x)
        for resnet in self.mid:
            x = resnet(x, embedded)
        for resnet, attend, widen in self.up_blocks:
            x = F.interpolate(x, scale_factor=2.0, mode="nearest")
            x = resnet(torch.cat([x, skips.pop()], dim=1), embedded)
            x = widen(attend(x, context))
        return F.mse_loss(self.conv_out(F.silu(self.norm_out(x))), target)
