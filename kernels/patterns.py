"""What people write, and the kernel that it is.

Each row has the code as it stands in models, the kernel call that means the same, and inputs to
trace it with. `fxzero.passes.lower_kernels` traces both, forward and backward, and looks for the
first in step graphs. Several rows of one kernel are several ways to write it; factors may stand
in any order, and casts and shapes are traced as they are found.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fxzero.kernels.activations import geglu, gelu, swiglu
from fxzero.kernels.attention import flash_attention
from fxzero.kernels.chunked_cross_entropy import linear_cross_entropy
from fxzero.kernels.cross_entropy import softmax_cross_entropy
from fxzero.kernels.launch import check
from fxzero.kernels.norms import layer_norm, rms_norm
from fxzero.kernels.rotary_embedding import rotary

# Constants that no model has: where they stand in a trace, the graph's own number is read.
EPS = 1.2345e-5
IGNORED = -123456789
KEPT = 0.8765433
SCALE = 0.7654322


@dataclass(frozen=True)
class Idiom:
    """One way to write what a kernel does."""

    kernel: str
    write: Callable[..., Tensor]
    """As in a model. Its tensors are positional, its numbers keywords."""
    call: Callable[..., Tensor]
    """The same with the kernel."""
    shapes: tuple[tuple[int, ...], ...]
    """Shapes to trace with, of its tensors; negative sizes make int64 ones."""
    numbers: tuple[tuple[str, float], ...] = ()
    """Keywords and the constants that stand for them."""


def _rms_norm_after(x: Tensor, weight: Tensor, eps: float = EPS) -> Tensor:
    """T5, Llama: normalized in float32, weighted in the input's dtype."""
    wide = x.to(torch.float32)
    variance = wide.pow(2).mean(-1, keepdim=True)
    return weight * (wide * torch.rsqrt(variance + eps)).to(x.dtype)


def _rms_norm_plain(x: Tensor, weight: Tensor, eps: float = EPS) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def _rms_norm_by_root(x: Tensor, weight: Tensor, eps: float = EPS) -> Tensor:
    return x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def _rms_norm_of_products(x: Tensor, weight: Tensor, eps: float = EPS) -> Tensor:
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def _torch_rms_norm(x: Tensor, weight: Tensor, eps: float = EPS) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], weight, eps)


def _rms_norm(x: Tensor, weight: Tensor, eps: float = EPS) -> Tensor:
    return rms_norm(x, weight, eps)


def _torch_layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float = EPS) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


def _layer_norm_no_bias(x: Tensor, weight: Tensor, eps: float = EPS) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], weight, None, eps)


def _layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float = EPS) -> Tensor:
    return layer_norm(x, weight, bias, eps)


def _our_layer_norm_no_bias(x: Tensor, weight: Tensor, eps: float = EPS) -> Tensor:
    return layer_norm(x, weight, None, eps)


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _gelu_written_out(x: Tensor) -> Tensor:
    """GPT-2's ``gelu_new``."""
    inner = math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))
    return 0.5 * x * (1.0 + torch.tanh(inner))


def _our_gelu_tanh(x: Tensor) -> Tensor:
    return gelu(x, approximate="tanh")


def _rotate_half(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


def _rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Llama, over ``[batch, heads, seq, head_dim]`` with ``[batch, 1, seq, head_dim]`` tables."""
    return x * cos + _rotate_half(x) * sin


def _our_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Refuses tables that broadcast in another way: of heads, or of another order of dims."""
    batch, _, length, width = x.shape
    for table in (cos, sin):
        check(
            tuple(table.shape) in ((batch, 1, length, width), (1, 1, length, width)),
            "rotary", "cos and sin", "[batch or 1, 1, seq, head_dim]", list(table.shape),
        )  # fmt: skip
    return rotary(x, cos.squeeze(1), sin.squeeze(1))


def _cross_entropy(
    logits: Tensor, target: Tensor, ignore_index: float = IGNORED, kept: float = 1.0
) -> Tensor:
    return F.cross_entropy(
        logits, target, ignore_index=int(ignore_index), label_smoothing=_smoothing(kept)
    )


def _smoothing(kept: float) -> float:
    """Graphs hold one minus the label smoothing."""
    return 1.0 - kept


def _wide_cross_entropy(logits: Tensor, target: Tensor, ignore_index: float = IGNORED) -> Tensor:
    return F.cross_entropy(logits.float(), target, ignore_index=int(ignore_index))


def _our_cross_entropy(
    logits: Tensor, target: Tensor, ignore_index: float = IGNORED, kept: float = 1.0
) -> Tensor:
    loss = softmax_cross_entropy(
        logits, target, ignore_index=int(ignore_index), label_smoothing=_smoothing(kept)
    )
    return loss.to(logits.dtype)


def _our_wide_cross_entropy(
    logits: Tensor, target: Tensor, ignore_index: float = IGNORED
) -> Tensor:
    return softmax_cross_entropy(logits, target, ignore_index=int(ignore_index))


def _head_loss(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    ignore_index: float = IGNORED,
    kept: float = 1.0,
) -> Tensor:
    """nanoGPT: logits of rows."""
    logits = F.linear(hidden, weight)
    return _cross_entropy(logits.flatten(0, -2), target, ignore_index, kept)


def _head_loss_bias(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor,
    target: Tensor,
    ignore_index: float = IGNORED,
    kept: float = 1.0,
) -> Tensor:
    logits = F.linear(hidden, weight, bias)
    return _cross_entropy(logits.flatten(0, -2), target, ignore_index, kept)


def _wide_head_loss(
    hidden: Tensor, weight: Tensor, target: Tensor, ignore_index: float = IGNORED
) -> Tensor:
    """transformers: the loss in float32 over logits in 16 bits."""
    logits = F.linear(hidden, weight).float()
    return F.cross_entropy(logits.flatten(0, -2), target, ignore_index=int(ignore_index))


def _late_wide_head_loss(
    hidden: Tensor, weight: Tensor, target: Tensor, ignore_index: float = IGNORED
) -> Tensor:
    """nanoGPT under autocast: float32 after the rows are flat."""
    logits = F.linear(hidden, weight).flatten(0, -2).float()
    return F.cross_entropy(logits, target, ignore_index=int(ignore_index))


def _shifted_head_loss(
    hidden: Tensor, weight: Tensor, target: Tensor, ignore_index: float = IGNORED
) -> Tensor:
    """Every position but the last says the next token."""
    logits = F.linear(hidden, weight)[..., :-1, :]
    rows = logits.reshape(-1, logits.shape[-1])
    return F.cross_entropy(rows, target, ignore_index=int(ignore_index))


def _summed_head_loss(
    hidden: Tensor, weight: Tensor, target: Tensor, ignore_index: float = IGNORED
) -> Tensor:
    """To be divided by a number of tokens that the caller knows."""
    logits = F.linear(hidden, weight).flatten(0, -2)
    return F.cross_entropy(logits, target, ignore_index=int(ignore_index), reduction="sum")


def _summed_wide_head_loss(
    hidden: Tensor, weight: Tensor, target: Tensor, ignore_index: float = IGNORED
) -> Tensor:
    """transformers with `num_items_in_batch`."""
    logits = F.linear(hidden, weight).float().flatten(0, -2)
    return F.cross_entropy(logits, target, ignore_index=int(ignore_index), reduction="sum")


def _our_shifted_head_loss(
    hidden: Tensor, weight: Tensor, target: Tensor, ignore_index: float = IGNORED
) -> Tensor:
    rows = hidden[..., :-1, :].flatten(0, -2)
    loss = linear_cross_entropy(rows, weight, target, ignore_index=int(ignore_index))
    return loss.to(hidden.dtype)


def _our_summed_head_loss(
    hidden: Tensor, weight: Tensor, target: Tensor, ignore_index: float = IGNORED
) -> Tensor:
    return _our_summed_wide_head_loss(hidden, weight, target, ignore_index).to(hidden.dtype)


def _our_summed_wide_head_loss(
    hidden: Tensor, weight: Tensor, target: Tensor, ignore_index: float = IGNORED
) -> Tensor:
    rows = hidden.flatten(0, -2)
    return linear_cross_entropy(
        rows, weight, target, ignore_index=int(ignore_index), reduction="sum"
    )


def _our_head_loss(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    ignore_index: float = IGNORED,
    kept: float = 1.0,
) -> Tensor:
    loss = linear_cross_entropy(
        hidden.flatten(0, -2), weight, target,
        ignore_index=int(ignore_index), label_smoothing=_smoothing(kept),
    )  # fmt: skip
    return loss.to(hidden.dtype)


def _our_head_loss_bias(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor,
    target: Tensor,
    ignore_index: float = IGNORED,
    kept: float = 1.0,
) -> Tensor:
    loss = linear_cross_entropy(
        hidden.flatten(0, -2), weight, target, bias=bias,
        ignore_index=int(ignore_index), label_smoothing=_smoothing(kept),
    )  # fmt: skip
    return loss.to(hidden.dtype)


def _our_wide_head_loss(
    hidden: Tensor, weight: Tensor, target: Tensor, ignore_index: float = IGNORED
) -> Tensor:
    rows = hidden.flatten(0, -2)
    return linear_cross_entropy(rows, weight, target, ignore_index=int(ignore_index))


def _attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value)


def _causal_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, is_causal=True)


def _scaled_attention(query: Tensor, key: Tensor, value: Tensor, scale: float = SCALE) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, scale=scale)


def _scaled_causal(query: Tensor, key: Tensor, value: Tensor, scale: float = SCALE) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale)


def _our_causal(query: Tensor, key: Tensor, value: Tensor, scale: float | None = None) -> Tensor:
    return flash_attention(query, key, value, causal=True, scale=scale)


def _our_attention(query: Tensor, key: Tensor, value: Tensor, scale: float | None = None) -> Tensor:
    return flash_attention(query, key, value, scale=scale)


_X = (2, 3, 8)
_HEADS = (2, 3, 4, 8)
_eps = (("eps", EPS),)
_scale = (("scale", SCALE),)
_ignored = (("ignore_index", float(IGNORED)),)
_smoothed = (*_ignored, ("kept", KEPT))
_HEAD = (_X, (5, 8), (-6,))
_HEAD_OF_ROWS = ((6, 8), (5, 8), (-6,))

_HEADS_AND_LOSSES = (
    (_head_loss, _our_head_loss, _ignored),
    (_head_loss, _our_head_loss, _smoothed),
    (_wide_head_loss, _our_wide_head_loss, _ignored),
    (_late_wide_head_loss, _our_wide_head_loss, _ignored),
    (_summed_head_loss, _our_summed_head_loss, _ignored),
    (_summed_wide_head_loss, _our_summed_wide_head_loss, _ignored),
    (_head_loss_bias, _our_head_loss_bias, _ignored),
    (_head_loss_bias, _our_head_loss_bias, _smoothed),
)


def _heads() -> Iterator[Idiom]:
    """Heads with their losses, over sequences and over rows."""
    kernel = "linear_cross_entropy"
    for hidden, weight, target in (_HEAD, _HEAD_OF_ROWS):
        for write, call, numbers in _HEADS_AND_LOSSES:
            bias = ((weight[0],),) if write is _head_loss_bias else ()
            yield Idiom(kernel, write, call, (hidden, weight, *bias, target), numbers)
    shifted = (_X, (5, 8), (-4,))
    yield Idiom(kernel, _shifted_head_loss, _our_shifted_head_loss, shifted, _ignored)


# The widest first: a head with its loss before the loss alone, a gated MLP before its gelu.
IDIOMS: tuple[Idiom, ...] = (
    *_heads(),
    Idiom("softmax_cross_entropy", _cross_entropy, _our_cross_entropy, ((6, 5), (-6,)), _ignored),
    Idiom("softmax_cross_entropy", _cross_entropy, _our_cross_entropy, ((6, 5), (-6,)), _smoothed),
    Idiom("softmax_cross_entropy", _wide_cross_entropy, _our_wide_cross_entropy,
          ((6, 5), (-6,)), _ignored),
    Idiom("rms_norm", _rms_norm_after, _rms_norm, (_X, (8,)), _eps),
    Idiom("rms_norm", _rms_norm_plain, _rms_norm, (_X, (8,)), _eps),
    Idiom("rms_norm", _rms_norm_by_root, _rms_norm, (_X, (8,)), _eps),
    Idiom("rms_norm", _rms_norm_of_products, _rms_norm, (_X, (8,)), _eps),
    Idiom("rms_norm", _torch_rms_norm, _rms_norm, (_X, (8,)), _eps),
    Idiom("layer_norm", _torch_layer_norm, _layer_norm, (_X, (8,), (8,)), _eps),
    Idiom("layer_norm", _layer_norm_no_bias, _our_layer_norm_no_bias, (_X, (8,)), _eps),
    Idiom("swiglu", lambda gate, up: F.silu(gate) * up, swiglu, (_X, _X)),
    Idiom("geglu", lambda gate, up: F.gelu(gate) * up, geglu, (_X, _X)),
    Idiom("geglu", lambda gate, up: _gelu_tanh(gate) * up,
          lambda gate, up: geglu(gate, up, approximate="tanh"), (_X, _X)),
    Idiom("geglu", lambda gate, up: _gelu_written_out(gate) * up,
          lambda gate, up: geglu(gate, up, approximate="tanh"), (_X, _X)),
    Idiom("gelu", F.gelu, gelu, (_X,)),
    Idiom("gelu", _gelu_tanh, _our_gelu_tanh, (_X,)),
    Idiom("gelu", _gelu_written_out, _our_gelu_tanh, (_X,)),
    Idiom("rotary", _rotary, _our_rotary, (_HEADS, (2, 1, 4, 8), (2, 1, 4, 8))),
    Idiom("flash_attention", _attention, _our_attention, (_HEADS,) * 3),
    Idiom("flash_attention", _causal_attention, _our_causal, (_HEADS,) * 3),
    Idiom("flash_attention", _scaled_attention, _our_attention, (_HEADS,) * 3, _scale),
    Idiom("flash_attention", _scaled_causal, _our_causal, (_HEADS,) * 3, _scale),
)  # fmt: skip

KERNELS: tuple[str, ...] = tuple(dict.fromkeys(idiom.kernel for idiom in IDIOMS))
"""The kernels that can be put into a graph."""
