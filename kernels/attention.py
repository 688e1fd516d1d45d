"""Softmax attention that never holds the matrix of scores, with grouped heads and dropout.

    S = scale · Q Kᵀ,  P = softmax(S),  O = (M ∘ P / (1 − p)) V,  lse = log Σ exp(S)
    (Dao 2023, "FlashAttention-2", algorithm 1; grouped heads: Ainslie et al. 2023, "GQA")

Backward, with P = exp(S − lse) computed again and M drawn again (algorithm 2):

    dV = (M ∘ P / (1 − p))ᵀ dO,  dP = M ∘ (dO Vᵀ) / (1 − p),  δ = rowsum(dO ∘ O)
    dS = P ∘ (dP − δ),           dQ = scale · dS K,           dK = scale · dSᵀ Q

M comes from Philox (Salmon et al. 2011, "Parallel Random Numbers: As Easy as 1, 2, 3") with the
counter (column // 4, row, batch · heads + head): no tiling of the matrix changes it.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from fxzero.kernels.attention_kernels import (
    LOG2E,
    backward_key,
    backward_query,
    dropout_mask,
    forward,
)
from fxzero.kernels.launch import (
    check,
    check_bool,
    check_float,
    check_integer,
    check_number,
    check_shape,
    check_tensor,
    check_together,
    launch,
    runs_on_triton,
)

MAX_HEAD_DIM = 256
"""Largest head_dim: a tile of it must fit into shared memory."""

# Queries, keys, warps and stages of a program, by the bytes of an element and the head_dim it is
# padded to. Every entry fits into the 99 KiB of shared memory of the smallest GPUs since Ampere.
_FORWARD_TILES = {
    (2, 64): (128, 64, 4, 3),
    (2, 128): (128, 32, 4, 3),
    (2, 256): (64, 32, 4, 2),
    (4, 64): (64, 32, 8, 2),
    (4, 128): (32, 32, 8, 2),
    (4, 256): (16, 32, 4, 1),
}
_QUERY_TILES = {
    (2, 64): (64, 64, 4, 2),
    (2, 128): (64, 32, 4, 2),
    (2, 256): (32, 32, 4, 1),
    (4, 64): (32, 32, 4, 2),
    (4, 128): (32, 32, 8, 1),
    (4, 256): (16, 16, 8, 1),
}
_KEY_TILES = {
    (2, 64): (32, 64, 4, 2),
    (2, 128): (32, 64, 8, 2),
    (2, 256): (32, 32, 8, 1),
    (4, 64): (32, 32, 8, 2),
    (4, 128): (32, 32, 8, 1),
    (4, 256): (16, 16, 4, 1),
}


def _tiling(
    table: dict[tuple[int, int], tuple[int, int, int, int]], query: Tensor, kv_len: int
) -> tuple[int, dict[str, int]]:
    """Tiles of queries, and the meta-parameters of a kernel; short sequences get short tiles."""
    q_len, head_dim = query.shape[2:]
    block_d = max(triton.next_power_of_2(head_dim), 16)
    queries, keys, warps, stages = table[query.element_size(), max(block_d, 64)]
    queries = min(queries, max(triton.next_power_of_2(q_len), 16))
    keys = min(keys, max(triton.next_power_of_2(kv_len), 16))
    meta = {"HEAD_DIM": head_dim, "BLOCK_M": queries, "BLOCK_N": keys, "BLOCK_D": block_d}
    return queries, {**meta, "num_warps": warps, "num_stages": stages}


def _rows(tensor: Tensor) -> Tensor:
    """A tensor whose last dim is contiguous; copied only if it must be."""
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] == 1 else tensor.contiguous()


def _like_rows(tensor: Tensor) -> Tensor:
    """An empty ``[batch, heads, length, head_dim]``, laid out as projections make and read it."""
    batch, heads, length, head_dim = tensor.shape
    return tensor.new_empty(batch, length, heads, head_dim).transpose(1, 2)


def _scores(query: Tensor, key: Tensor, causal: bool, scale: float) -> Tensor:
    """S, in plain torch."""
    scores = query @ key.mT * scale
    if not causal:
        return scores
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).triu(1)
    return scores.masked_fill(hidden, float("-inf"))


def _in_plain_torch(query: Tensor, *tensors: Tensor) -> list[Tensor]:
    """Tensors in the dtype of sums, those of keys repeated to the heads of queries."""
    work = torch.promote_types(query.dtype, torch.float32)
    heads = query.shape[1]
    return [t.to(work).repeat_interleave(heads // t.shape[1], 1) for t in (query, *tensors)]


def _keep_factor(
    query: Tensor, kv_len: int, dropout_p: float, seed: Tensor | None
) -> Tensor | float:
    """``M / (1 − p)``, in plain torch."""
    if seed is None:
        return 1.0
    mask = torch.ops.fxzero.flash_attention_dropout_mask(seed, dropout_p, *query.shape[:3], kv_len)
    return mask / (1 - dropout_p)


def flash_attention_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    dropout_p: float = 0.0,
    keep: Tensor | None = None,
) -> Tensor:
    """`flash_attention` in plain torch and in the dtype of its arguments.

    Args:
        keep: ``[batch, heads, q_len, kv_len]``, what dropout leaves, as
            `flash_attention_dropout_mask` makes it. Nothing is dropped without one.
    """
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    weights = _scores(query, key, causal, scale).softmax(-1)
    if keep is not None:
        weights = weights * keep / (1 - dropout_p)
    return weights @ value


@torch.library.custom_op(
    "fxzero::flash_attention_dropout_mask",
    mutates_args=(),
    schema="(Tensor seed, float dropout_p, SymInt batch, SymInt heads, SymInt q_len,"
    " SymInt kv_len) -> Tensor",
)
def _mask(
    seed: Tensor, dropout_p: float, batch: int, heads: int, q_len: int, kv_len: int
) -> Tensor:
    mask = _mask_fake(seed, dropout_p, batch, heads, q_len, kv_len)
    if mask.numel() == 0:
        return mask
    if not runs_on_triton(seed):
        generator = torch.Generator(seed.device).manual_seed(int(seed))
        return torch.rand(mask.shape, generator=generator, device=seed.device) >= dropout_p
    block_m, block_n = 32, 64
    programs = batch * heads * triton.cdiv(q_len, block_m) * triton.cdiv(kv_len, block_n)
    launch(dropout_mask, (programs,))(
        mask, seed, q_len, kv_len, dropout_p, BLOCK_M=block_m, BLOCK_N=block_n
    )
    return mask


@_mask.register_fake
def _mask_fake(
    seed: Tensor, dropout_p: float, batch: int, heads: int, q_len: int, kv_len: int
) -> Tensor:
    return seed.new_empty((batch, heads, q_len, kv_len), dtype=torch.bool)


@torch.library.custom_op(
    "fxzero::flash_attention",
    mutates_args=(),
    schema="(Tensor query, Tensor key, Tensor value, bool causal, float scale, float dropout_p,"
    " Tensor? seed) -> (Tensor out, Tensor lse)",
)
def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    causal: bool,
    scale: float,
    dropout_p: float,
    seed: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Forward. Without a seed nothing is dropped."""
    out, lse = _attention_fake(query, key, value, causal, scale, dropout_p, seed)
    (batch, heads, q_len, _), kv_len = query.shape, key.shape[2]
    if lse.numel() == 0 or kv_len == 0:
        return out.zero_(), lse.fill_(float("-inf"))
    if not runs_on_triton(query):
        q, k, v = _in_plain_torch(query, key, value)
        scores = _scores(q, k, causal, scale)
        keep = _keep_factor(query, kv_len, dropout_p, seed)
        return out.copy_((scores.softmax(-1) * keep) @ v), scores.logsumexp(-1)
    query, key, value = _rows(query), _rows(key), _rows(value)
    queries, meta = _tiling(_FORWARD_TILES, query, kv_len)
    launch(forward, (batch * heads * triton.cdiv(q_len, queries),))(
        query, key, value, out, lse, seed,
        *query.stride()[:3], *key.stride()[:3], *value.stride()[:3], *out.stride()[:3],
        heads, heads // key.shape[1], q_len, kv_len,
        scale * LOG2E.value, dropout_p, 1 / (1 - dropout_p),
        CAUSAL=causal, DROPOUT=seed is not None, **meta,
    )  # fmt: skip
    return out, lse


@_attention.register_fake
def _attention_fake(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    causal: bool,
    scale: float,
    dropout_p: float,
    seed: Tensor | None,
) -> tuple[Tensor, Tensor]:
    work = torch.promote_types(query.dtype, torch.float32)
    return _like_rows(query), query.new_empty(query.shape[:3], dtype=work)


@torch.library.custom_op(
    "fxzero::flash_attention_backward",
    mutates_args=(),
    schema="(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor out, Tensor lse,"
    " bool causal, float scale, float dropout_p, Tensor? seed)"
    " -> (Tensor dq, Tensor dk, Tensor dv)",
)
def _attention_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float,
    dropout_p: float,
    seed: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values."""
    dq, dk, dv = _attention_backward_fake(
        grad, query, key, value, out, lse, causal, scale, dropout_p, seed
    )
    (batch, heads, q_len, _), (_, kv_heads, kv_len, _) = query.shape, key.shape
    if lse.numel() == 0 or kv_len == 0:
        return dq.zero_(), dk.zero_(), dv.zero_()
    if not runs_on_triton(query):
        q, k, v, do, o = _in_plain_torch(query, key, value, grad, out)
        weights = torch.exp(_scores(q, k, causal, scale) - lse[..., None])
        keep = _keep_factor(query, kv_len, dropout_p, seed)
        ds = weights * (keep * (do @ v.mT) - (do * o).sum(-1, keepdim=True)) * scale
        shared = (batch, kv_heads, heads // kv_heads, *key.shape[2:])
        dk.copy_((ds.mT @ q).reshape(shared).sum(2))
        dv.copy_(((weights * keep).mT @ do).reshape(shared).sum(2))
        return dq.copy_(ds @ k), dk, dv
    query, key, value, grad, out = (_rows(t) for t in (query, key, value, grad, out))
    lse, delta = lse.contiguous(), torch.empty_like(lse, memory_format=torch.contiguous_format)
    group = heads // kv_heads
    numbers = (q_len, kv_len, scale, scale * LOG2E.value, dropout_p, 1 / (1 - dropout_p))
    queries, meta = _tiling(_QUERY_TILES, query, kv_len)
    launch(backward_query, (batch * heads * triton.cdiv(q_len, queries),))(
        query, key, value, out, grad, lse, delta, dq, seed,
        *query.stride()[:3], *key.stride()[:3], *value.stride()[:3],
        *out.stride()[:3], *grad.stride()[:3], *dq.stride()[:3],
        heads, group, *numbers,
        CAUSAL=causal, DROPOUT=seed is not None, **meta,
    )  # fmt: skip
    _, meta = _tiling(_KEY_TILES, query, kv_len)
    launch(backward_key, (batch * kv_heads * triton.cdiv(kv_len, meta["BLOCK_N"]),))(
        query, key, value, grad, lse, delta, dk, dv, seed,
        *query.stride()[:3], *key.stride()[:3], *value.stride()[:3],
        *grad.stride()[:3], *dk.stride()[:3], heads, *numbers,
        GROUP=group, CAUSAL=causal, DROPOUT=seed is not None, **meta,
    )  # fmt: skip
    return dq, dk, dv


@_attention_backward.register_fake
def _attention_backward_fake(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float,
    dropout_p: float,
    seed: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    return _like_rows(query), _like_rows(key), _like_rows(value)


def _setup(ctx, inputs, output) -> None:
    query, key, value, *ctx.options, seed = inputs
    ctx.save_for_backward(query, key, value, *output, seed)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _differentiate(ctx, grad, _):
    query, key, value, out, lse, seed = ctx.saved_tensors
    grads = (None, None, None)
    if grad is not None:
        grads = torch.ops.fxzero.flash_attention_backward(
            grad, query, key, value, out, lse, *ctx.options, seed
        )
    return *grads, None, None, None, None


_attention.register_autograd(_differentiate, setup_context=_setup)


def _check_dropout(kernel: str, dropout_p: float) -> None:
    check_number(kernel, "dropout_p", dropout_p, least=0, below=1)


def _check_seed(kernel: str, seed: Tensor) -> None:
    check_tensor(kernel, seed=seed)
    check(seed.dtype is torch.int64, kernel, "seed", "int64", seed.dtype)
    check(seed.numel() == 1, kernel, "seed", "of one element", list(seed.shape))


def _check(query: Tensor, key: Tensor, value: Tensor) -> None:
    kernel = "flash_attention"
    check_tensor(kernel, query=query, key=key, value=value)
    check(query.dim() == 4, kernel, "query", "[batch, heads, q_len, head_dim]", list(query.shape))
    batch, heads, _, head_dim = query.shape
    check(0 < head_dim <= MAX_HEAD_DIM, kernel, "query",
          f"of 1 to {MAX_HEAD_DIM} elements in its last dim", list(query.shape))  # fmt: skip
    asked = f"[{batch}, kv_heads, kv_len, {head_dim}]"
    fits = key.dim() == 4 and key.shape[0] == batch and key.shape[3] == head_dim
    check(fits, kernel, "key", asked, list(key.shape))
    fits = key.shape[1] > 0 and heads % key.shape[1] == 0
    check(fits, kernel, "key", f"of a number of heads that divides {heads}", list(key.shape))
    check_shape(kernel, "value", value, key.shape)
    check_float(kernel, query=query, key=key, value=value)
    for name, tensor in (("key", key), ("value", value)):
        asked = f"{query.dtype}, as query is"
        check(tensor.dtype is query.dtype, kernel, name, asked, tensor.dtype)
    check_together(kernel, query=query, key=key, value=value)


def flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
) -> Tensor:
    """``dropout(softmax(scale · query keyᵀ)) value``; zeros where there is no key.

    The result is laid out as ``[batch, q_len, heads, head_dim]``, whatever the inputs are, so that
    the projection after it reads it as it is.

    Args:
        query: ``[batch, heads, q_len, head_dim]``, head_dim up to 256. Any strides will do, but
            inputs whose last dim is not contiguous are copied.
        key, value: ``[batch, kv_heads, kv_len, head_dim]``; kv_heads divides heads, and query head
            h reads key head ``h // (heads // kv_heads)``.
        causal: query i sees keys 0 to i, as ``is_causal`` of torch's attention does.
        scale: ``1 / sqrt(head_dim)`` without one.
        dropout_p: the share of weights that becomes zero; the others grow to make up for it.
        seed: one int64 that says which. Without it, it is drawn from torch's default generator.

    Raises:
        KernelError: shapes, dtypes or devices that do not fit, or numbers out of range.
    """
    _check(query, key, value)
    _check_dropout("flash_attention", dropout_p)
    check_bool("flash_attention", causal=causal)
    if scale is not None:
        check_number("flash_attention", "scale", scale)
    scale = query.shape[-1] ** -0.5 if scale is None else float(scale)
    if seed is not None:
        _check_seed("flash_attention", seed)
        check_together("flash_attention", query=query, seed=seed)
    if dropout_p == 0:
        seed = None
    elif seed is None:
        seed = torch.randint(2**63 - 1, (), dtype=torch.int64, device=query.device)
    return torch.ops.fxzero.flash_attention(query, key, value, causal, scale, dropout_p, seed)[0]


def flash_attention_dropout_mask(
    seed: Tensor, dropout_p: float, batch: int, heads: int, q_len: int, kv_len: int
) -> Tensor:
    """What `flash_attention` keeps under a seed: bool, ``[batch, heads, q_len, kv_len]``.

    Raises:
        KernelError: a seed that is not one int64, a share out of range, or a negative size.
    """
    kernel = "flash_attention_dropout_mask"
    _check_seed(kernel, seed)
    _check_dropout(kernel, dropout_p)
    sizes = {"batch": batch, "heads": heads, "q_len": q_len, "kv_len": kv_len}
    for name, size in sizes.items():
        check_integer(kernel, name, size, 0)
    return torch.ops.fxzero.flash_attention_dropout_mask(seed, float(dropout_p), *sizes.values())
