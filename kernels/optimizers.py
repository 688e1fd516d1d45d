"""AdamW over a bucket of shards in one launch, with everything that a training step adds to it.

    g  = gradient · clip_coefficient / grad_scale
    p ← p · (1 − lr · weight_decay)                     (decoupled; else g ← g + weight_decay · p)
    m ← m + (1 − β1) · (g − m)
    v ← β2 · v + (1 − β2) · g²
    p ← p − lr / (1 − β1ᵗ) · m / (sqrt(v) / sqrt(1 − β2ᵗ) + eps)
    copy = p, rounded to 16 bits

(Loshchilov and Hutter 2019, "Decoupled Weight Decay Regularization", algorithm 2, in the order
of operations of `torch.optim.AdamW`; with weight decay in the gradient, Kingma and Ba 2015,
"Adam", algorithm 1.)

Rounding to bfloat16 may be stochastic: up with the probability of the distance from the lower
neighbour, so that the expectation is the value itself and updates smaller than half a step are
not lost (Gupta et al. 2015, "Deep Learning with Limited Numerical Precision", section 3.2). The
random bits are Philox4x32-10 (Salmon et al. 2011) of the seed and the element's place in the
bucket.

One read of each input and one write of each output, float32 in between; state that is stored in
bfloat16 is rounded after it has been used. Numbers that change from step to step (the step, the
learning rate, the loss scale, clipping, whether to skip) may be tensors, read by the kernel: no
step waits for the device.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fxzero.kernels.launch import (
    check,
    check_bool,
    check_float,
    check_number,
    check_tensor,
    is_number,
    is_strided,
    launch,
    runs_on_triton,
)
from fxzero.kernels.multi_tensor import (
    BLOCK,
    POINTEES,
    addresses,
    aligned,
    check_apart,
    check_bucket,
    check_written,
    lay_out,
    load_block,
    number,
    numel,
    store_block,
    table,
)

HALVES = (torch.bfloat16, torch.float16)

Number = float | Tensor
"""A number on the host, or a tensor of one element that the kernel reads."""


@triton.jit
def _one_minus_exp(y):
    # The power series where 1 - exp(y) would cancel: y^10 / 10! < 2^-28 there.
    series = 1.0
    for i in tl.static_range(10, 1, -1):
        series = 1.0 + y * (1.0 / i) * series
    return tl.where(y > -0.5, -y * series, 1.0 - tl.exp(y))


@triton.jit
def _round_stochastic(x, seed, place):
    # A bfloat16 is the upper half of a float32: a random lower half carries into it with the
    # probability that the lower half asks for.
    random = tl.randint(seed, place).to(tl.uint32) & 0xFFFF
    bits = x.to(tl.uint32, bitcast=True)
    rounded = tl.where(x == x, (bits + random) >> 16, 0x7FC0)
    return rounded.to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _update(
    p_ptr, g_ptr, m_ptr, v_ptr, copy_ptr, at, size, seed, start,
    grad_factor, lr, step_size, bias_correction2_sqrt,
    beta2, one_minus_beta1, one_minus_beta2, eps, weight_decay,
    DECOUPLED: tl.constexpr, HAS_COPY: tl.constexpr, RANDOM_PARAM: tl.constexpr,
    RANDOM_COPY: tl.constexpr, MASKED: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    inside = at < size
    p = load_block(p_ptr, at, inside, MASKED, ALIGNED)
    g = load_block(g_ptr, at, inside, MASKED, ALIGNED) * grad_factor
    m = load_block(m_ptr, at, inside, MASKED, ALIGNED)
    v = load_block(v_ptr, at, inside, MASKED, ALIGNED)
    if DECOUPLED:
        p = p * (1.0 - lr * weight_decay)
    else:
        g = g + weight_decay * p
    m = m + one_minus_beta1 * (g - m)
    v = beta2 * v + one_minus_beta2 * (g * g)
    denominator = tl.div_rn(tl.sqrt_rn(v), bias_correction2_sqrt) + eps
    p = p - step_size * tl.div_rn(m, denominator)
    store_block(m_ptr, at, inside, m, MASKED, ALIGNED)
    store_block(v_ptr, at, inside, v, MASKED, ALIGNED)
    if RANDOM_PARAM or RANDOM_COPY:
        rounded = _round_stochastic(p, seed, start + at)
    if RANDOM_PARAM:
        store_block(p_ptr, at, inside, rounded, MASKED, ALIGNED)
    else:
        store_block(p_ptr, at, inside, p, MASKED, ALIGNED)
    if RANDOM_COPY:
        store_block(copy_ptr, at, inside, rounded, MASKED, ALIGNED)
    elif HAS_COPY:
        store_block(copy_ptr, at, inside, p, MASKED, ALIGNED)


@triton.jit
def _adamw(
    pointers_ptr, work_ptr, sizes_ptr, starts_ptr, tensors,
    step, lr, grad_factor, grad_scale_ptr, clip_ptr, skip_ptr, seed_ptr,
    log_beta1, log_beta2, beta2, one_minus_beta1, one_minus_beta2, eps, weight_decay,
    PARAM: tl.constexpr, GRAD: tl.constexpr, AVERAGE: tl.constexpr, SQUARE: tl.constexpr,
    COPY: tl.constexpr, STEP_ON_DEVICE: tl.constexpr, LR_ON_DEVICE: tl.constexpr,
    HAS_SCALE: tl.constexpr, HAS_CLIP: tl.constexpr, HAS_SKIP: tl.constexpr,
    HAS_COPY: tl.constexpr, RANDOM_PARAM: tl.constexpr, RANDOM_COPY: tl.constexpr,
    DECOUPLED: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    tensor = tl.load(work_ptr + 2 * program).to(tl.int64)
    block = tl.load(work_ptr + 2 * program + 1).to(tl.int64)
    size = tl.load(sizes_ptr + tensor)
    if HAS_SKIP:
        # Nothing is left to do in a tensor of no elements.
        size = tl.where(tl.load(skip_ptr).to(tl.float32) != 0.0, 0, size)
    p_ptr = tl.load(pointers_ptr + tensor).to(tl.pointer_type(PARAM))
    g_ptr = tl.load(pointers_ptr + tensors + tensor).to(tl.pointer_type(GRAD))
    m_ptr = tl.load(pointers_ptr + 2 * tensors + tensor).to(tl.pointer_type(AVERAGE))
    v_ptr = tl.load(pointers_ptr + 3 * tensors + tensor).to(tl.pointer_type(SQUARE))
    copy_ptr = p_ptr
    if HAS_COPY:
        copy_ptr = tl.load(pointers_ptr + 4 * tensors + tensor).to(tl.pointer_type(COPY))
    seed = 0
    start = size
    if RANDOM_PARAM or RANDOM_COPY:
        seed = tl.load(seed_ptr)
        start = tl.load(starts_ptr + tensor)
    lr = number(lr, LR_ON_DEVICE)
    step = number(step, STEP_ON_DEVICE)
    factor = number(grad_factor, False)
    if HAS_SCALE:
        factor = tl.div_rn(factor, number(grad_scale_ptr, True))
    if HAS_CLIP:
        factor = factor * number(clip_ptr, True)
    step_size = tl.div_rn(lr, _one_minus_exp(step * log_beta1))
    bias_correction2_sqrt = tl.sqrt_rn(_one_minus_exp(step * log_beta2))
    at = block * BLOCK + tl.arange(0, BLOCK)
    if (block + 1) * BLOCK <= size:
        _update(
            p_ptr, g_ptr, m_ptr, v_ptr, copy_ptr, at, size, seed, start,
            factor, lr, step_size, bias_correction2_sqrt,
            beta2, one_minus_beta1, one_minus_beta2, eps, weight_decay,
            DECOUPLED, HAS_COPY, RANDOM_PARAM, RANDOM_COPY, False, ALIGNED,
        )  # fmt: skip
    elif block * BLOCK < size:
        _update(
            p_ptr, g_ptr, m_ptr, v_ptr, copy_ptr, at, size, seed, start,
            factor, lr, step_size, bias_correction2_sqrt,
            beta2, one_minus_beta1, one_minus_beta2, eps, weight_decay,
            DECOUPLED, HAS_COPY, RANDOM_PARAM, RANDOM_COPY, True, ALIGNED,
        )  # fmt: skip


def adamw_reference(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    step: Number,
    *,
    lr: Number,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
    grad_factor: Number = 1.0,
    decoupled: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """One tensor's new value, exp_avg and exp_avg_sq, in plain torch and its arguments' dtype."""
    beta1, beta2 = betas
    grad = grad * grad_factor
    if decoupled:
        param = param * (1 - lr * weight_decay)
    else:
        grad = grad + weight_decay * param
    exp_avg = exp_avg + (1 - beta1) * (grad - exp_avg)
    exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * grad.square()
    step = torch.as_tensor(step, dtype=torch.float64, device=param.device)
    correction1, correction2 = 1 - beta1**step, (1 - beta2**step).sqrt()
    denominator = exp_avg_sq.sqrt() / correction2 + eps
    return param - lr / correction1 * (exp_avg / denominator), exp_avg, exp_avg_sq


def philox_reference(seed: Tensor, place: Tensor) -> Tensor:
    """The first of the four words that Philox4x32-10 makes of a seed and places, as int64.

    Salmon et al. 2011, "Parallel Random Numbers: As Easy as 1, 2, 3", section 4: the counter is
    the place, the key the seed.
    """
    word = 0xFFFFFFFF
    key = [seed & word, (seed >> 32) & word]
    counter = [place & word, (place >> 32) & word, torch.zeros_like(place), torch.zeros_like(place)]
    for _ in range(10):
        # 64-bit products wrap, and their upper words are right all the same.
        first, second = counter[0] * 0xD2511F53, counter[2] * 0xCD9E8D57
        counter = [
            ((second >> 32) & word) ^ counter[1] ^ key[0],
            second & word,
            ((first >> 32) & word) ^ counter[3] ^ key[1],
            first & word,
        ]
        key = [(key[0] + 0x9E3779B9) & word, (key[1] + 0xBB67AE85) & word]
    return counter[0]


def stochastic_round_reference(x: Tensor, seed: Tensor, start: int = 0) -> Tensor:
    """Round to bfloat16 stochastically, in plain torch: what `adamw_` does, bit for bit.

    Args:
        start: place of the first element in the bucket.
    """
    x = x.float()
    place = torch.arange(start, start + x.numel(), device=x.device).view(x.shape)
    random = philox_reference(seed.to(torch.int64).reshape(()), place) & 0xFFFF
    bits = (x.view(torch.int32) + random.int()) & -0x10000
    return torch.where(x == x, bits.view(torch.float32), x).to(torch.bfloat16)


@torch.library.custom_op(
    "fxzero::adamw_",
    mutates_args=("params", "exp_avgs", "exp_avg_sqs", "copies"),
    schema="(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs,"
    " Tensor(d!)[] copies, Tensor? step, Tensor? lr, Tensor? grad_scale, Tensor? clip_coefficient,"
    " Tensor? skip, Tensor? seed, float step_number, float lr_number, float grad_factor,"
    " float beta1, float beta2, float eps, float weight_decay, bool decoupled) -> ()",
)
def _adamw_op(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    copies: Sequence[Tensor],
    step: Tensor | None,
    lr: Tensor | None,
    grad_scale: Tensor | None,
    clip_coefficient: Tensor | None,
    skip: Tensor | None,
    seed: Tensor | None,
    step_number: float,
    lr_number: float,
    grad_factor: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    decoupled: bool,
) -> None:
    """Update a bucket in place; numbers count where their tensors are None. `copies` may be []."""
    if not params:
        return
    sizes = numel(params)
    written = [ts for ts in (params, exp_avgs, exp_avg_sqs, copies) if ts]
    bytes_each = tuple(ts[0].element_size() for ts in written)
    places = _written(tuple(addresses(ts) for ts in written), sizes, bytes_each)
    # Those that are copied have memory of their own.
    grads = [grad.contiguous() for grad in grads]
    _check_gradients(addresses(grads), grads[0].element_size(), places)
    if step is not None and step.device.type == "cpu" and (skip is None or not bool(skip)):
        check(bool(step >= 1), "adamw_", "step", "at least 1", step)
    if not runs_on_triton(params[0]):
        _adamw_plain(
            params, grads, exp_avgs, exp_avg_sqs, copies,
            step_number if step is None else step.reshape(()).double(),
            lr_number if lr is None else lr.reshape(()).double(),
            _combined(grad_factor, grad_scale, clip_coefficient),
            skip, seed, (beta1, beta2), eps, weight_decay, decoupled,
        )  # fmt: skip
        return
    layout = lay_out(sizes, params[0].device)
    programs = len(layout.work)
    if programs == 0:
        return
    lists = [params, grads, exp_avgs, exp_avg_sqs, copies]
    pointers = tuple(address for tensors in lists for address in addresses(tensors))
    param, grad, average, square, copy = (POINTEES[(ts or params)[0].dtype] for ts in lists)
    stochastic = seed is not None
    launch(_adamw, (programs,))(
        table(pointers, params[0].device), *layout, len(params),
        step_number if step is None else step, lr_number if lr is None else lr,
        grad_factor, grad_scale, clip_coefficient, skip, seed,
        _log(beta1), _log(beta2), beta2, 1.0 - beta1, 1.0 - beta2, eps, weight_decay,
        PARAM=param, GRAD=grad, AVERAGE=average, SQUARE=square, COPY=copy,
        STEP_ON_DEVICE=step is not None, LR_ON_DEVICE=lr is not None,
        HAS_SCALE=grad_scale is not None, HAS_CLIP=clip_coefficient is not None,
        HAS_SKIP=skip is not None, HAS_COPY=len(copies) > 0,
        RANDOM_PARAM=stochastic and param is tl.bfloat16,
        RANDOM_COPY=stochastic and len(copies) > 0 and copy is tl.bfloat16,
        DECOUPLED=decoupled, ALIGNED=aligned(*pointers), BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip


@_adamw_op.register_fake
def _adamw_fake(*_: object) -> None:
    return None


def _adamw_plain(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    copies: Sequence[Tensor],
    step: Number,
    lr: Number,
    grad_factor: Number,
    skip: Tensor | None,
    seed: Tensor | None,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    decoupled: bool,
) -> None:
    start = 0
    for i, old in enumerate(zip(params, grads, exp_avgs, exp_avg_sqs, strict=True)):
        work = torch.promote_types(old[0].dtype, torch.float32)
        param, grad, exp_avg, exp_avg_sq = (t.to(work) for t in old)
        new = adamw_reference(
            param, grad, exp_avg, exp_avg_sq, step, lr=lr, betas=betas, eps=eps,
            weight_decay=weight_decay, grad_factor=grad_factor, decoupled=decoupled,
        )  # fmt: skip
        targets = [old[0], old[2], old[3], *copies[i : i + 1]]
        for k, (target, value) in enumerate(zip(targets, (*new, new[0]), strict=False)):
            # Of the state, nothing is rounded stochastically.
            if seed is not None and target.dtype is torch.bfloat16 and k not in (1, 2):
                value = stochastic_round_reference(value, seed, start)
            value = value.to(target.dtype)
            kept = value if skip is None else torch.where(skip.reshape(()) != 0, target, value)
            target.copy_(kept)
        start += old[0].numel()


def _combined(factor: float, scale: Tensor | None, clip: Tensor | None) -> Number:
    """What gradients are multiplied by."""
    combined: Number = factor
    if scale is not None:
        combined = combined / scale.reshape(()).double()
    if clip is not None:
        combined = combined * clip.reshape(()).double()
    return combined


class _Places(NamedTuple):
    """Where tensors that are written lie, by their first bytes; none of them is empty."""

    sizes: tuple[int, ...]
    """Elements of the tensors of one list."""
    starts: tuple[int, ...]
    lengths: tuple[int, ...]
    """Bytes."""
    positions: tuple[int, ...]
    """In their lists."""


@lru_cache(maxsize=256)
def _written(
    lists: tuple[tuple[int, ...], ...], sizes: tuple[int, ...], bytes_each: tuple[int, ...]
) -> _Places:
    """`check_apart` for lists of addresses: what every step asks, with as little as it takes."""
    each = [
        (address, size * element, i)
        for starts, element in zip(lists, bytes_each, strict=True)
        for i, (address, size) in enumerate(zip(starts, sizes, strict=True))
        if size
    ]
    spans = tuple((address, length) for address, length, _ in each)
    check_apart("adamw_", "params, exp_avgs, exp_avg_sqs and copies", spans)
    starts, lengths, positions = zip(*sorted(each), strict=True) if each else ((), (), ())
    return _Places(sizes, starts, lengths, positions)


@lru_cache(maxsize=256)
def _check_gradients(grads: tuple[int, ...], element: int, written: _Places) -> None:
    """See that no gradient is overwritten before it is read.

    One may lie exactly where what is made of it goes: each element is read, then written.
    """
    for i, (start, size) in enumerate(zip(grads, written.sizes, strict=True)):
        # Tensors that are written lie apart: those before the last that starts here or earlier
        # end before it, and if the one after it does not overlap, no later one does.
        last = bisect_right(written.starts, start) - 1
        for k in range(max(last, 0), min(last + 2, len(written.starts))):
            there, length = written.starts[k], written.lengths[k]
            shared = min(start + size * element, there + length) - max(start, there)
            same = (there, length, written.positions[k]) == (start, size * element, i)
            if size and shared > 0 and not same:
                check(False, "adamw_", f"grads[{i}]", "in memory of its own",
                      f"{shared} bytes or more that are written")  # fmt: skip


def _log(beta: float) -> float:
    """The logarithm by which the kernel takes powers, of 0 too."""
    return math.log(beta) if beta else -math.inf


def _number(
    kernel: str, name: str, value: Number, device: torch.device, least: float = -math.inf
) -> tuple[Tensor | None, float]:
    """A number as a tensor, if it is one, and as a float; 1 where it is a tensor."""
    if not isinstance(value, Tensor):
        check_number(kernel, name, value, least)
        return None, float(value)
    check_tensor(kernel, **{name: value})
    check(value.numel() == 1, kernel, name, "a tensor of one element", list(value.shape))
    check(value.device == device, kernel, name, f"on {device}, where params are", value.device)
    return value, 1.0


def adamw_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    step: Number,
    *,
    lr: Number,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
    copies: Sequence[Tensor] | None = None,
    grad_scale: Number | None = None,
    clip_coefficient: Number | None = None,
    skip: Tensor | None = None,
    seed: Tensor | None = None,
    decoupled: bool = True,
) -> None:
    """Update a bucket of parameters and their state in place, as `torch.optim.AdamW` does.

    The i-th tensors of all lists have one shape; all tensors of a list have one dtype. Numbers
    may be tensors of one element on the device of the parameters: nothing waits for them.

    Args:
        params: contiguous; float32 masters, or 16-bit parameters, computed with in float32.
        grads: of any floating-point dtype.
        exp_avgs, exp_avg_sqs: the state, contiguous; float32 or bfloat16.
        step: the number of this step, from 1.
        betas: each at least 0 and less than 1.
        lr, eps, weight_decay: at least 0.
        copies: contiguous 16-bit tensors that get the new values, rounded.
        grad_scale: the loss scale, by which gradients are divided.
        clip_coefficient: by which gradients are multiplied.
        skip: a tensor of one element; if it is not zero, nothing changes at all.
        seed: int64, one element; bfloat16 copies, and parameters that are bfloat16 themselves,
            are then rounded stochastically. The same seed makes the same bits, so it must be
            another one in every step and for every bucket.
        decoupled: false for weight decay as part of the gradient: Adam.

    Raises:
        KernelError: lists of different lengths, shapes, dtypes or devices that do not fit,
            tensors to be written that are not contiguous or that overlap, gradients that
            overlap them other than exactly, or numbers out of range. Of tensors, numbers are
            not read, but for a step on a CPU.
    """
    kernel = "adamw_"
    if len(params) == 0:
        check(len(grads) == 0, kernel, "grads", "as many tensors as params, 0", len(grads))
        return
    copies = () if copies is None else copies
    lists = {"params": params, "grads": grads, "exp_avgs": exp_avgs, "exp_avg_sqs": exp_avg_sqs}
    lists |= {"copies": copies} if copies else {}
    for name, tensors in lists.items():
        for i, tensor in enumerate(tensors):
            if not is_strided(tensor):  # As in `check_bucket`, no name is made every step.
                check_tensor(kernel, **{f"{name}[{i}]": tensor})
        check_bucket(kernel, name, tensors, params, "params")
        check_float(kernel, **{f"{name}[0]": tensors[0]})
        for i, tensor in enumerate(tensors if name != "grads" else ()):
            check_written(kernel, f"{name}[{i}]", tensor)
    _check_dtypes(kernel, params, grads, exp_avgs, exp_avg_sqs, copies, seed)
    fits = isinstance(betas, tuple | list) and len(betas) == 2
    fits = fits and all(is_number(beta) and 0 <= beta < 1 for beta in betas)
    check(fits, kernel, "betas", "two numbers in [0, 1)", betas)
    beta1, beta2 = betas
    check_number(kernel, "eps", eps, least=0)
    check_number(kernel, "weight_decay", weight_decay, least=0)
    check_bool(kernel, decoupled=decoupled)
    device = params[0].device
    step_there, step_number = _number(kernel, "step", step, device, least=1)
    check(step_number % 1 == 0, kernel, "step", "a whole number", step)
    lr_there, lr_number = _number(kernel, "lr", lr, device, least=0)
    scale_there, scale_number = _number(
        kernel, "grad_scale", 1.0 if grad_scale is None else grad_scale, device
    )
    check(scale_number != 0, kernel, "grad_scale", "other than 0", grad_scale)
    clip_there, clip_number = _number(
        kernel, "clip_coefficient", 1.0 if clip_coefficient is None else clip_coefficient, device,
        least=0,
    )  # fmt: skip
    for name, there in (("skip", skip), ("seed", seed)):
        if there is not None:
            check_tensor(kernel, **{name: there})
            _number(kernel, name, there, device)
    torch.ops.fxzero.adamw_(
        params, grads, exp_avgs, exp_avg_sqs, copies, step_there, lr_there, scale_there,
        clip_there, skip, seed, step_number, lr_number, clip_number / scale_number, beta1, beta2,
        eps, weight_decay, decoupled,
    )  # fmt: skip


def _check_dtypes(
    kernel: str,
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    copies: Sequence[Tensor],
    seed: Tensor | None,
) -> None:
    param = params[0].dtype
    if param is not torch.float64:
        check(grads[0].dtype is not torch.float64, kernel, "grads[0]",
              f"float32, bfloat16 or float16 where params are {param}", grads[0].dtype)  # fmt: skip
    states = (torch.float64,) if param is torch.float64 else (torch.float32, torch.bfloat16)
    for name, tensors in (("exp_avgs[0]", exp_avgs), ("exp_avg_sqs[0]", exp_avg_sqs)):
        asked = f"{' or '.join(map(str, states))} where params are {param}"
        check(tensors[0].dtype in states, kernel, name, asked, tensors[0].dtype)
    if copies:
        check(copies[0].dtype in HALVES, kernel, "copies[0]", "bfloat16 or float16",
              copies[0].dtype)  # fmt: skip
    if seed is not None:
        rounded = copies[0].dtype if copies else param
        check_tensor(kernel, seed=seed)
        check(rounded is torch.bfloat16, kernel, "seed",
              "None unless what is rounded is bfloat16", f"one for {rounded}")  # fmt: skip
        check(seed.dtype is torch.int64, kernel, "seed", "int64", seed.dtype)
