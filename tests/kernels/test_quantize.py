"""Block-wise quantization, bit for bit that of torch, and its error within what was derived."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fxzero.errors import KernelError
from fxzero.kernels.quantize import (
    LARGEST,
    dequantize_blockwise,
    dequantize_blockwise_reference,
    quantize_blockwise,
    quantize_blockwise_reference,
)
from tests.kernels.checking import DEVICE, each_dtype, each_size, random, unit_roundoff

each_format = pytest.mark.parametrize("format", list(LARGEST), ids=["int8", "e4m3", "e5m2"])

INF, NAN = float("inf"), float("nan")

# numpy warns of numbers that are not finite, in the interpreter.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")


def spread(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Numbers of many magnitudes: blocks whose small numbers are subnormal in 8 bits."""
    return random(*shape, dtype=dtype) * torch.exp2(4 * random(*shape)).to(dtype)


def same(found: Tensor, expected: Tensor) -> None:
    assert found.dtype == expected.dtype
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[found.element_size()]
    assert torch.equal(found.view(bits), expected.view(bits))


@each_format
@each_size
@pytest.mark.parametrize("block", [256, 100])
def test_bits_are_those_of_torch(format: torch.dtype, size: int, block: int) -> None:
    x = spread(size)
    kept = x.clone()
    codes, scales = quantize_blockwise(x, format, block)
    expected, scales_expected = quantize_blockwise_reference(x, format, block)
    same(codes, expected)
    same(scales, scales_expected)
    same(x, kept)
    # The formula itself, without what the reference does about zeros and the like.
    rows = torch.nn.functional.pad(x, (0, -size % block)).view(-1, block)
    largest = torch.tensor(LARGEST[format], device=DEVICE)
    quotients = rows / (rows.abs().amax(1) / largest)[:, None]
    quotients = quotients.round() if format is torch.int8 else quotients
    same(codes, quotients.to(format).flatten()[:size])


@each_format
@each_dtype
def test_dtypes_and_strides(format: torch.dtype, dtype: torch.dtype) -> None:
    x = spread(31, 40, dtype=dtype).t()
    codes, scales = quantize_blockwise(x, format, 64)
    expected = quantize_blockwise_reference(x.contiguous(), format, 64)
    same(codes, expected[0])
    same(scales, expected[1])
    for out in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        found = dequantize_blockwise(codes.t().contiguous().t(), scales, out, block=64)
        reference = dequantize_blockwise_reference(*expected, out, 64)
        assert found.dtype is out
        assert torch.equal(found, reference)


@each_format
@each_size
def test_error_of_a_round_trip(format: torch.dtype, size: int) -> None:
    """With s the block's scale, and q the quotient x / s, which is at most the largest code:

    int8: q is off by half at most. Float8: by u · |q|, and where it is subnormal by half of the
    smallest number. To that, three roundings of float32: of s, of q and of the product.
    """
    x = spread(size)
    codes, scales = quantize_blockwise(x, format)
    found = dequantize_blockwise(codes, scales)
    scale = scales.double().repeat_interleave(256)[:size]
    x = x.double()
    if format is torch.int8:
        bound = 0.5 * scale
    else:
        smallest = torch.finfo(format).smallest_normal * torch.finfo(format).eps
        bound = torch.maximum(unit_roundoff(format) * x.abs(), smallest / 2 * scale)
    bound += 3 * unit_roundoff(torch.float32) * LARGEST[format] * scale
    error = (found.double() - x).abs()
    assert bool((error <= bound).all())
    # The largest element of each block is a code, and comes back but for float32's roundings.
    largest = x.abs() >= LARGEST[format] * scale * (1 - 2**-20)
    assert int(largest.sum()) >= len(scales)
    assert bool((error[largest] <= 3 * unit_roundoff(torch.float32) * x[largest].abs()).all())


@each_format
def test_every_code_comes_back(format: torch.dtype) -> None:
    codes = torch.arange(256, device=DEVICE).to(torch.uint8).view(format)
    scales = torch.tensor([0.5, 3.0], device=DEVICE)
    found = dequantize_blockwise(codes, scales, block=128)
    expected = codes.float() * scales.repeat_interleave(128)
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@each_format
def test_halfway_goes_to_even_and_signs_stay(format: torch.dtype) -> None:
    # The largest element makes the scale 1, so that the others are the quotients.
    ends = torch.tensor([LARGEST[format], 0.0, -0.0, 0.5, 1.5, -2.5, 126.5], device=DEVICE)
    codes = torch.arange(128, device=DEVICE).to(torch.uint8).view(format).float()
    codes = codes[codes.isfinite() & (codes <= LARGEST[format])].sort().values
    x = torch.cat([ends, (codes[1:] + codes[:-1]) / 2, -(codes[1:] + codes[:-1]) / 2])
    found, scales = quantize_blockwise(x, format, 512)
    assert scales.tolist() == [1.0]
    expected = x.round() if format is torch.int8 else x
    same(found, expected.to(format))


@each_format
def test_blocks_that_have_no_scale(format: torch.dtype) -> None:
    x = spread(5 * 64 + 3)
    x[:64] = 0
    x[64:128] *= 1e-44
    x[130], x[200], x[-1] = INF, NAN, -INF
    codes, scales = quantize_blockwise(x, format, 64)
    same(codes, quantize_blockwise_reference(x, format, 64)[0])
    assert scales[0] == 0
    assert scales[2] == INF
    assert bool(scales[3].isnan())
    assert scales[5] == INF
    found = dequantize_blockwise(codes, scales, block=64)
    assert bool((found[:64] == 0).all())
    assert bool(found[64:128].isfinite().all())
    assert bool(found[128:256].isnan().all())
    assert bool(found[256:320].isfinite().all())
    assert bool(found[320:].isnan().all())
    for dtype in (torch.bfloat16, torch.float16):
        narrow = dequantize_blockwise(codes, scales, dtype, block=64)
        assert torch.equal(narrow.isnan(), found.isnan())


@each_format
def test_a_scale_that_is_subnormal(format: torch.dtype) -> None:
    # 1.45 steps of float32's smallest number are rounded to one, and the quotient is too large.
    x = torch.tensor([1.45, -1.45], dtype=torch.float64, device=DEVICE) * LARGEST[format] * 2**-149
    codes, scales = quantize_blockwise(x.float(), format)
    assert scales.double().tolist() == [2**-149]
    assert codes.float().tolist() == [LARGEST[format], -LARGEST[format]]


@each_format
def test_no_gradient_is_asked_for(format: torch.dtype) -> None:
    codes, scales = quantize_blockwise(spread(100).requires_grad_(), format)
    assert not codes.requires_grad
    assert not scales.requires_grad


def test_float64_beyond_float32_is_infinite() -> None:
    x = torch.tensor([1.0, 1e300], dtype=torch.float64, device=DEVICE)
    codes, scales = quantize_blockwise(x, block=1)
    assert scales[1] == INF
    assert dequantize_blockwise(codes, scales, block=1).isnan().tolist() == [False, True]


def test_shapes() -> None:
    x = spread(6, 50)
    codes, scales = quantize_blockwise(x, block=60)
    assert codes.shape == x.shape
    assert scales.shape == (5,)
    found = dequantize_blockwise(codes.flatten(), scales, shape=(3, 100), block=60)
    same(found.view(6, 50), dequantize_blockwise(codes, scales, block=60))
    empty = quantize_blockwise(random(3, 0), torch.float8_e5m2)
    assert [t.shape for t in empty] == [(3, 0), (0,)]
    assert dequantize_blockwise(*empty, torch.float16).shape == (3, 0)
    alone, _ = quantize_blockwise(torch.tensor(-3.0, device=DEVICE))
    assert alone.shape == ()
    assert int(alone) == -127
    long = spread(5000)
    same(quantize_blockwise(long, block=4096)[0], quantize_blockwise_reference(long, block=4096)[0])


@each_format
def test_plain_torch_does_the_same(format: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    x = spread(300).cpu()
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    codes, scales = quantize_blockwise(x.double(), format)
    expected = quantize_blockwise_reference(x, format)
    same(codes, expected[0])
    same(scales, expected[1])
    same(dequantize_blockwise(codes, scales), dequantize_blockwise_reference(codes, scales))


@each_format
def test_operators(format: torch.dtype) -> None:
    x = spread(10, 30)
    codes, scales = quantize_blockwise(x, format)
    ops = torch.ops.fxzero
    torch.library.opcheck(ops.quantize_blockwise.default, (x, format, 256))
    arguments = (codes, scales, torch.bfloat16, (300,), 256)
    # To see whether an operator writes its arguments, opcheck multiplies them, which torch does
    # not do with floats of 8 bits.
    checks = ("test_schema",) if format is torch.int8 else ()
    checks += ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(ops.dequantize_blockwise.default, arguments, test_utils=checks)


@each_format
def test_compiled(format: torch.dtype) -> None:
    def round_trip(x: Tensor) -> Tensor:
        codes, scales = quantize_blockwise(x * 2, format)
        return dequantize_blockwise(codes, scales, x.dtype) + 1

    x = spread(7, 100)
    compiled = torch.compile(round_trip, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), round_trip(x))


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"x": torch.zeros(3, dtype=torch.int32)}, "x"),
        ({"x": torch.zeros(3), "dtype": torch.int16}, "dtype"),
        ({"x": [1.0, 2.0]}, "x"),
        ({"x": torch.zeros(3).to_sparse()}, "x"),
        ({"x": torch.zeros(3), "block": 0}, "block"),
        ({"x": torch.zeros(3), "block": 2.0}, "block"),
        ({"x": torch.zeros(3), "block": 70_000}, "block"),
    ],
)
def test_wrong_arguments_to_quantize(arguments: dict[str, Any], name: str) -> None:
    with pytest.raises(KernelError, match=f"quantize_blockwise: {name}"):
        quantize_blockwise(**arguments)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"codes": torch.zeros(300)}, "codes"),
        ({"dtype": torch.int8}, "dtype"),
        ({"scales": torch.zeros(2).half()}, "scales"),
        ({"scales": torch.zeros(3)}, "scales"),
        ({"scales": torch.zeros(2, device="meta")}, "scales"),
        ({"shape": (299,)}, "shape"),
        ({"shape": (-20, -15)}, "shape"),
        ({"shape": (300.0,)}, "shape"),
        ({"codes": [1, 2]}, "codes"),
        ({"scales": None}, "scales"),
        ({"block": -1}, "block"),
    ],
)
def test_wrong_arguments_to_dequantize(changes: dict[str, Any], name: str) -> None:
    arguments = {"codes": torch.zeros(300, dtype=torch.int8), "scales": torch.zeros(2), **changes}
    with pytest.raises(KernelError, match=f"dequantize_blockwise: {name}"):
        dequantize_blockwise(**arguments)
