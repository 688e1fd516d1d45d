"""What one rank of eight runs of Megatron-LM's GPT, as plain PyTorch with collectives of its own.

    tensor parallel      x ─ column ─ core ─ row ─ all_reduce ─ +              x whole on every rank
    sequence parallel    x ─ all_gather ─ column ─ core ─ row ─ reduce_scatter ─ +   x in parts

Shoeybi et al. 2019 (arXiv 1909.08053, section 3) and Korthikanti et al. 2022 (arXiv 2205.05198,
section 4.2). In backward a column-parallel linear's collectives are on their way while it computes,
as in Megatron-LM. Tensors are (S, B, H); under sequence parallelism a rank has a part of S between
the parallel layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

_c10d = torch.ops._c10d_functional


@dataclass(frozen=True)
class Shape:
    """A GPT's sizes, and over how many ranks its layers are split."""

    hidden: int
    num_heads: int
    num_layers: int
    micro_batch: int
    seq_len: int = 2048
    vocab_size: int = 51200
    tensor_parallel: int = 8
    sequence_parallel: bool = False
    """Whether what is between the parallel layers is split along the sequence."""
    dropout: float = 0.1

    @property
    def tokens(self) -> int:
        """Positions that a rank has between the parallel layers."""
        return self.seq_len // (self.tensor_parallel if self.sequence_parallel else 1)


def _group() -> str:
    assert dist.group.WORLD is not None
    return dist.group.WORLD.group_name


def start_all_reduce(x: Tensor) -> Tensor:
    """Launch the sum over ranks; `arrived` joins it."""
    return _c10d.all_reduce(x.contiguous(), "sum", _group())


def start_all_gather(x: Tensor) -> Tensor:
    """Launch the gathering of parts along the first dim."""
    return _c10d.all_gather_into_tensor(x.contiguous(), dist.get_world_size(), _group())


def start_reduce_scatter(x: Tensor) -> Tensor:
    """Launch the sum over ranks of which each keeps its part of the first dim."""
    return _c10d.reduce_scatter_tensor(x.contiguous(), "sum", dist.get_world_size(), _group())


def arrived(x: Tensor) -> Tensor:
    """Join a collective."""
    return _c10d.wait_tensor(x)


class _ColumnLinear(torch.autograd.Function):
    """x @ w.T, w a rank's rows of the weight: Megatron-LM's
    LinearWithGradAccumulationAndAsyncCommunication."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, parts: bool) -> Tensor:
        """Whole if x is in parts."""
        ctx.save_for_backward(x, weight)
        ctx.parts = parts
        whole = arrived(start_all_gather(x)) if parts else x
        return whole @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        """The input is gathered beside one product, and its gradient summed beside the other."""
        x, weight = ctx.saved_tensors
        gathered = start_all_gather(x) if ctx.parts else x
        partial = grad @ weight
        whole = arrived(gathered) if ctx.parts else x
        summed = start_reduce_scatter(partial) if ctx.parts else start_all_reduce(partial)
        of_weight = grad.flatten(0, 1).t() @ whole.flatten(0, 1)
        return arrived(summed), of_weight, None


class _SumParts(torch.autograd.Function):
    """What ranks have computed parts of, whole on each, or each its part of the sequence."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, parts: bool) -> Tensor:
        """All of it, or this rank's part."""
        ctx.parts = parts
        return arrived(start_reduce_scatter(x) if parts else start_all_reduce(x))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """What all ranks have, or what their parts are gathered to."""
        return arrived(start_all_gather(grad)) if ctx.parts else grad, None


class ColumnParallel(nn.Module):
    """A linear layer of which each rank has some outputs."""

    def __init__(self, inputs: int, outputs: int, shape: Shape) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs // shape.tensor_parallel, inputs))
        self.bias = nn.Parameter(torch.empty(outputs // shape.tensor_parallel))
        self.parts = shape.sequence_parallel

    def forward(self, x: Tensor) -> Tensor:
        """(S, B, inputs) → (S, B, outputs / t)."""
        return _ColumnLinear.apply(x, self.weight, self.parts) + self.bias


class RowParallel(nn.Module):
    """A linear layer of which each rank has some inputs."""

    def __init__(self, inputs: int, outputs: int, shape: Shape) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs // shape.tensor_parallel))
        self.bias = nn.Parameter(torch.empty(outputs))
        self.parts = shape.sequence_parallel

    def forward(self, x: Tensor) -> Tensor:
        """(S, B, inputs / t) → (S, B, outputs)."""
        return _SumParts.apply(x @ self.weight.t(), self.parts) + self.bias


class Core(nn.Module):
    """Causal attention over a rank's heads, its scores in memory as before FlashAttention."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.num_heads // shape.tensor_parallel
        self.dropout = shape.dropout

    def forward(self, qkv: Tensor) -> Tensor:
        """(S, B, 3H / t) → (S, B, H / t)."""
        s, b, width = qkv.shape
        q, k, v = qkv.view(s, b * self.heads, -1).transpose(0, 1).chunk(3, dim=-1)
        later = torch.ones(s, s, dtype=torch.bool, device=qkv.device).triu(1)
        scores = (q @ k.transpose(1, 2)) * q.shape[-1] ** -0.5
        weights = F.dropout(scores.masked_fill(later, float("-inf")).softmax(-1), self.dropout)
        return (weights @ v).transpose(0, 1).reshape(s, b, width // 3)


class Attention(nn.Module):
    """Self-attention."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.qkv = ColumnParallel(shape.hidden, 3 * shape.hidden, shape)
        self.core = Core(shape)
        self.proj = RowParallel(shape.hidden, shape.hidden, shape)

    def forward(self, x: Tensor) -> Tensor:
        """(S, B, H) → (S, B, H)."""
        return self.proj(self.core(self.qkv(x)))


class Layer(nn.Module):
    """Attention and a feed-forward net, each behind a norm and added to the stream."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(shape.hidden), nn.LayerNorm(shape.hidden)
        self.attention = Attention(shape)
        self.up = ColumnParallel(shape.hidden, 4 * shape.hidden, shape)
        self.down = RowParallel(4 * shape.hidden, shape.hidden, shape)
        self.dropout = shape.dropout

    def forward(self, x: Tensor) -> Tensor:
        """(S, B, H) → (S, B, H)."""
        x = x + F.dropout(self.attention(self.norm1(x)), self.dropout)
        up = F.gelu(self.up(self.norm2(x)), approximate="tanh")
        return x + F.dropout(self.down(up), self.dropout)


class Embedding(nn.Module):
    """Tokens and positions; each rank has a part of the vocabulary."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.own = shape.vocab_size // shape.tensor_parallel
        self.tokens = nn.Parameter(torch.empty(self.own, shape.hidden))
        self.positions = nn.Parameter(torch.empty(shape.tokens, shape.hidden))
        self.parts, self.dropout = shape.sequence_parallel, shape.dropout

    def forward(self, ids: Tensor) -> Tensor:
        """(S, B) → (S, B, H)."""
        is_mine = (ids < self.own).unsqueeze(-1)  # as the first rank has it
        mine = F.embedding(ids.clamp(max=self.own - 1), self.tokens) * is_mine
        x = _SumParts.apply(mine, self.parts) + self.positions.unsqueeze(1)
        return F.dropout(x, self.dropout)


class Head(nn.Module):
    """The last norm, a rank's part of the logits, and the loss over all of them."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(shape.hidden)
        own = shape.vocab_size // shape.tensor_parallel
        self.weight = nn.Parameter(torch.empty(own, shape.hidden))
        self.parts = shape.sequence_parallel

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        """(S, B, H), (S, B) → the mean loss."""
        logits = _ColumnLinear.apply(self.norm(x), self.weight, self.parts).float()
        largest = arrived(_c10d.all_reduce(logits.detach().amax(-1), "max", _group()))
        logits = logits - largest.unsqueeze(-1)
        total = _SumParts.apply(logits.exp().sum(-1), False)
        own = self.weight.shape[0]
        mine = logits.gather(-1, targets.clamp(max=own - 1).unsqueeze(-1)).squeeze(-1)
        mine = _SumParts.apply(mine * (targets < own), False)
        return (total.log() - mine).mean()


class GPT(nn.Module):
    """All of it; a stage of a pipeline has a part."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embedding = Embedding(shape)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_layers))
        self.head = Head(shape)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        """(S, B), (S, B) → the mean loss."""
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x, targets)


class Flat(NamedTuple):
    """What an optimizer of 16-bit parameters holds of them all, each in one piece."""

    master: Tensor
    grad: Tensor
    mean: Tensor
    square: Tensor


def _unscaled(at: Flat) -> tuple[Tensor, Tensor]:
    grad = at.grad * 0.5
    return grad, grad.isfinite().all()


def _norm(at: Flat) -> Tensor:
    return at.grad.square().sum()


def _clipped(at: Flat) -> Tensor:
    return at.grad * 0.5


def _adam(at: Flat) -> tuple[Tensor, Tensor, Tensor]:
    grad, master = at.grad.clone(), at.master.clone()  # into registers: each is read once
    mean = 0.9 * at.mean + 0.1 * grad
    square = 0.95 * at.square + 0.05 * grad.square()
    return master - 1e-4 * (mean / (square.sqrt() + 1e-8) + 0.1 * master), mean, square


def _copied(at: Flat) -> Tensor:
    return at.master.half()


def _cleared(at: Flat) -> Tensor:
    return torch.zeros(at.grad.shape)


UPDATE = (_unscaled, _norm, _clipped, _adam, _copied, _cleared)
"""What Megatron-LM's Float16OptimizerWithFloat16Params runs, one kernel over all parameters behind
the other, with a loss scale and clipping. The numbers are not those of a training: nothing runs."""
