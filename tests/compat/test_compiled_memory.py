"""What compiled code says that it allocates, against what torch's allocator hands out."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._functorch.aot_autograd import aot_module_simplified

from examples.benchmarks.measure import allocated_peak_bytes
from fxzero._compat import Called, held_bytes, inductor_decompositions
from fxzero.cost.workspace import attention_workspace
from tests.tiers import exhaustive


def compiled(function: Callable[..., Any], *inputs: Tensor) -> Any:
    """What Inductor makes of a function."""
    from torch._inductor.compile_fx import compile_fx_inner

    found: list[Any] = []

    def take(module: torch.fx.GraphModule, examples: list[Any]) -> Any:
        found.append(compile_fx_inner(module, examples))
        return found[0]

    def backend(module: torch.fx.GraphModule, examples: list[Any]) -> Any:
        return aot_module_simplified(
            module, examples, fw_compiler=take, decompositions=inductor_decompositions()
        )

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(function, backend=backend)(*inputs)
    return found[0]


def chain(x: Tensor, w: Tensor) -> Tensor:
    """Products with something element-wise between them: buffers are reused."""
    for _ in range(4):
        x = F.gelu(x @ w) + x
    return x.sum()


def outputs(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What is returned is held to the end."""
    y = x @ w
    return y, y.tanh(), y.softmax(-1)


def attention(x: Tensor, w: Tensor) -> Tensor:
    """An operator that Inductor calls as it is, and that returns several tensors."""
    q, k, v = (x @ w).view(1, 4, 64, -1).chunk(3, -1)
    return F.scaled_dot_product_attention(q, k, v).sum()


@pytest.mark.parametrize(
    ("dtype", "function", "width"),
    [
        (torch.float32, outputs, 64),
        (torch.float32, attention, 48),
        (torch.bfloat16, chain, 64),
        *exhaustive(
            (torch.float32, chain, 64),
            (torch.bfloat16, outputs, 64),
            (torch.bfloat16, attention, 48),
        ),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_the_peak_of_compiled_code(
    function: Callable[..., Any], width: int, dtype: torch.dtype
) -> None:
    """To the byte where torch itself takes nothing beside."""
    x, w = torch.randn(256, 64, dtype=dtype), torch.randn(64, width, dtype=dtype)
    run = compiled(function, x, w)
    kept: list[Any] = []
    measured = allocated_peak_bytes(lambda: kept.append(run([x, w])))
    packet = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    q = torch.empty(1, 4, 64, 16, dtype=dtype)
    said = held_bytes(run, {packet.__name__: Called(attention_workspace(q, q))})
    assert said is not None
    # bf16 products go through a copy of oneDNN's on CPU; sums through a few numbers.
    assert said <= measured
    if dtype is torch.float32:
        assert measured - said <= 1024


def test_code_that_is_not_understood() -> None:
    """Nothing is claimed of symbolic sizes, branches, or no code at all."""
    sizes = "def call(args):\n    s0, x = args\n    buf0 = empty_strided_cpu((s0, 4), (4, 1), f)\n"
    branch = "def call(args):\n    if args:\n        pass\n"
    for source in (sizes, branch, "x = 1", None):
        assert held_bytes(SimpleNamespace(source_code=source)) is None  # type: ignore[arg-type]


def test_names_that_stand_for_the_same_memory() -> None:
    """It is freed with the last of them, and allocated once."""
    source = """
def call(args):
    with torch.cuda._DeviceGuard(0):
        buf0 = empty_strided_cuda((256, 4), (4, 1), torch.float32)
        buf1 = reinterpret_tensor(buf0, (4, 256), (1, 4), 0); del buf0  # reuse
        buf2 = empty_strided_cuda((256, 4), (4, 1), torch.bfloat16)
        del buf1
        buf3 = empty_strided_cuda((256, ), (1, ), torch.float32)
        del buf2
    return (buf3, )
"""
    assert held_bytes(SimpleNamespace(source_code=source)) == 4096 + 2048  # type: ignore[arg-type]


def test_results_of_an_operator_are_of_its_dtypes() -> None:
    """Which the code does not say: where nobody else does, that of most buffers."""
    source = """
def call(args):
    buf0 = empty_strided_cpu((256, ), (1, ), torch.int64)
    buf1 = torch.ops.mine.halves.default(buf0)
    buf2 = buf1[0]
    assert_size_stride(buf2, (256, ), (1, ))
    buf3 = buf1[1]
    assert_size_stride(buf3, (512, ), (1, ))
    del buf1
    return (buf2, buf3, )
"""
    assert held_bytes(source) == 8 * (256 + 256 + 512)
    assert held_bytes(source, {"halves": Called(100, (2, 4))}) == 8 * 256 + 512 + 2048 + 100
