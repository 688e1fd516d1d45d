"""Flash attention against softmax attention in float64.

How far apart they may be, in the terms of `tests.kernels.checking`. Let W = M ∘ P / (1 − p).

- A score is a sum of head_dim products, so its float32 error is some steps of Σ|q||k|·scale, and
  e^(score − lse) has that error, and that of lse, as a relative one: `_weight_steps`.
- Each tile of 16 keys (the smallest) that a row goes over rounds its sums a few times more.
- The kernel's dtype is rounded to twice in out and dv (weights, result) and four times in dq and
  dk (dS, result, and twice in out, which δ = Σ do · out is made of).
- Weights and dS below 2⁻¹⁴ are subnormal in float16: off by 2⁻²⁵, which is 2⁻¹⁴ · u, and not by
  a share of themselves.

Scales are the formulas of the gradients with absolute values in place of every term.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from fxzero.errors import KernelError
from fxzero.kernels.attention import (
    flash_attention,
    flash_attention_dropout_mask,
    flash_attention_reference,
)
from tests.kernels.checking import DEVICE, DTYPES, check_close, double, each_dtype, random
from tests.tiers import exhaustive, in_two_tiers

CASES = [
    # q_len, kv_len, head_dim, heads, kv_heads, causal
    (1, 1, 8, 1, 1, False),
    (1, 127, 80, 2, 1, False),
    (31, 1, 64, 2, 2, True),
    (31, 31, 256, 1, 1, True),
    (31, 127, 8, 2, 2, True),
    (127, 31, 64, 4, 2, False),
    (127, 127, 80, 3, 1, True),
    (200, 200, 64, 1, 1, True),
]
LONG = [
    (200, 200, 8, 1, 1, False, torch.float32),
    (1000, 31, 8, 1, 1, True, torch.float32),
    (1000, 31, 8, 1, 1, True, torch.bfloat16),
    (31, 1000, 8, 1, 1, False, torch.float32),
    (31, 1000, 8, 1, 1, False, torch.float16),
]
"""In dtypes of their own: Triton's interpreter takes long for them."""
each_case_in_each_dtype = pytest.mark.parametrize(
    ("q_len", "kv_len", "head_dim", "heads", "kv_heads", "causal", "dtype"),
    in_two_tiers(
        [*((*case, dtype) for dtype in DTYPES for case in CASES), *LONG],
        always=[(*case, torch.float32) for case in CASES],
    ),
)
OUT, GRADIENTS = 2, 4  # how often values are rounded to the kernel's dtype on their way


@dataclass
class Terms:
    """What the errors of attention and of its gradients are shares of, and how large they are."""

    out: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor
    out_steps: float
    grad_steps: float


def terms(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    do: Tensor,
    *,
    causal: bool,
    share: Tensor | float,
    scale: float,
) -> Terms:
    """The scales and steps of this module's docstring; `share` is M / (1 − p)."""
    tiny = 2.0**-14 if q.dtype is torch.float16 else 0.0
    q, k, v, do = (t.detach().double() for t in (q, k, v, do))
    q_len, head_dim, group = *q.shape[2:], q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    hidden = torch.ones(q_len, k.shape[2], dtype=torch.bool, device=q.device).triu(1) & causal
    p = (q @ k.mT * scale).masked_fill(hidden, -math.inf).softmax(-1)
    q, k, v, do = q.abs(), k.abs(), v.abs(), do.abs()
    w = p * share
    out = w @ v
    ds = p * (share * (do @ v.mT) + (do * out).sum(-1, keepdim=True))
    largest = float((q @ k.mT * scale).masked_fill(hidden, 0).max())
    longest = max(k.shape[2], q_len * group)
    weight_steps = 2 * largest * (math.log2(head_dim) + 4) + 2 * math.log2(longest) + 4
    tiles = math.ceil(longest / 16)
    keys = torch.ones_like(p) * share

    def shared(grad: Tensor) -> Tensor:
        return grad.unflatten(1, (-1, group)).sum(2)

    return Terms(
        out=out + tiny * keys @ v,
        dq=scale * (ds + tiny) @ k,
        dk=shared(scale * (ds + tiny).mT @ q),
        dv=shared((w + tiny * keys).mT @ do),
        out_steps=weight_steps + 3 * tiles + 8,
        grad_steps=2 * weight_steps + 8 * tiles + 2 * math.log2(head_dim) + 20,
    )


def compare(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    dropout_p: float = 0.0,
    grad: Tensor | None = None,
) -> None:
    """See that out and all gradients are as near to float64 as this module's docstring says."""
    seed = torch.tensor(1234567890123, device=q.device)
    share: Tensor | float = 1.0
    keep = None
    if dropout_p:
        sizes = (*q.shape[:3], k.shape[2])
        keep = flash_attention_dropout_mask(seed, dropout_p, *sizes)
        share = keep.double() / (1 - dropout_p)
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    found = flash_attention(*leaves, causal=causal, scale=scale, dropout_p=dropout_p, seed=seed)
    assert found.dtype is q.dtype
    wide = double(*leaves)
    reference = flash_attention_reference(
        *wide, causal=causal, scale=scale, dropout_p=dropout_p, keep=keep
    )
    do = random(*q.shape, dtype=q.dtype) if grad is None else grad
    number = q.shape[-1] ** -0.5 if scale is None else abs(scale)
    sums = terms(q, k, v, do.to(q.device), causal=causal, share=share, scale=number)
    steps = round(sums.out_steps)
    check_close(found.detach(), reference.detach(), scale=sums.out, roundings=OUT, operations=steps)
    grads = torch.autograd.grad(found, leaves, do.to(q.device))
    expected = torch.autograd.grad(reference, wide, do.to(q.device).double())
    scales = (sums.dq, sums.dk, sums.dv)
    for mine, theirs, size, times in zip(
        grads, expected, scales, (GRADIENTS, GRADIENTS, OUT), strict=True
    ):
        assert mine.dtype is q.dtype
        check_close(mine, theirs, scale=size, roundings=times, operations=round(sums.grad_steps))


def inputs(
    q_len: int,
    kv_len: int,
    head_dim: int,
    heads: int = 2,
    kv_heads: int = 1,
    batch: int = 1,
    dtype: torch.dtype = torch.float32,
) -> list[Tensor]:
    kv = (batch, kv_heads, kv_len, head_dim)
    shapes = ((batch, heads, q_len, head_dim), kv, kv)
    return [random(*shape, dtype=dtype) for shape in shapes]


@each_case_in_each_dtype
def test_attention_and_gradients(
    q_len: int,
    kv_len: int,
    head_dim: int,
    heads: int,
    kv_heads: int,
    causal: bool,
    dtype: torch.dtype,
) -> None:
    compare(*inputs(q_len, kv_len, head_dim, heads, kv_heads, dtype=dtype), causal=causal)


@each_dtype
@pytest.mark.parametrize(("size", "causal"), [(31, False), (61, True)])
def test_dropout(size: int, causal: bool, dtype: torch.dtype) -> None:
    compare(*inputs(size, size + 6, 16, batch=2, dtype=dtype), causal=causal, dropout_p=0.3)


@pytest.mark.parametrize("scale", [0.7, 0.0, -0.5])
def test_scale(scale: float) -> None:
    compare(*inputs(31, 40, 8), scale=scale)


def test_large_scores() -> None:
    """Scores in the hundreds: one weight of a row is 1, and e^score alone is not finite."""
    q, k, v = inputs(31, 31, 8)
    compare(q, 100 * k, v)


@each_dtype
def test_views_of_one_projection(dtype: torch.dtype) -> None:
    """``[batch, length, 3, heads, head_dim]``, as models make it: nothing is contiguous."""
    packed = random(2, 31, 3, 2, 24, dtype=dtype)
    compare(*(t.transpose(1, 2) for t in packed.unbind(2)), causal=True)


def test_last_dim_that_is_not_contiguous() -> None:
    q, k, v = (t.mT.contiguous().mT for t in inputs(31, 17, 8))
    assert q.stride(-1) != 1
    compare(q, k, v, grad=random(1, 2, 8, 31).mT)


def test_expanded_gradient() -> None:
    compare(*inputs(31, 17, 8), grad=torch.ones((), device=DEVICE).expand(1, 2, 31, 8))


def test_heads_of_a_group_and_batches_are_told_apart() -> None:
    compare(*inputs(17, 31, 8, heads=6, kv_heads=2, batch=2), causal=True, dropout_p=0.2)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("q_len", "kv_len"), [(31, 127), *exhaustive((127, 127), (127, 31))])
def test_agrees_with_torch(q_len: int, kv_len: int, causal: bool) -> None:
    """Both may be off by one bound, in opposite directions."""
    q, k, v = (t.requires_grad_() for t in inputs(q_len, kv_len, 16, heads=2, kv_heads=1))
    do = random(*q.shape)
    out = flash_attention(q, k, v, causal=causal)
    with sdpa_kernel(SDPBackend.MATH):
        theirs = scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
    sums = terms(q, k, v, do, causal=causal, share=1.0, scale=16**-0.5)
    steps = 2 * round(sums.out_steps)
    check_close(
        out.detach(), theirs.detach().double(), scale=sums.out, roundings=2 * OUT, operations=steps
    )
    grads = torch.autograd.grad(out, (q, k, v), do)
    expected = torch.autograd.grad(theirs, (q, k, v), do)
    for mine, other, size in zip(grads, expected, (sums.dq, sums.dk, sums.dv), strict=True):
        steps = 2 * round(sums.grad_steps)
        check_close(mine, other.double(), scale=size, roundings=2 * GRADIENTS, operations=steps)


@each_dtype
@pytest.mark.parametrize("causal", [False, True])
def test_log_sum_exp(causal: bool, dtype: torch.dtype) -> None:
    """lse is kept in float32: off by the steps of a score, and by its own size."""
    q, k, v = inputs(31, 45, 8, heads=1, dtype=dtype)
    _, lse = torch.ops.fxzero.flash_attention(q, k, v, causal, 1.0, 0.0, None)
    scores = q.double() @ k.double().mT
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -math.inf)
    sums = terms(q, k, v, q, causal=causal, share=1.0, scale=1.0)
    assert lse.dtype is torch.float32
    expected = scores.logsumexp(-1)
    size = expected.abs().max().clamp(min=1)
    check_close(lse, expected, scale=size, operations=round(sums.out_steps))


def mask(seed: int, dropout_p: float, *sizes: int) -> Tensor:
    return flash_attention_dropout_mask(torch.tensor(seed, device=DEVICE), dropout_p, *sizes)


def test_mask_keeps_its_share() -> None:
    """Within 5 standard deviations of a binomial, over all and over each column of a quad."""
    kept = mask(7, 0.3, 2, 2, 64, 128)
    for part in (kept, *(kept[..., i::4] for i in range(4))):
        deviation = math.sqrt(0.3 * 0.7 / part.numel())
        assert abs(float(part.double().mean()) - 0.7) < 5 * deviation


def test_mask_does_not_repeat() -> None:
    """Rows, columns, heads, batches and seeds agree with others as chance has them agree."""
    kept = mask(7, 0.5, 2, 2, 64, 128)
    low, high = mask(8, 0.5, 2, 2, 64, 128), mask(7 + 2**40, 0.5, 2, 2, 64, 128)
    pairs = [
        (kept[0], kept[1]), (kept[:, 0], kept[:, 1]), (kept[:, :, ::2], kept[:, :, 1::2]),
        *((kept[..., i::4], kept[..., i + 1 :: 4]) for i in range(3)),
        (kept[..., :64], kept[..., 64:]), (kept, low), (kept, high),
    ]  # fmt: skip
    for one, other in pairs:
        agree = float((one == other).double().mean())
        assert abs(agree - 0.5) < 5 * math.sqrt(0.25 / one.numel())


def test_mask_is_a_function_of_the_seed_and_the_place() -> None:
    """No size, and so no tiling, changes what is kept at a place."""
    small, large = mask(3, 0.4, 1, 2, 31, 45), mask(3, 0.4, 1, 2, 100, 127)
    torch.testing.assert_close(small, large[:, :, :31, :45], rtol=0, atol=0)
    assert not torch.equal(small, mask(4, 0.4, 1, 2, 31, 45))


def test_dropout_without_a_seed_follows_the_generator() -> None:
    q, k, v = inputs(17, 17, 8)
    outs = []
    for start in (1, 1, 2):
        torch.manual_seed(start)
        outs.append(flash_attention(q, k, v, dropout_p=0.5))
    assert torch.equal(outs[0], outs[1])
    assert not torch.equal(outs[0], outs[2])


@pytest.mark.parametrize("dropout_p", [0.0, 0.4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_in_plain_torch(
    dtype: torch.dtype, dropout_p: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without an interpreter, CPU tensors get the explicit formula, and a mask all the same."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    tensors = [t.cpu() for t in inputs(31, 45, 8, heads=4, kv_heads=2, batch=2, dtype=dtype)]
    compare(*tensors, causal=True, dropout_p=dropout_p)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
def test_gradcheck(causal: bool, dropout_p: float, monkeypatch: pytest.MonkeyPatch) -> None:
    # float64 is plain torch anyway; without this the mask would be interpreted a thousand times.
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    tensors = [
        t.requires_grad_() for t in inputs(3, 4, 2, heads=4, kv_heads=2, dtype=torch.float64)
    ]
    seed = torch.tensor(11, device=DEVICE)
    assert torch.autograd.gradcheck(
        lambda q, k, v: flash_attention(q, k, v, causal=causal, dropout_p=dropout_p, seed=seed),
        tensors,
    )


@pytest.mark.parametrize("dropout_p", [0.3, *exhaustive(0.0)])
def test_opcheck(dropout_p: float) -> None:
    q, k, v = inputs(5, 7, 8)
    seed = torch.tensor(3, device=DEVICE) if dropout_p else None
    options = (True, 0.4, dropout_p, seed)
    ops = torch.ops.fxzero
    out, lse = ops.flash_attention(q, k, v, *options)
    torch.library.opcheck(ops.flash_attention, (*(t.requires_grad_() for t in (q, k, v)), *options))
    q, k, v = (t.detach() for t in (q, k, v))
    grad = random(*out.shape)
    torch.library.opcheck(ops.flash_attention_backward, (grad, q, k, v, out, lse, *options))


def test_opcheck_of_the_mask() -> None:
    seed = torch.tensor(3, device=DEVICE)
    torch.library.opcheck(torch.ops.fxzero.flash_attention_dropout_mask, (seed, 0.3, 1, 2, 5, 7))


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
def test_compiled(dropout_p: float) -> None:
    tensors = [t.requires_grad_() for t in inputs(31, 31, 8)]

    def step(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flash_attention(q, k, v, causal=True, dropout_p=dropout_p) * 2

    results = []
    for function in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        torch.manual_seed(5)
        out = function(*tensors)
        results.append([out, *torch.autograd.grad(out.square().sum(), tensors)])
    for eager, compiled in zip(*results, strict=True):
        assert torch.equal(eager, compiled)


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
def test_inputs_stay(dropout_p: float) -> None:
    tensors = [t.requires_grad_() for t in inputs(17, 17, 8)]
    seed = torch.tensor(3, device=DEVICE)
    before = [t.detach().clone() for t in (*tensors, seed)]
    out = flash_attention(*tensors, dropout_p=dropout_p, seed=seed)
    grad = random(*out.shape)
    before += [out.detach().clone(), grad.clone()]
    out.backward(grad)
    for was, now in zip(before, (*tensors, seed, out, grad), strict=True):
        assert torch.equal(was, now)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("batch", "heads", "q_len", "kv_len"), [(0, 2, 3, 3), (1, 0, 3, 3), (1, 2, 0, 3), (1, 2, 3, 0)]
)
def test_nothing_to_attend(
    batch: int, heads: int, q_len: int, kv_len: int, dtype: torch.dtype
) -> None:
    """Rows without a key are zero, and so is every gradient there is."""
    tensors = [
        t.requires_grad_() for t in inputs(q_len, kv_len, 8, heads, batch=batch, dtype=dtype)
    ]
    seed = torch.tensor(1, device=DEVICE)
    out = flash_attention(*tensors, dropout_p=0.1, seed=seed)
    assert torch.equal(out, torch.zeros_like(tensors[0]))
    for grad, tensor in zip(torch.autograd.grad(out.sum(), tensors), tensors, strict=True):
        assert torch.equal(grad, torch.zeros_like(tensor))


def test_keys_that_no_query_sees_have_no_gradient() -> None:
    q, k, v = (t.requires_grad_() for t in inputs(17, 80, 8))
    _, dk, dv = torch.autograd.grad(flash_attention(q, k, v, causal=True).sum(), (q, k, v))
    assert not dk[:, :, 17:].any()
    assert not dv[:, :, 17:].any()
    assert dv[:, :, :17].all()


Q, KV = (1, 4, 5, 8), (1, 2, 6, 8)


@pytest.mark.parametrize(
    ("shapes", "name"),
    [
        (((4, 5, 8), KV, KV), "query"),
        (((1, 4, 5, 257), (1, 2, 6, 257), (1, 2, 6, 257)), "query"),
        (((1, 4, 5, 0), (1, 2, 6, 0), (1, 2, 6, 0)), "query"),
        ((Q, (2, 6, 8), KV), "key"),
        ((Q, (2, 2, 6, 8), KV), "key"),
        ((Q, (1, 2, 6, 16), KV), "key"),
        ((Q, (1, 3, 6, 8), (1, 3, 6, 8)), "key"),
        ((Q, (1, 0, 6, 8), (1, 0, 6, 8)), "key"),
        ((Q, KV, (1, 2, 7, 8)), "value"),
    ],
)
def test_bad_shapes(shapes: tuple[tuple[int, ...], ...], name: str) -> None:
    with pytest.raises(KernelError, match=f"flash_attention: {name} must be"):
        flash_attention(*(random(*shape) for shape in shapes))


def test_bad_arguments() -> None:
    q, k, v = random(*Q), random(*KV), random(*KV)
    seed = torch.tensor(3, device=DEVICE)
    with pytest.raises(KernelError, match="query must be a strided"):
        flash_attention(q.to_sparse(), k, v)
    with pytest.raises(KernelError, match="value must be a strided"):
        flash_attention(q, k, None)
    with pytest.raises(KernelError, match="causal must be True or False"):
        flash_attention(q, k, v, causal="no")
    with pytest.raises(KernelError, match="query must be float32"):
        flash_attention(q.int(), k, v)
    with pytest.raises(KernelError, match=r"key must be torch\.float32, as query is"):
        flash_attention(q, k.half(), v)
    with pytest.raises(KernelError, match=r"value must be torch\.float32, as query is"):
        flash_attention(q, k, v.half())
    with pytest.raises(KernelError, match="value must be on"):
        flash_attention(q, k, v.to("meta"))
    for dropout_p in (-0.1, 1.0, math.nan, "no"):
        with pytest.raises(KernelError, match="dropout_p must be"):
            flash_attention(q, k, v, dropout_p=dropout_p)
        with pytest.raises(KernelError, match="dropout_p must be"):
            flash_attention_dropout_mask(seed, dropout_p, 1, 1, 1, 1)
    for scale in (math.inf, -math.inf, math.nan, "1"):
        with pytest.raises(KernelError, match="scale must be finite"):
            flash_attention(q, k, v, scale=scale)
    seeds = ((seed.int(), "int64"), (seed.expand(2), "of one element"), (3, "a strided"))
    for bad, asked in seeds:
        with pytest.raises(KernelError, match=f"seed must be {asked}"):
            flash_attention(q, k, v, dropout_p=0.1, seed=bad)
        with pytest.raises(KernelError, match=f"seed must be {asked}"):
            flash_attention_dropout_mask(bad, 0.1, 1, 1, 1, 1)
    with pytest.raises(KernelError, match="seed must be on"):
        flash_attention(q, k, v, dropout_p=0.1, seed=seed.to("meta"))
    for name in ("batch", "heads", "q_len", "kv_len"):
        sizes = {"batch": 1, "heads": 1, "q_len": 1, "kv_len": 1, name: -1}
        with pytest.raises(KernelError, match=f"{name} must be an integer, at least 0"):
            flash_attention_dropout_mask(seed, 0.1, **sizes)
