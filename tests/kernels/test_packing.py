"""Packing and unpacking, bit for bit those of `Tensor.to`, and the tables of many tensors."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fxzero.errors import KernelError
from fxzero.kernels.multi_tensor import BLOCK, _send_as_arguments, lay_out, table
from fxzero.kernels.packing import (
    _bands,
    _interleave,
    cast_pack,
    cast_pack_reference,
    packed_offsets,
    unpack,
    unpack_into,
    unpack_reference,
)
from tests.kernels.checking import DEVICE, DTYPES, check_close, each_dtype, random

SHAPES = [(), (1,), (31,), (0,), (127,), (10, 100), (4097,), (3, 0)]

# numpy warns of numbers that are not finite, in the interpreter.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")


def mixed(shapes: list[tuple[int, ...]] = SHAPES) -> list[Tensor]:
    """Tensors of one dtype after the other."""
    return [random(math.prod(s), dtype=DTYPES[i % 3]).view(s) for i, s in enumerate(shapes)]


def hard(dtype: torch.dtype) -> Tensor:
    """Numbers that are hard to round: of all exponents, halfway, subnormal, not finite."""
    exponents = torch.arange(-149, 128, device=DEVICE).double()
    numbers = torch.cat([torch.exp2(exponents) * m for m in (1, 1.00390625, 1.01171875, 1.9999)])
    special = torch.tensor([0.0, float("inf"), float("nan")], dtype=torch.double, device=DEVICE)
    numbers = torch.cat([numbers, special]).to(dtype)
    return torch.cat([numbers, -numbers])


def same(found: Tensor, expected: Tensor) -> None:
    """See that numbers are the same, signs of zeros included; one NaN is as good as another."""
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    numbers = ~expected.isnan()
    assert torch.equal(found.signbit() & numbers, expected.signbit() & numbers)


@each_dtype
@pytest.mark.parametrize("align", [1, 8])
def test_pack_and_unpack(dtype: torch.dtype, align: int) -> None:
    tensors = mixed()
    buffer = cast_pack(tensors, dtype, align=align)
    starts, length = packed_offsets(tensors, align)
    assert buffer.shape == (length,)
    expected = torch.zeros(length, dtype=dtype, device=DEVICE)
    for start, tensor in zip(starts, tensors, strict=True):
        assert start % align == 0
        expected[start : start + tensor.numel()] = tensor.to(dtype).flatten()
    same(buffer, expected)
    same(cast_pack_reference(tensors, dtype, align), expected)
    shapes, dtypes = [t.shape for t in tensors], [t.dtype for t in tensors]
    for made, tensor in zip(unpack(buffer, shapes, dtypes, align=align), tensors, strict=True):
        same(made, tensor.to(dtype).to(tensor.dtype))
    for made, tensor in zip(unpack(buffer, shapes, align=align), tensors, strict=True):
        same(made, tensor.to(dtype))


@each_dtype
@pytest.mark.parametrize("source", DTYPES)
def test_every_kind_of_number_is_rounded_as_torch_does(
    source: torch.dtype, dtype: torch.dtype
) -> None:
    numbers = hard(source)
    same(cast_pack([numbers], dtype), numbers.to(dtype))
    same(unpack(numbers, [numbers.shape], dtype)[0], numbers.to(dtype))


@each_dtype
@pytest.mark.parametrize("on_device", [False, True], ids=["host", "device"])
def test_scale(dtype: torch.dtype, on_device: bool) -> None:
    tensors = mixed([(), (31,), (1500,)])
    scale: Any = torch.tensor(0.3, device=DEVICE) if on_device else 0.3
    buffer = cast_pack(tensors, dtype, scale=scale)
    wide = [t.double() for t in tensors]
    # One product, of a scale that is rounded to float32.
    bound = {"operations": 2, "scale": max(float(t.abs().max()) for t in wide)}
    check_close(buffer, cast_pack_reference(wide, torch.float64, scale=0.3), **bound)
    made = unpack(buffer, [t.shape for t in tensors], dtype, scale=scale)
    expected = unpack_reference(
        buffer.double(), [t.shape for t in tensors], [torch.float64] * 3, scale=0.3
    )
    for one, other in zip(made, expected, strict=True):
        check_close(one, other, **bound)


def with_rows() -> list[Tensor]:
    """Tensors that are not contiguous, but whose rows are, and others."""
    return [
        random(40, 50)[:, 3:37],
        random(70),
        random(6, 7, 8, dtype=torch.bfloat16)[1:5, :, :],
        random(6, 7, 8, dtype=torch.float16)[:, 2:5, :],
        random(100)[::3],
    ]


@each_dtype
def test_tensors_with_gaps_are_packed_where_they_lie(dtype: torch.dtype) -> None:
    others = [random(8, 4).t(), random(5, 6, 7).permute(1, 0, 2), random(1, 9).expand(5, 9)]
    tensors = with_rows() + others
    same(cast_pack(tensors, dtype, align=4), cast_pack_reference(tensors, dtype, 4))


def test_tensors_with_gaps_are_unpacked_where_they_lie() -> None:
    tensors = with_rows()
    buffer = random(packed_offsets(tensors, 2)[1])
    wholes = [torch.tensor([], dtype=t.dtype, device=DEVICE).set_(t.untyped_storage())
              for t in tensors]  # fmt: skip
    before = [w.clone() for w in wholes]
    expected = unpack_reference(buffer, [t.shape for t in tensors], [t.dtype for t in tensors], 2)
    unpack_into(buffer, tensors, align=2)
    for tensor, value, whole, old in zip(tensors, expected, wholes, before, strict=True):
        same(tensor, value)
        assert int((whole != old).sum()) <= tensor.numel()


def test_columns_of_one_matrix_are_told_apart() -> None:
    whole = torch.zeros(6, 10, device=DEVICE)
    buffer = random(60)
    unpack_into(buffer, [whole[:, :4], whole[:, 4:]])
    same(whole, torch.cat([buffer[:24].view(6, 4), buffer[24:].view(6, 6)], dim=1))


def test_into_a_buffer_that_is_there() -> None:
    tensors = mixed([(31,), (), (5, 5)])
    out = torch.full((80,), 7.0, device=DEVICE, dtype=torch.bfloat16)
    kept = [t.clone() for t in tensors]
    found = cast_pack(tensors, torch.bfloat16, out=out[:72], align=8)
    assert found.data_ptr() == out.data_ptr()
    same(found, cast_pack_reference(tensors, torch.bfloat16, 8))
    assert bool((out[72:] == 7).all())
    assert all(torch.equal(one, other) for one, other in zip(tensors, kept, strict=True))


def test_a_buffer_that_is_not_aligned() -> None:
    tensors = mixed([(1030,), (31,)])
    out = torch.zeros(1062, device=DEVICE)[1:]
    same(cast_pack(tensors, torch.float32, out=out), cast_pack_reference(tensors, torch.float32))
    made = unpack(out, [t.shape for t in tensors], torch.bfloat16)
    same(made[0], tensors[0].bfloat16())


def test_nothing_to_pack() -> None:
    assert cast_pack([random(0), random(3, 0)], torch.float16).shape == (0,)
    assert unpack(random(0), []) == []
    assert [t.shape for t in unpack(random(0), [(0,), (3, 0)])] == [(0,), (3, 0)]
    unpack_into(random(0), [])


def test_gradients_in_float64() -> None:
    tensors = [random(*s).double().requires_grad_() for s in ((3,), (2, 2), (1,))]
    shapes = [t.shape for t in tensors]

    def packed(*tensors: Tensor) -> Tensor:
        return cast_pack(tensors, torch.float64, align=4, scale=0.5)

    def unpacked(buffer: Tensor) -> tuple[Tensor, ...]:
        return tuple(unpack(buffer, shapes, align=4, scale=0.5))

    assert torch.autograd.gradcheck(packed, tuple(tensors))
    assert torch.autograd.gradcheck(unpacked, (random(12).double().requires_grad_(),))


@each_dtype
def test_gradients(dtype: torch.dtype) -> None:
    tensors = [t.requires_grad_() for t in mixed([(31,), (4, 5), ()])]
    scale = torch.tensor(0.5, device=DEVICE)
    buffer = cast_pack(tensors, dtype, align=16, scale=scale)
    grad = random(64 + 16, dtype=dtype)
    grads = torch.autograd.grad(buffer, tensors, grad)
    starts, _ = packed_offsets(tensors, 16)
    for start, tensor, found in zip(starts, tensors, grads, strict=True):
        part = grad[start : start + tensor.numel()].view(tensor.shape)
        # Halving is exact, but for what is subnormal in float16: none of these is.
        same(found, (part.float() * 0.5).to(tensor.dtype))
    grads = torch.autograd.grad(cast_pack(tensors, dtype).sum(), tensors)
    assert all(torch.equal(g, torch.ones_like(g)) for g in grads)
    leaf = buffer.detach().requires_grad_()
    first, *_ = unpack(leaf, [t.shape for t in tensors], torch.float32, align=16)
    (found,) = torch.autograd.grad(first, leaf, torch.ones_like(first))
    assert torch.equal(found, torch.arange(80, device=DEVICE).lt(31).to(dtype))


def test_operators() -> None:
    ops = torch.ops.fxzero
    tensors = [t.requires_grad_() for t in mixed([(31,), (4, 5), ()])]
    plain = [t.detach() for t in tensors]
    sizes = [31, 20, 1]
    scale = torch.tensor(0.5, device=DEVICE)
    buffer = random(80)
    check = torch.library.opcheck
    check(ops.cast_pack.default, (tensors, torch.bfloat16, 16, scale, 1.0))
    check(ops.cast_pack.default, (plain, torch.float32, 1, None, 2.0))
    check(ops.unpack.default, (buffer.requires_grad_(), sizes, [0, 1, 2], 16, scale, 1.0))
    buffer.requires_grad_(False)
    check(ops.cast_pack_into.default, (buffer, plain, 16, None, 1.0))
    check(ops.unpack_into.default, (buffer, plain, 16, scale, 1.0))


def test_compiled() -> None:
    def there_and_back(tensors: list[Tensor], into: list[Tensor]) -> list[Tensor]:
        buffer = cast_pack(tensors, torch.bfloat16, align=8)
        unpack_into(buffer, into, align=8)
        made = unpack(buffer * 2, [t.shape for t in tensors], torch.float32, align=8)
        return [*made, *(t + 1 for t in into)]

    tensors = mixed([(31,), (4, 5), ()])
    expected = there_and_back(tensors, [torch.empty_like(t) for t in tensors])
    compiled = torch.compile(there_and_back, fullgraph=True, backend="aot_eager")
    into = [torch.empty_like(t) for t in tensors]
    for found, other in zip(compiled(tensors, into), expected, strict=True):
        same(found, other)
    for found, tensor in zip(into, tensors, strict=True):
        same(found, tensor.bfloat16().to(tensor.dtype))


def test_plain_torch_does_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    tensors = [t.cpu() for t in mixed([(31,), (4, 5), ()])]
    buffer = cast_pack(tensors, torch.bfloat16, align=8, scale=torch.tensor([2.0]))
    same(buffer, cast_pack_reference(tensors, torch.bfloat16, 8, 2.0))
    into = [torch.zeros_like(t) for t in tensors]
    unpack_into(buffer, into, align=8, scale=0.5)
    for found, tensor in zip(into, tensors, strict=True):
        same(found, tensor.bfloat16().to(tensor.dtype))


def wrong(name: str, **changes: Any) -> Any:
    return pytest.param(changes, name, id=f"{name}-{next(iter(changes))}")


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        wrong("tensors", tensors=[]),
        wrong(r"tensors\[1\]", tensors=[torch.zeros(3), torch.zeros(3, dtype=torch.int32)]),
        wrong(r"tensors\[1\]", tensors=[torch.zeros(3), torch.zeros(3, device="meta")]),
        wrong("dtype", dtype=torch.int8),
        wrong(r"tensors\[1\]", tensors=[torch.zeros(3), [1.0, 2.0]]),
        wrong(r"tensors\[0\]", tensors=[torch.zeros(3).to_sparse()]),
        wrong("scale", scale="2"),
        wrong("align", align=0),
        wrong("align", align=1.5),
        wrong("scale", scale=torch.ones(2)),
        wrong("out", out=torch.zeros(9)),
        wrong("out", out=torch.zeros(8, dtype=torch.float16)),
        wrong("out", out=torch.zeros(16)[::2]),
    ],
)
def test_wrong_arguments_to_pack(changes: dict[str, Any], name: str) -> None:
    arguments: dict[str, Any] = {"tensors": [torch.zeros(3), torch.zeros(5)]}
    arguments |= {"dtype": torch.float32, **changes}
    with pytest.raises(KernelError, match=f"cast_pack: {name}"):
        cast_pack(**arguments)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        wrong("buffer", buffer=torch.zeros(9)),
        wrong("buffer", buffer=torch.zeros(8, dtype=torch.int64)),
        wrong(r"shapes\[1\]", shapes=[(3,), (-5,)]),
        wrong(r"shapes\[0\]", shapes=[(-2, -4)]),
        wrong(r"shapes\[0\]", shapes=[8]),
        wrong("buffer", buffer=[0.0] * 8),
        wrong("dtype", dtype=[torch.float32]),
        wrong("dtype", dtype=torch.int8),
        wrong("align", align=-1),
        wrong("scale", scale=torch.ones(2)),
    ],
)
def test_wrong_arguments_to_unpack(changes: dict[str, Any], name: str) -> None:
    arguments = {"buffer": torch.zeros(8), "shapes": [(3,), (5,)], **changes}
    with pytest.raises(KernelError, match=f"unpack: {name}"):
        unpack(**arguments)


@pytest.mark.parametrize(
    ("tensors", "name"),
    [
        ([torch.zeros(3), torch.zeros(4)], "buffer"),
        ([torch.zeros(3), torch.zeros(5).int()], r"tensors\[1\]"),
        ([torch.zeros(2, 2).t(), torch.zeros(4)], r"tensors\[0\]"),
        ([torch.zeros(1).expand(4), torch.zeros(4)], r"tensors\[0\]"),
    ],
)
def test_wrong_arguments_to_unpack_into(tensors: list[Tensor], name: str) -> None:
    with pytest.raises(KernelError, match=f"unpack_into: {name}"):
        unpack_into(torch.zeros(8), tensors)


def test_memory_that_is_shared_is_refused() -> None:
    memory = torch.zeros(16, device=DEVICE)
    with pytest.raises(KernelError, match="share 16 bytes"):
        cast_pack([memory[4:12]], torch.float32, out=memory[:8])
    with pytest.raises(KernelError, match="share 16 bytes"):
        unpack_into(torch.zeros(16, device=DEVICE), [memory[:8], memory[4:12]])
    with pytest.raises(KernelError, match="share 32 bytes"):
        unpack_into(memory[:8], [memory[:8]])
    with pytest.raises(KernelError, match="out and tensors must be in memory of their own"):
        cast_pack([memory.view(4, 4)[:, :2]], torch.float32, out=memory[3:11])
    # Reading it twice is no harm.
    same(cast_pack([memory[:4], memory[2:6]], torch.float32), torch.zeros(8, device=DEVICE))


def test_one_number_expanded_ends_before_the_tensors_behind_it() -> None:
    memory = torch.arange(9.0, device=DEVICE) + 1
    number, tensors = memory[:1].expand(8), [memory[1:5], memory[5:]]
    torch.ops.fxzero.unpack_into(number, tensors, 1, None, 3.0)
    same(memory, torch.tensor([1.0, *[3.0] * 8], device=DEVICE))


MATRIX = (6, 8)

INTERLEAVED = {
    "columns": lambda m: [m[:, :2], m[:, 2:3], m[:, 3:8]],
    "columns, backwards": lambda m: [m[:, 5:], m[:, :5]],
    "columns and rows": lambda m: [m[:3, :4], m[3], m[4:, 2:7]],
    "columns, and some of a row": lambda m: [m[:, :3], m[2, 4:8], m[5, 3:4]],
    "from one row to the next": lambda m: [m.view(-1)[6:46].view(5, 8)[:, :4], m[1:, 2:6]],
    "every other row": lambda m: [m[::2], m[1::2]],
    "columns of narrower numbers": lambda m: [m[:, :2], m.view(torch.bfloat16)[:, 4:9]],
    "no elements": lambda m: [m[:, :2], m[:0, :2], m[:, 2:3]],
}

OVERLAPPING = {
    "columns": lambda m: [m[:, :2], m[:, 1:2]],
    "columns, backwards": lambda m: [m[:, 4:], m[:, :5]],
    "twice the same": lambda m: [m[:, :2], m[:, :2]],
    "not neighbours in order": lambda m: [m[:, :6], m[:, 6:7], m[1:, 5:6]],
    "columns, and a row": lambda m: [m[:, :3], m[2]],
    "columns, and some of a row": lambda m: [m[:, :3], m[5, 2:4]],
    "a row, and columns": lambda m: [m[0], m[:, :3]],
    "the last of a row": lambda m: [m[:, :3], m.view(-1)[39:41]],
    "from one row to the next": lambda m: [m.view(-1)[6:46].view(5, 8)[:, :4], m[1:, 1:5]],
    "columns of narrower numbers": lambda m: [m[:, :2], m.view(torch.bfloat16)[:, 3:9]],
    "other strides": lambda m: [m[::2, :4], m[:, 3:6]],
    "other strides, apart": lambda m: [m[::2, :4], m[:, 4:6]],
}


@pytest.mark.parametrize("views", INTERLEAVED.values(), ids=INTERLEAVED)
def test_tensors_in_the_gaps_of_each_other(views: Callable[[Tensor], list[Tensor]]) -> None:
    matrix = torch.zeros(MATRIX, device=DEVICE)
    tensors = views(matrix)
    buffer = torch.arange(1.0, 1 + sum(t.numel() for t in tensors), device=DEVICE)
    unpack_into(buffer, tensors)
    same(cast_pack(tensors, torch.float32), buffer)


@pytest.mark.parametrize("views", OVERLAPPING.values(), ids=OVERLAPPING)
@pytest.mark.parametrize("interpreted", ["1", "0"])
def test_tensors_that_share_some_of_their_rows(
    views: Callable[[Tensor], list[Tensor]], interpreted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if DEVICE == "cpu":
        monkeypatch.setenv("TRITON_INTERPRET", interpreted)
    matrix = torch.zeros(MATRIX, device=DEVICE)
    tensors = views(matrix)
    buffer = torch.ones(sum(t.numel() for t in tensors), device=DEVICE)
    with pytest.raises(KernelError, match="buffer and tensors must be in memory of their own"):
        unpack_into(buffer, tensors)
    assert not bool(matrix.any())


def test_a_buffer_in_the_rows_of_a_tensor() -> None:
    memory = torch.zeros(64, device=DEVICE)
    rows = memory[:40].view(5, 8)[:, :3]
    with pytest.raises(KernelError, match="buffer and tensors must be in memory of their own"):
        unpack_into(memory[30:45], [rows])
    unpack_into(memory[35:50], [rows])


def test_rows_that_interleave_are_told_exactly() -> None:
    # Against the elements themselves, for all pairs of some columns, starts and lengths.
    places = torch.arange(40)
    layouts = itertools.product((0, 1, 5, 8, 13), (1, 3, 8), (1, 2, 3))
    views = [places.as_strided((rows, columns), (8, 1), start) for start, columns, rows in layouts]
    for one, other in itertools.product(views, views):
        (first,), (second,) = _bands([one]), _bands([other])
        apart = not set(one.flatten().tolist()) & set(other.flatten().tolist())
        assert _interleave(first, second) == apart, (first, second)


# Tables.


def test_layout_gives_every_block_to_one_program() -> None:
    sizes = (0, 1, BLOCK, BLOCK + 1, 0, 3 * BLOCK - 1)
    layout = lay_out(sizes, torch.device(DEVICE), align=1)
    blocks = [(i, j) for i, n in enumerate(sizes) for j in range(-(-n // BLOCK))]
    assert [tuple(pair) for pair in layout.work.tolist()] == blocks
    assert layout.sizes.tolist() == list(sizes)
    assert layout.starts.tolist() == packed_offsets([(n,) for n in sizes])[0]
    layout = lay_out(sizes, torch.device(DEVICE), align=8)
    assert layout.starts.tolist() == packed_offsets([(n,) for n in sizes], 8)[0]


def test_tables_that_travel_as_arguments_are_the_same() -> None:
    numbers = (0, 1, -1, 2**31, 2**53 + 1, 2**63 - 1, -(2**63), *range(200))
    device = torch.device(DEVICE)
    assert _send_as_arguments(numbers, device).tolist() == list(numbers)
    assert table(numbers, device).tolist() == list(numbers)
    assert table(numbers, device).data_ptr() == table(numbers, device).data_ptr()
