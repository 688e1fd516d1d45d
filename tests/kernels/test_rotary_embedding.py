"""Rotary embedding against transformers' formula in float64.

Bounds: an element is a sum of two products, three operations in float32 and one rounding. The map
is linear in cos and sin, so each product is the map with the other table at zero.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch
from torch import Tensor

from fxzero.errors import KernelError
from fxzero.kernels.rotary_embedding import rotary, rotary_reference
from tests.kernels.checking import (
    DEVICE,
    DTYPES,
    check_close,
    double,
    each_dtype,
    each_size,
    random,
)
from tests.tiers import in_two_tiers

each_pairing = pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
each_width = pytest.mark.parametrize("full", [True, False], ids=["full width", "half width"])


def tables(*shape: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Numbers in place of cosines and sines, no two of them related."""
    return random(*shape, dtype=dtype), random(*shape, dtype=dtype)


def check_rotary(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    interleaved: bool = False,
    rotary_dim: int | None = None,
) -> Tensor:
    """See that result and gradient are the reference's."""
    before = [t.detach().clone() for t in (x, cos, sin)]
    y = rotary(x, cos, sin, interleaved=interleaved, rotary_dim=rotary_dim)
    assert y.dtype is x.dtype
    dy = torch.randn_like(y)
    (dx,) = torch.autograd.grad(y, x, dy)
    assert all(torch.equal(t, old) for t, old in zip((x, cos, sin), before, strict=True))

    x64, cos64, sin64 = double(x, cos, sin)

    def both_ways(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        y = rotary_reference(x64, cos, sin, interleaved=interleaved, rotary_dim=rotary_dim)
        return y.detach(), torch.autograd.grad(y, x64, dy.double())[0]

    zeros = torch.zeros_like(cos64)
    of_cos, of_sin = both_ways(cos64, zeros), both_ways(zeros, sin64)
    for found, expected, *terms in zip(
        (y, dx), both_ways(cos64, sin64), of_cos, of_sin, strict=True
    ):
        scale = sum(t.abs() for t in terms)
        check_close(found, expected, scale=scale, operations=3)
    return y


@each_pairing
@each_dtype
@each_size
def test_sequences(interleaved: bool, dtype: torch.dtype, size: int) -> None:
    x = random(1, 2, size, 4, dtype=dtype, grad=True)
    check_rotary(x, *tables(size, 4, dtype=dtype), interleaved=interleaved)


@pytest.mark.parametrize(
    ("interleaved", "full", "dtype", "head_dim"),
    in_two_tiers([*product([False, True], [True, False], DTYPES, [2, 64, 80, 128])]),
)
def test_head_dims(interleaved: bool, full: bool, dtype: torch.dtype, head_dim: int) -> None:
    x = random(2, 3, 31, head_dim, dtype=dtype, grad=True)
    width = head_dim if full else head_dim // 2
    check_rotary(x, *tables(31, width, dtype=dtype), interleaved=interleaved)


@pytest.mark.parametrize(
    ("interleaved", "full", "batches"),
    in_two_tiers([*product([False, True], [True, False], [(), (1,), (3,)])]),
)
def test_tables(interleaved: bool, full: bool, batches: tuple[int, ...]) -> None:
    x = random(3, 2, 5, 8, grad=True)
    shape = (*batches, 5, 8 if full else 4)
    check_rotary(x, *tables(*shape), interleaved=interleaved)
    spread = (t.transpose(-1, -2) for t in tables(*batches, shape[-1], 5))
    check_rotary(x, *spread, interleaved=interleaved)
    bfloat16, float32 = tables(*shape, dtype=torch.bfloat16)[0], tables(*shape)[0]
    check_rotary(x, bfloat16, float32, interleaved=interleaved)
    if len(batches) == 1:
        same = (t.expand(3, -1, -1) for t in tables(1, *shape[1:]))
        check_rotary(x, *same, interleaved=interleaved)


def test_more_heads_than_programs() -> None:
    check_rotary(random(2, 19, 3, 4, grad=True), *tables(3, 4))


@each_pairing
@each_width
@pytest.mark.parametrize("rotary_dim", [2, 20, 64])
def test_partial_rotation(interleaved: bool, full: bool, rotary_dim: int) -> None:
    x = random(2, 3, 31, 80, grad=True)
    cos, sin = tables(31, rotary_dim if full else rotary_dim // 2)
    y = check_rotary(x, cos, sin, interleaved=interleaved, rotary_dim=rotary_dim)
    assert torch.equal(y[..., rotary_dim:], x[..., rotary_dim:])


@each_dtype
def test_formula_of_transformers(dtype: torch.dtype) -> None:
    """`apply_rotary_pos_emb` of its Llama, tables and all."""
    query = random(2, 31, 4, 64, dtype=dtype).transpose(1, 2)
    frequencies = 1.0 / 10_000 ** (torch.arange(0, 64, 2, device=DEVICE).double() / 64)
    angles = torch.arange(31, device=DEVICE).double()[None, :, None] * frequencies
    angles = torch.cat((angles, angles), dim=-1)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    q, c, s = double(query, cos, sin)
    rotated = torch.cat((-q[..., 32:], q[..., :32]), dim=-1)
    expected = q * c.unsqueeze(1) + rotated * s.unsqueeze(1)
    scale = q.abs() * c.unsqueeze(1).abs() + rotated.abs() * s.unsqueeze(1).abs()
    found = rotary(query, cos, sin)
    check_close(found, expected, scale=scale, operations=3)
    halves = cos[..., :32], sin[..., :32]
    assert torch.equal(rotary(query, *halves), found)


def test_formula_of_gptj() -> None:
    """Its rotate_every_two: pairs of neighbours, here as complex numbers."""
    x = random(2, 3, 31, 16)
    angles = random(31, 8).double()
    turns = torch.polar(torch.ones_like(angles), angles)
    expected = torch.view_as_real(torch.view_as_complex(x.double().unflatten(-1, (8, 2))) * turns)
    cos, sin = (t.repeat_interleave(2, -1) for t in (turns.real, turns.imag))
    found = rotary(x, cos.float(), sin.float(), interleaved=True)
    # The tables' own rounding is one more operation.
    check_close(found, expected.flatten(-2), scale=2 * x.abs().max(), operations=4)


@each_pairing
@pytest.mark.parametrize(
    ("layout", "dense"),
    [
        (lambda t: t.transpose(1, 2), True),
        (lambda t: t.transpose(0, 2), True),
        (lambda t: t[:, ::2], False),
        (lambda t: t[..., :4], False),
        (lambda t: t[:, :1].expand(-1, 3, -1, -1), False),
        (lambda t: t.transpose(2, 3), False),
        (lambda t: t[..., ::2], False),
    ],
    ids=["heads", "batch", "gaps", "part of a head", "one again", "head last", "elements apart"],
)
def test_layouts(interleaved: bool, layout: Callable[[Tensor], Tensor], dense: bool) -> None:
    x = layout(random(2, 3, 4, 8, grad=True))
    y = check_rotary(x, *tables(x.shape[2], x.shape[3]), interleaved=interleaved)
    assert y.stride(-1) == 1
    assert not dense or y.stride() == x.stride()


def test_query_of_a_fused_projection_keeps_the_order_of_its_dims() -> None:
    fused = random(2, 31, 3, 4, 8, grad=True)
    query = fused[:, :, 0].transpose(1, 2)
    y = check_rotary(query, *tables(31, 8))
    assert y.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("shape", [(0, 2, 3, 4), (2, 0, 3, 4), (2, 2, 0, 4)], ids=str)
def test_nothing(shape: tuple[int, ...]) -> None:
    x = random(*shape, grad=True)
    y = rotary(x, *tables(shape[2], 4))
    assert y.shape == torch.autograd.grad(y, x, torch.empty_like(y))[0].shape == shape


def test_gradient_turns_back() -> None:
    """The transpose of a rotation is its inverse."""
    angles = random(31, 4)
    x = random(2, 3, 31, 8, grad=True)
    y = rotary(x, angles.cos(), angles.sin())
    (back,) = torch.autograd.grad(y, x, y.detach())
    # Two passes; a rotation of float32 tables keeps lengths to within their rounding.
    check_close(back, x.detach().double(), scale=4 * x.abs().max(), roundings=2, operations=8)


@each_pairing
def test_rotary_without_triton(interleaved: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU tensors where nothing interprets."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr("tests.kernels.checking.DEVICE", "cpu")
    for dtype in (torch.float32, torch.bfloat16):
        x = random(2, 31, 3, 80, dtype=dtype, grad=True).transpose(1, 2)
        for width in (20, 10):
            cos_sin = tables(31, width, dtype=dtype)
            y = check_rotary(x, *cos_sin, interleaved=interleaved, rotary_dim=20)
            assert y.stride() == x.stride()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("interleaved", "full", "transposed"),
    [(False, True, False), (True, False, False), (False, False, True), (True, True, True)],
)
def test_operator(interleaved: bool, full: bool, dtype: torch.dtype, transposed: bool) -> None:
    """Backward is the same operator, so both ways of it are seen here."""
    cos, sin = tables(5, 6 if full else 3, dtype=dtype)
    x = random(2, 5, 3, 4, 8, dtype=dtype)[:, :, 0].transpose(1, 2).requires_grad_()
    inputs = (x, cos, sin, 6, interleaved, transposed)
    torch.library.opcheck(torch.ops.fxzero.rotary, inputs)


@each_pairing
@each_width
def test_gradients_in_float64(interleaved: bool, full: bool) -> None:
    cos, sin = tables(3, 4 if full else 2, dtype=torch.float64)

    def run(x: Tensor) -> Tensor:
        return rotary(x, cos, sin, interleaved=interleaved, rotary_dim=4)

    x = random(2, 3, 2, 6, dtype=torch.float64, grad=True).transpose(1, 2)
    assert torch.autograd.gradcheck(run, x)
    assert torch.autograd.gradgradcheck(run, x)


@each_pairing
def test_compiled(interleaved: bool) -> None:
    cos, sin = tables(31, 8)

    def run(x: Tensor) -> Tensor:
        return rotary(x, cos, sin, interleaved=interleaved)

    fused = random(2, 31, 3, 4, 8, grad=True)
    dy = random(2, 4, 31, 8)
    results = []
    for call in (run, torch.compile(run, fullgraph=True, backend="aot_eager")):
        y = call(fused[:, :, 0].transpose(1, 2))
        results.append([y, *torch.autograd.grad(y, fused, dy)])
    for eager, compiled in zip(*results, strict=True):
        assert torch.equal(eager, compiled)
        assert eager.stride() == compiled.stride()


@pytest.mark.parametrize(
    ("argument", "call"),
    [
        ("x", lambda x, t: rotary(x[0], t, t)),
        ("x", lambda x, t: rotary(x.tolist(), t, t)),
        ("x", lambda x, t: rotary(x.to_sparse(), t, t)),
        ("interleaved", lambda x, t: rotary(x, t, t, interleaved="no")),
        ("rotary_dim", lambda x, t: rotary(x, t, t, rotary_dim=4.0)),
        ("x", lambda x, t: rotary(x[..., :7], t, t)),
        ("x", lambda x, t: rotary(x[..., :0], t, t)),
        ("x", lambda x, t: rotary(x.int(), t, t)),
        ("rotary_dim", lambda x, t: rotary(x, t, t, rotary_dim=3)),
        ("rotary_dim", lambda x, t: rotary(x, t, t, rotary_dim=0)),
        ("rotary_dim", lambda x, t: rotary(x, t, t, rotary_dim=10)),
        ("cos", lambda x, t: rotary(x, t[0], t)),
        ("cos", lambda x, t: rotary(x, t[:, :2], t)),
        ("cos", lambda x, t: rotary(x, t[:1], t)),
        ("cos", lambda x, t: rotary(x, t.expand(3, -1, -1), t)),
        ("cos", lambda x, t: rotary(x, t.int(), t)),
        ("cos", lambda x, t: rotary(x, t.to("meta"), t)),
        ("cos", lambda x, t: rotary(x, t.clone().requires_grad_(), t)),
        ("sin", lambda x, t: rotary(x, t, t[:, :4])),
        ("sin", lambda x, t: rotary(x, t, None)),
        ("sin", lambda x, t: rotary(x, t, t.int())),
        ("sin", lambda x, t: rotary(x, t, t.to("meta"))),
        ("sin", lambda x, t: rotary(x, t, t.clone().requires_grad_())),
    ],
)
def test_argument_that_does_not_fit(argument: str, call: Callable[..., Tensor]) -> None:
    with pytest.raises(KernelError, match=rf"rotary: {argument} must be"):
        call(torch.zeros(2, 3, 5, 8, device=DEVICE), torch.zeros(5, 8, device=DEVICE))
