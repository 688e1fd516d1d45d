"""The Triton kernels of `fxzero.kernels.attention`, whose docstring has the formulas.

The forward kernel owns a tile of queries and goes over the keys: Q and O pass through memory
once, K and V once per tile of queries, and of the scores only lse, one float32 a row, is kept.
Backward is two kernels, so that each gradient has one owner and no sum depends on an order of
arrival: the first owns queries (dQ, and δ for the second), the second owns keys (dK, dV) and
goes over all query heads that share them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fxzero.kernels.launch import INTERPRETED

# Powers of two are cheaper than powers of e, so scores are held in units of log 2.
LOG2E = tl.constexpr(1.4426950408889634)
_LN2 = tl.constexpr(0.6931471805599453)
_INTERPRETED = tl.constexpr(INTERPRETED)


@triton.jit
def _dot(a, b, acc):
    # The interpreter would multiply bfloat16 as the integers it is stored in. Products of 16 bits
    # are exact in float32 either way.
    if _INTERPRETED:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def _at(rows, stride, length, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Offsets of rows of a ``[length, HEAD_DIM]`` matrix, and which of them are inside it."""
    at = tl.arange(0, BLOCK_D)
    offsets = rows[:, None].to(tl.int64) * stride + at[None, :]
    return offsets, (rows[:, None] < length) & (at[None, :] < HEAD_DIM)


@triton.jit
def _read(ptr, rows, stride, length, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    offsets, inside = _at(rows, stride, length, HEAD_DIM, BLOCK_D)
    return tl.load(ptr + offsets, mask=inside, other=0.0)


@triton.jit
def _write(ptr, tile, rows, stride, length, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    offsets, inside = _at(rows, stride, length, HEAD_DIM, BLOCK_D)
    tl.store(ptr + offsets, tile.to(ptr.dtype.element_ty), mask=inside)


@triton.jit
def _visible(rows, cols, kv_len, CAUSAL: tl.constexpr):
    """Which keys, along dim 1, the queries along dim 0 attend to."""
    visible = (cols < kv_len)[None, :]
    if CAUSAL:
        visible = visible & (rows[:, None] >= cols[None, :])
    return visible


@triton.jit
def _bound(number):
    # A loop of Triton 3.6's interpreter takes only Python's numbers; compiled, this is nothing.
    if _INTERPRETED:
        return number.handle.data.item()
    return number


@triton.jit
def _keys_of(row, kv_len, CAUSAL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Where a tile of queries stops seeing whole tiles of keys, and where it stops seeing any."""
    whole, stop = row * 0 + kv_len, row * 0 + kv_len
    if CAUSAL:
        whole, stop = tl.minimum(kv_len, row + 1), tl.minimum(kv_len, row + BLOCK_M)
    return _bound(whole // BLOCK_N * BLOCK_N), _bound(stop)


@triton.jit
def _queries_of(col, q_len, CAUSAL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Where queries start to see any of a tile of keys, start to see all of it, and end."""
    first, whole = col * 0, col * 0
    if CAUSAL:
        first = col // BLOCK_M * BLOCK_M
        whole = tl.minimum(tl.cdiv(col + BLOCK_N - 1, BLOCK_M) * BLOCK_M, q_len)
    return _bound(first), _bound(whole), _bound(col * 0 + q_len)


@triton.jit
def _kept(seed, head, rows, col, dropout_p, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """The tile of M at `rows` and `col`, a multiple of 4: each counter gives four columns."""
    zero = tl.zeros([BLOCK_M, BLOCK_N // 4], dtype=tl.int32)
    quads = col // 4 + tl.arange(0, BLOCK_N // 4)
    a, b, c, d = tl.philox(
        seed, zero + quads[None, :], zero + rows[:, None], zero + head.to(tl.int32), zero
    )
    bits = tl.join(tl.join(a, c), tl.join(b, d)).reshape(BLOCK_M, BLOCK_N)
    return tl.uint_to_uniform_float(bits) >= dropout_p


@triton.jit
def _forward_keys(
    acc, top, total, q, rows, head, k_ptr, v_ptr, k_row, v_row, kv_len, start, stop,
    scale_log2, dropout_p, seed,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr, DROPOUT: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Lines 6 to 11 of algorithm 1 for the keys from `start` to `stop`."""
    for col in range(start, stop, BLOCK_N):
        cols = col + tl.arange(0, BLOCK_N)
        k = _read(k_ptr, cols, k_row, kv_len, HEAD_DIM, BLOCK_D)
        s = _dot(q, tl.trans(k), tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)) * scale_log2
        if MASKED:
            s = tl.where(_visible(rows, cols, kv_len, CAUSAL), s, float("-inf"))
        # Finite from the first tile on: key 0 is visible to every row.
        new_top = tl.maximum(top, tl.max(s, axis=1))
        p = tl.exp2(s - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.sum(p, axis=1)
        if DROPOUT:
            p = tl.where(_kept(seed, head, rows, col, dropout_p, BLOCK_M, BLOCK_N), p, 0.0)
        v = _read(v_ptr, cols, v_row, kv_len, HEAD_DIM, BLOCK_D)
        acc = _dot(p.to(v.dtype), v, acc * shrink[:, None])
        top = new_top
    return acc, top, total


@triton.jit
def forward(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, seed_ptr,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
    out_batch, out_head, out_row, heads, group, q_len, kv_len, scale_log2, dropout_p, keep_scale,
    CAUSAL: tl.constexpr, DROPOUT: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Own a tile of queries: the output, and the log-sum-exp of its scores."""
    tiles = tl.cdiv(q_len, BLOCK_M)
    # Under a causal mask the last rows have most to do: they start first.
    row = (tiles - 1 - tl.program_id(0) % tiles) * BLOCK_M
    index = (tl.program_id(0) // tiles).to(tl.int64)
    batch, head = index // heads, index % heads
    rows = row + tl.arange(0, BLOCK_M)
    q = _read(q_ptr + batch * q_batch + head * q_head, rows, q_row, q_len, HEAD_DIM, BLOCK_D)
    k_ptr += batch * k_batch + head // group * k_head
    v_ptr += batch * v_batch + head // group * v_head
    seed = 0
    if DROPOUT:
        seed = tl.load(seed_ptr)
    acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    whole, stop = _keys_of(row, kv_len, CAUSAL, BLOCK_M, BLOCK_N)
    acc, top, total = _forward_keys(
        acc, top, total, q, rows, index, k_ptr, v_ptr, k_row, v_row, kv_len, 0, whole,
        scale_log2, dropout_p, seed, False, CAUSAL, DROPOUT, HEAD_DIM, BLOCK_M, BLOCK_N, BLOCK_D,
    )  # fmt: skip
    acc, top, total = _forward_keys(
        acc, top, total, q, rows, index, k_ptr, v_ptr, k_row, v_row, kv_len, whole, stop,
        scale_log2, dropout_p, seed, True, CAUSAL, DROPOUT, HEAD_DIM, BLOCK_M, BLOCK_N, BLOCK_D,
    )  # fmt: skip
    acc *= (keep_scale / total)[:, None]
    out_ptr += batch * out_batch + head * out_head
    _write(out_ptr, acc, rows, out_row, q_len, HEAD_DIM, BLOCK_D)
    lse = (top + tl.log2(total)) * _LN2
    tl.store(lse_ptr + index * q_len + rows, lse, mask=rows < q_len)


@triton.jit
def _backward_keys(
    dq, q, do, lse_log2, delta, rows, head, k_ptr, v_ptr, k_row, v_row, kv_len, start, stop,
    scale_log2, dropout_p, keep_scale, seed,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr, DROPOUT: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """dQ of one tile of queries, from the keys from `start` to `stop`."""
    zero = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for col in range(start, stop, BLOCK_N):
        cols = col + tl.arange(0, BLOCK_N)
        k = _read(k_ptr, cols, k_row, kv_len, HEAD_DIM, BLOCK_D)
        p = tl.exp2(_dot(q, tl.trans(k), zero) * scale_log2 - lse_log2[:, None])
        if MASKED:
            p = tl.where(_visible(rows, cols, kv_len, CAUSAL), p, 0.0)
        v = _read(v_ptr, cols, v_row, kv_len, HEAD_DIM, BLOCK_D)
        dp = _dot(do, tl.trans(v), zero)
        if DROPOUT:
            kept = _kept(seed, head, rows, col, dropout_p, BLOCK_M, BLOCK_N)
            dp = tl.where(kept, dp * keep_scale, 0.0)
        ds = p * (dp - delta[:, None])
        dq = _dot(ds.to(k.dtype), k, dq)
    return dq


@triton.jit
def backward_query(
    q_ptr, k_ptr, v_ptr, out_ptr, do_ptr, lse_ptr, delta_ptr, dq_ptr, seed_ptr,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
    out_batch, out_head, out_row, do_batch, do_head, do_row, dq_batch, dq_head, dq_row,
    heads, group, q_len, kv_len, scale, scale_log2, dropout_p, keep_scale,
    CAUSAL: tl.constexpr, DROPOUT: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Own a tile of queries: dQ, and δ for `backward_key`."""
    tiles = tl.cdiv(q_len, BLOCK_M)
    row = (tiles - 1 - tl.program_id(0) % tiles) * BLOCK_M
    index = (tl.program_id(0) // tiles).to(tl.int64)
    batch, head = index // heads, index % heads
    rows = row + tl.arange(0, BLOCK_M)
    q = _read(q_ptr + batch * q_batch + head * q_head, rows, q_row, q_len, HEAD_DIM, BLOCK_D)
    do = _read(do_ptr + batch * do_batch + head * do_head, rows, do_row, q_len, HEAD_DIM, BLOCK_D)
    out_ptr += batch * out_batch + head * out_head
    out = _read(out_ptr, rows, out_row, q_len, HEAD_DIM, BLOCK_D)
    delta = tl.sum(do.to(tl.float32) * out.to(tl.float32), axis=1)
    tl.store(delta_ptr + index * q_len + rows, delta, mask=rows < q_len)
    lse_log2 = tl.load(lse_ptr + index * q_len + rows, mask=rows < q_len, other=0.0) * LOG2E
    k_ptr += batch * k_batch + head // group * k_head
    v_ptr += batch * v_batch + head // group * v_head
    seed = 0
    if DROPOUT:
        seed = tl.load(seed_ptr)
    dq = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    whole, stop = _keys_of(row, kv_len, CAUSAL, BLOCK_M, BLOCK_N)
    dq = _backward_keys(
        dq, q, do, lse_log2, delta, rows, index, k_ptr, v_ptr, k_row, v_row, kv_len, 0, whole,
        scale_log2, dropout_p, keep_scale, seed,
        False, CAUSAL, DROPOUT, HEAD_DIM, BLOCK_M, BLOCK_N, BLOCK_D,
    )  # fmt: skip
    dq = _backward_keys(
        dq, q, do, lse_log2, delta, rows, index, k_ptr, v_ptr, k_row, v_row, kv_len, whole, stop,
        scale_log2, dropout_p, keep_scale, seed,
        True, CAUSAL, DROPOUT, HEAD_DIM, BLOCK_M, BLOCK_N, BLOCK_D,
    )  # fmt: skip
    dq_ptr += batch * dq_batch + head * dq_head
    _write(dq_ptr, dq * scale, rows, dq_row, q_len, HEAD_DIM, BLOCK_D)


@triton.jit
def _backward_queries(
    dk, dv, k, v, cols, col, head, q_ptr, do_ptr, lse_ptr, delta_ptr, q_row, do_row, q_len,
    start, stop, scale_log2, dropout_p, keep_scale, seed,
    MASKED: tl.constexpr, DROPOUT: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """dK and dV of one tile of keys, from the queries from `start` to `stop` of one head.

    Queries and keys past the end need no mask: queries are zeros there, and so is what they
    add; keys there are rows of dK and dV that are not written.
    """
    zero = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    for row in range(start, stop, BLOCK_M):
        rows = row + tl.arange(0, BLOCK_M)
        q = _read(q_ptr, rows, q_row, q_len, HEAD_DIM, BLOCK_D)
        do = _read(do_ptr, rows, do_row, q_len, HEAD_DIM, BLOCK_D)
        lse_log2 = tl.load(lse_ptr + rows, mask=rows < q_len, other=0.0) * LOG2E
        delta = tl.load(delta_ptr + rows, mask=rows < q_len, other=0.0)
        p = tl.exp2(_dot(k, tl.trans(q), zero) * scale_log2 - lse_log2[None, :])
        if MASKED:
            p = tl.where(rows[None, :] >= cols[:, None], p, 0.0)
        dp = _dot(v, tl.trans(do), zero)
        left = p
        if DROPOUT:
            kept = tl.trans(_kept(seed, head, rows, col, dropout_p, BLOCK_M, BLOCK_N))
            left = tl.where(kept, p, 0.0)
            dp = tl.where(kept, dp * keep_scale, 0.0)
        dv = _dot(left.to(do.dtype), do, dv)
        ds = p * (dp - delta[None, :])
        dk = _dot(ds.to(q.dtype), q, dk)
    return dk, dv


@triton.jit
def backward_key(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr, seed_ptr,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
    do_batch, do_head, do_row, dk_batch, dk_head, dk_row,
    heads, q_len, kv_len, scale, scale_log2, dropout_p, keep_scale,
    GROUP: tl.constexpr, CAUSAL: tl.constexpr, DROPOUT: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Own a tile of keys: dK and dV, over all query heads of the group."""
    tiles = tl.cdiv(kv_len, BLOCK_N)
    col = tl.program_id(0) % tiles * BLOCK_N
    index = (tl.program_id(0) // tiles).to(tl.int64)
    batch, kv_head = index // (heads // GROUP), index % (heads // GROUP)
    cols = col + tl.arange(0, BLOCK_N)
    k = _read(k_ptr + batch * k_batch + kv_head * k_head, cols, k_row, kv_len, HEAD_DIM, BLOCK_D)
    v = _read(v_ptr + batch * v_batch + kv_head * v_head, cols, v_row, kv_len, HEAD_DIM, BLOCK_D)
    seed = 0
    if DROPOUT:
        seed = tl.load(seed_ptr)
    dk = tl.zeros([BLOCK_N, BLOCK_D], dtype=tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_D], dtype=tl.float32)
    first, whole, stop = _queries_of(col, q_len, CAUSAL, BLOCK_M, BLOCK_N)
    for member in range(GROUP):
        head = kv_head * GROUP + member
        row_ptr = (batch * heads + head) * q_len
        q_at, do_at = batch * q_batch + head * q_head, batch * do_batch + head * do_head
        dk, dv = _backward_queries(
            dk, dv, k, v, cols, col, batch * heads + head, q_ptr + q_at, do_ptr + do_at,
            lse_ptr + row_ptr, delta_ptr + row_ptr, q_row, do_row, q_len,
            first, whole, scale_log2, dropout_p, keep_scale, seed,
            True, DROPOUT, HEAD_DIM, BLOCK_M, BLOCK_N, BLOCK_D,
        )  # fmt: skip
        dk, dv = _backward_queries(
            dk, dv, k, v, cols, col, batch * heads + head, q_ptr + q_at, do_ptr + do_at,
            lse_ptr + row_ptr, delta_ptr + row_ptr, q_row, do_row, q_len,
            whole, stop, scale_log2, dropout_p, keep_scale, seed,
            False, DROPOUT, HEAD_DIM, BLOCK_M, BLOCK_N, BLOCK_D,
        )  # fmt: skip
    at = batch * dk_batch + kv_head * dk_head
    _write(dk_ptr + at, dk * scale, cols, dk_row, kv_len, HEAD_DIM, BLOCK_D)
    _write(dv_ptr + at, dv * keep_scale, cols, dk_row, kv_len, HEAD_DIM, BLOCK_D)


@triton.jit
def dropout_mask(
    mask_ptr, seed_ptr, q_len, kv_len, dropout_p, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Write M as the other kernels draw it."""
    tiles = tl.cdiv(kv_len, BLOCK_N)
    strip = tl.program_id(0) // tiles
    strips = tl.cdiv(q_len, BLOCK_M)
    rows = strip % strips * BLOCK_M + tl.arange(0, BLOCK_M)
    head = (strip // strips).to(tl.int64)
    col = tl.program_id(0) % tiles * BLOCK_N
    cols = col + tl.arange(0, BLOCK_N)
    kept = _kept(tl.load(seed_ptr), head, rows, col, dropout_p, BLOCK_M, BLOCK_N)
    offsets = (head * q_len + rows)[:, None] * kv_len + cols[None, :]
    inside = (rows[:, None] < q_len) & (cols[None, :] < kv_len)
    tl.store(mask_ptr + offsets, kept, mask=inside)
