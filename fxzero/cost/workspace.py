"""What an operator allocates while it runs.

Memory is simulated from values of nodes; an operator that works through its input in chunks
holds a chunk too. Whoever defines such an operator registers a formula, as
`torch.utils.flop_counter` has it for FLOPs.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fxzero._compat import OpOverload, hint
from fxzero.cost.analytic import hinted_value
from fxzero.cost.library_workspace import measured_bytes
from fxzero.graph.operators import tensor_bytes
from fxzero.runtime.random import STATE_BYTES

_formulas: dict[Any, Callable[..., int]] = {}


def register_workspace_formula(
    packet: Any,
) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Register ``formula(*args, **kwargs) -> bytes`` for an operator; it gets fake tensors."""

    def register(formula: Callable[..., int]) -> Callable[..., int]:
        _formulas[packet] = formula
        return formula

    return register


def workspace_bytes(node: fx.Node) -> int:
    """Bytes that a node's operator holds while it runs, its arguments and results aside: as they
    were measured, or else by a formula."""
    if (found := measured_bytes(node)) is not None:
        return found
    target: Any = node.target
    arguments = node.args
    state_bytes = 0
    if getattr(target, "draws_again", False):  # the same operator, behind its generator's state
        # What the generator goes on with is kept meanwhile, in the host's memory.
        state_bytes = STATE_BYTES["cpu"] if target.device == "cpu" else 0
        target, arguments = target.target, arguments[1:]
    formula = _formulas.get(getattr(target, "overloadpacket", None)) if _formulas else None
    if formula is None:
        return promoted_bytes(node) + number_bytes(node) + state_bytes
    args, kwargs = fx.map_arg((arguments, node.kwargs), lambda n: hinted_value(n.meta["val"]))
    return formula(*args, **kwargs) + state_bytes


def promoted_bytes(node: fx.Node) -> int:
    """What a pointwise operator on CPU copies because its arguments are of several dtypes: each
    that is not of the one in which it computes."""
    if not isinstance(node.target, OpOverload) or torch.Tag.pointwise not in node.target.tags:
        return 0
    skips = node.target.overloadpacket.__name__ in _WITH_MASK
    values = [n.meta.get("val") for n in node.all_input_nodes]
    tensors = [v for v in values if isinstance(v, Tensor) and v.dim()]
    if skips:
        tensors = [tensor for tensor in tensors if tensor.dtype is not torch.bool]
    if len(tensors) < 2 or tensors[0].device.type != "cpu":
        return 0
    common = functools.reduce(torch.promote_types, (tensor.dtype for tensor in tensors))
    return sum(hint(t.numel()) * common.itemsize for t in tensors if t.dtype != common)


def number_bytes(node: fx.Node) -> int:
    """What numbers among a pointwise operator's arguments take on CPU, at most: most become tensors
    of eight bytes, and of the dtype in which the operator computes."""
    if not isinstance(node.target, OpOverload) or torch.Tag.pointwise not in node.target.tags:
        return 0
    tensors = [v for n in node.all_input_nodes if isinstance(v := n.meta.get("val"), Tensor)]
    if not tensors or tensors[0].device.type != "cpu":
        return 0
    numbers = sum(isinstance(value, (int, float)) for value in node.args)
    return numbers * (8 + max(tensor.element_size() for tensor in tensors))


_WITH_MASK = ("where", "masked_fill")
"""Operators whose mask chooses, and is not computed with."""

_aten = torch.ops.aten

BLOCK = 16
"""Channels that stand together in oneDNN's layouts, with AVX-512; fewer elsewhere."""


@register_workspace_formula(_aten.convolution)
def convolution_workspace(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> int:
    """Copies in oneDNN's layouts, by what torch 2.11 to 2.13 allocate on CPU: of what is read, and
    of what is written where that is padded; or of what is written."""
    if x.device.type != "cpu" or x.dim() < 3:
        return 0
    channels = weight.shape[1] * groups if transposed else weight.shape[0]
    each = x.shape[0] * x.element_size()
    for i, (size, kernel) in enumerate(zip(x.shape[2:], weight.shape[2:], strict=True)):
        step, pad, wide = (v[i % len(v)] for v in (stride, padding, dilation))
        if transposed:
            more = output_padding[i % len(output_padding)]
            each *= (size - 1) * step - 2 * pad + wide * (kernel - 1) + more + 1
        else:
            each *= (size + 2 * pad - wide * (kernel - 1) - 1) // step + 1
    padding_bytes = each * (_padded(channels) - channels)
    own = tensor_bytes(weight) // (weight.shape[0] * weight.shape[1])
    blocked = own * _padded(weight.shape[0]) * _padded(weight.shape[1])
    return int(max(_blocked(x) + blocked + padding_bytes, each * _padded(channels)))


@register_workspace_formula(_aten.convolution_backward)
def convolution_backward_workspace(gradient: Tensor, x: Tensor, *_: Any, **__: Any) -> int:
    """The same for both gradients: of what came in, and of what comes back."""
    if x.device.type != "cpu" or x.dim() < 3:
        return 0
    again = 0 if gradient.is_contiguous() else tensor_bytes(gradient)
    few = x.shape[1] <= BLOCK // 2 and gradient.shape[1] <= BLOCK // 2
    each = tensor_bytes(gradient) // gradient.shape[1]
    came = _blocked(gradient) if few else each * _padded(gradient.shape[1])
    padding = tensor_bytes(x) // x.shape[1] * (_padded(x.shape[1]) - x.shape[1])
    return came + max(_blocked(x), padding) + again


@register_workspace_formula(_aten.native_batch_norm_backward)
def batch_norm_backward_workspace(gradient: Tensor, x: Tensor, *_: Any, **__: Any) -> int:
    """A buffer as large as the input, on CPU."""
    return tensor_bytes(x) if x.device.type == "cpu" else 0


@register_workspace_formula(_aten.native_dropout_backward)
def dropout_backward_workspace(gradient: Tensor, *_: Any, **__: Any) -> int:
    """The mask in the gradient's dtype, on CPU, and the scale as a tensor, in two dtypes."""
    return one_more(gradient) + 8 + gradient.element_size() if gradient.device.type == "cpu" else 0


@register_workspace_formula(_aten.native_dropout)
@register_workspace_formula(_aten.logsumexp)
def one_more(x: Tensor, *_: Any, **__: Any) -> int:
    """Something as large as the first argument, on CPU."""
    return tensor_bytes(x) if x.device.type == "cpu" else 0


_MEAN, _SUM = 1, 2


@register_workspace_formula(_aten.mse_loss)
@register_workspace_formula(_aten.smooth_l1_loss)
@register_workspace_formula(_aten.huber_loss)
def elementwise_loss_workspace(x: Tensor, target: Tensor, how: int = _MEAN, *_: Any) -> int:
    """Each element's loss before they are reduced to one, on CPU; a mean divides by a number."""
    if x.device.type != "cpu" or how not in (_MEAN, _SUM):
        return 0
    return tensor_bytes(x) + (8 + x.element_size() if how == _MEAN else 0)


@register_workspace_formula(_aten._fft_r2c)
@register_workspace_formula(_aten._fft_c2c)
def fft_workspace(x: Tensor, dim: Sequence[int], *_: Any, **__: Any) -> int:
    """A copy whose last dim is one that is transformed, where the input's is not; on CPU."""
    if x.device.type != "cpu" or x.dim() - 1 in [d % x.dim() for d in dim]:
        return 0
    return tensor_bytes(x)


@register_workspace_formula(_aten._fft_c2r)
def fft_to_real_workspace(x: Tensor, dim: Sequence[int], *_: Any, **__: Any) -> int:
    """Of several dims all but the last are transformed before, in copies; on CPU."""
    if x.device.type != "cpu":
        return 0
    return 2 * tensor_bytes(x) if len(dim) > 1 else fft_workspace(x, dim)


@register_workspace_formula(_aten.upsample_nearest2d)
@register_workspace_formula(_aten.upsample_bilinear2d)
def upsample_workspace(
    x: Tensor, size: Sequence[int] | None, *rest: Any, scale_factors: Any = None, **__: Any
) -> int:
    """Copies of input and result with channels last, on CPU."""
    if x.device.type != "cpu" or not x.is_contiguous():
        return 0
    if size is None:
        factors = scale_factors or rest[-1]
        size = [int(n * f) for n, f in zip(x.shape[2:], factors, strict=True)]
    return tensor_bytes(x) + tensor_bytes(x) // (x.shape[2] * x.shape[3]) * size[0] * size[1]


@register_workspace_formula(_aten.linalg_matrix_exp)
def matrix_exp_workspace(x: Tensor, *_: Any, **__: Any) -> int:
    """Powers and polynomials, on CPU: twelve times the input where a norm is large, ten else."""
    return 12 * tensor_bytes(x) if x.device.type == "cpu" else 0


@register_workspace_formula(_aten._safe_softmax)
def safe_softmax_workspace(x: Tensor, *_: Any, **__: Any) -> int:
    """Which elements are -inf, a byte for each."""
    return tensor_bytes(x) // x.element_size() if x.device.type == "cpu" else 0


@register_workspace_formula(_aten.sum)
def sum_workspace(x: Tensor, dim: Sequence[int] | None = None, *_: Any, **__: Any) -> int:
    """On CUDA, the partial sums over the rows of a matrix that many blocks share: torch's reduction
    keeps, for each block and output, as many as a block has threads side by side, times the outputs
    of a thread (``aten/src/ATen/native/cuda/Reduce.cuh``, torch 2.11 to 2.13)."""
    if x.device.type != "cuda" or not dim or x.dim() < 2 or x.dtype.itemsize > 4:
        return 0
    if sorted(d % x.dim() for d in dim) != list(range(len(dim))) or not x.is_contiguous():
        return 0  # sums along the dimension that is dense in memory take next to nothing
    outputs = math.prod(int(size) for size in x.shape[len(dim) :])
    rows = math.prod(int(size) for size in x.shape[: len(dim)])
    each = next(n for n in (4, 2, 1) if outputs % n == 0)
    most = 512 // each
    wide = min(32, _power_of_two_below(outputs // each), most)
    high = min(_power_of_two_below(rows), most // wide)
    wide = min(_power_of_two_below(outputs // each), most // high)
    if rows < min(16 * high, 256):
        return 0
    by_thread = -(-rows // high)
    grid = -(-outputs // (each * wide))
    slots = _SLOTS // (wide * high)
    if by_thread < 256 or grid > slots:
        return 0
    blocks = max(min(-(-slots // grid), -(-by_thread // 16)), -(-by_thread // 256))
    return 4 * outputs * blocks * wide * each if blocks > 1 else 0


_SLOTS = 132 * 2048
"""Threads that an H100 runs at once; other devices differ by what rarely bounds the number."""


def _power_of_two_below(number: int) -> int:
    return 1 << max(0, number.bit_length() - 1)


@register_workspace_formula(_aten._scaled_dot_product_flash_attention_for_cpu)
def attention_workspace(query: Tensor, key: Tensor, *_: Any, **__: Any) -> int:
    """A block of scores and of results for each thread; in low precision the scores once more."""
    rows, columns, width = _attention_block(query, key)
    floats = rows * columns + 2 * rows + rows * width
    again = 0 if query.dtype is torch.float32 else rows * columns * query.element_size()
    return torch.get_num_threads() * (4 * floats + again)


@register_workspace_formula(_aten._scaled_dot_product_flash_attention_for_cpu_backward)
def attention_backward_workspace(
    gradient: Tensor, query: Tensor, key: Tensor, *_: Any, **__: Any
) -> int:
    """Two blocks of scores for each thread, and a copy as large as the query."""
    rows, columns, width = _attention_block(query, key)
    each = 2 * rows * columns * 4
    if query.dtype is not torch.float32:
        each += (2 * rows + 3 * width) * columns * query.element_size()
    return torch.get_num_threads() * each + tensor_bytes(query) + 4 * rows


def _attention_block(query: Tensor, key: Tensor) -> tuple[int, int, int]:
    """Rows and columns of the scores that a thread works on, and the width of a head: torch's."""
    length = int(query.shape[2])
    rows = 256 if length >= 768 else 64 if length >= 192 else 32
    return min(rows, length), min(512, int(key.shape[2])), int(query.shape[3])


def _padded(channels: int) -> int:
    return -(-channels // BLOCK) * BLOCK


def _blocked(x: Tensor) -> int:
    """A copy in blocks of channels: of very few there is none, of half a block one of halves."""
    channels = x.shape[1]
    if channels < BLOCK // 4:
        return 0
    return (
        tensor_bytes(x)
        // channels
        * max(BLOCK // 2, _padded(channels) if channels > BLOCK // 2 else 0)
    )
