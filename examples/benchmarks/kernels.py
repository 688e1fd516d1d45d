"""Every kernel against eager torch, Inductor, and the bandwidth of the device's memory.

    python examples/benchmarks/kernels.py --json kernels.json --table table.json

Times are medians of CUDA-graph replays, forward and backward together where there is a backward,
so that Python costs nothing. The bound is what must be read and written, over the bandwidth of a
copy measured in the same run; kernels made of matrix products have none. ``--table`` writes what
`lower_kernels` and `update` decide by. Without a GPU, ``--device cpu`` runs the plain formulas: it
shows that the script works, and says nothing of kernels.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import typer
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # examples is not installed

from examples.benchmarks.options import Device
from examples.benchmarks.report import machine, table, write_json
from fxzero import kernels
from fxzero.cost.kernel_table import Measured

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Case:
    """One kernel on one set of tensors."""

    kernel: str
    shape: str
    dtype: torch.dtype
    ours: Callable[..., Any]
    plain: Callable[..., Any]
    """The same in torch, for eager and for Inductor."""
    tensors: tuple[Tensor, ...]
    moved_bytes: int | None
    """What must be read and written; None where products of matrices set the pace."""
    differentiates: bool = True
    table_bytes: int | None = None
    """Bytes as passes count them, where those are known; otherwise see `counted_bytes`."""
    rival: str = "inductor"
    """What a pass would keep: Inductor's code, or ``"eager"``."""

    def call(self, function: Callable[..., Any]) -> Callable[[], Any]:
        """Forward, and backward of the leaves."""
        leaves = [t for t in self.tensors if t.requires_grad]
        if not self.differentiates:
            return lambda: function(*self.tensors)
        out = function(*self.tensors)
        outs = out if isinstance(out, tuple) else (out,)
        grads = [torch.ones_like(o) for o in outs]

        def step() -> Any:
            results = function(*self.tensors)
            results = results if isinstance(results, tuple) else (results,)
            return torch.autograd.grad(results, leaves, grads)

        return step

    def counted_bytes(self) -> int:
        """Bytes as `lower_kernels` counts them: inputs, output and gradients."""
        results = self.call(self.ours)()
        output = self.ours(*self.tensors)
        found = [*self.tensors, output, *results]
        return sum(t.numel() * t.element_size() for t in found if isinstance(t, Tensor))


def plain_rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """As models write it."""
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def plain_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """As Llama writes it."""
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * cos[:, None] + turned * sin[:, None]


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """Blocks of 256 to int8, in plain torch."""
    blocks = x.float().view(-1, 256)
    scales = blocks.abs().amax(-1) / 127
    return torch.round(blocks / scales[:, None]).to(torch.int8), scales


def cases(device: str, dtype: torch.dtype, scale: int) -> Iterator[Case]:
    """All kernels on tensors of a language model's sizes, over `scale`."""
    e = dtype.itemsize

    def make(*shape: int, grad: bool = True, kind: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, device=device, dtype=kind).requires_grad_(grad)

    for rows, width in ((8192 // scale, 1024), (8192 // scale, 4096), (4096 // scale, 8192)):
        n = rows * width
        x, y, w, b = make(rows, width), make(rows, width), make(width), make(width)
        shape = f"{rows}x{width}"
        yield Case("rms_norm", shape, dtype, kernels.rms_norm, plain_rms_norm, (x, w), 5 * n * e)
        yield Case(
            "add_rms_norm", shape, dtype, kernels.add_rms_norm,
            lambda x, y, w: (plain_rms_norm(x + y, w), x + y), (x, y, w), 8 * n * e,
        )  # fmt: skip
        yield Case(
            "layer_norm", shape, dtype, kernels.layer_norm,
            lambda x, w, b: F.layer_norm(x, x.shape[-1:], w, b), (x, w, b), 5 * n * e,
        )  # fmt: skip
        yield Case("gelu", shape, dtype, kernels.gelu, F.gelu, (x,), 5 * n * e)
        yield Case("swiglu", shape, dtype, kernels.swiglu, lambda x, y: F.silu(x) * y, (x, y),
                   8 * n * e)  # fmt: skip
        yield Case("geglu", shape, dtype, kernels.geglu, lambda x, y: F.gelu(x) * y, (x, y),
                   8 * n * e)  # fmt: skip
    batch, heads, length = 4, 32, 2048 // scale
    q = make(batch, length, heads, 128).transpose(1, 2)
    cos, sin = make(1, length, 128, grad=False), make(1, length, 128, grad=False)
    yield Case("rotary", f"{batch}x{heads}x{length}x128", dtype, kernels.rotary, plain_rotary,
               (q.detach().requires_grad_(), cos, sin), 4 * q.numel() * e)  # fmt: skip
    for rows, classes in ((4096 // scale, 50_304 // scale), (4096 // scale, 128_256 // scale)):
        logits = make(rows, classes)
        target = torch.randint(classes, (rows,), device=device)
        yield Case(
            "softmax_cross_entropy", f"{rows}x{classes}", dtype, kernels.softmax_cross_entropy,
            lambda x, t: F.cross_entropy(x.float(), t), (logits, target), 3 * logits.numel() * e,
        )  # fmt: skip
        hidden, head = make(rows, 1024), make(classes, 1024)
        yield Case(
            "linear_cross_entropy", f"{rows}x1024x{classes}", dtype, kernels.linear_cross_entropy,
            lambda h, w, t: F.cross_entropy((h @ w.t()).float(), t), (hidden, head, target), None,
        )  # fmt: skip
    for length in (1024 // scale, 4096 // scale):
        q, k, v = (make(4, 16, length, 128) for _ in range(3))
        yield Case(
            "flash_attention", f"4x16x{length}x128 causal", dtype,
            lambda q, k, v: kernels.flash_attention(q, k, v, causal=True),
            lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
            (q, k, v), None,
        )  # fmt: skip
    yield from bucket_cases(device, dtype, scale)


def bucket_cases(device: str, dtype: torch.dtype, scale: int) -> Iterator[Case]:
    """The kernels of buckets: the optimizer, packing, quantization."""
    sizes = [4096 * 4096 // scale**2, 4096, 4096 * 11008 // scale**2, 11008]
    n = sum(sizes)

    def shards(kind: torch.dtype) -> list[Tensor]:
        return [torch.randn(size, device=device, dtype=kind) for size in sizes]

    wide = shards(torch.float32)
    grads, averages, squares = (shards(torch.float32) for _ in range(3))
    squares = [s.abs() for s in squares]
    step = torch.ones((), device=device)
    optimizer = torch.optim.AdamW(
        [p.clone().requires_grad_() for p in wide],
        fused=True,
        capturable=device == "cuda",  # it is timed by replays
    )
    for parameter, grad in zip(optimizer.param_groups[0]["params"], grads, strict=True):
        parameter.grad = grad
    yield Case(
        "adamw", f"{len(sizes)} shards of {n}", torch.float32,
        lambda: kernels.adamw_(wide, grads, averages, squares, step, lr=1e-3),
        lambda: optimizer.step(), (), 28 * n, differentiates=False, table_bytes=28 * n,
        rival="eager",
    )  # fmt: skip
    yield Case(
        "cast_pack", f"{len(sizes)} shards of {n}", dtype,
        lambda: kernels.cast_pack(wide, dtype),
        lambda: torch.cat([t.to(dtype) for t in wide]), (), (4 + dtype.itemsize) * n,
        differentiates=False,
    )  # fmt: skip
    buffer = torch.randn(n, device=device, dtype=dtype)
    yield Case(
        "unpack", f"{len(sizes)} shards of {n}", dtype,
        lambda: kernels.unpack(buffer, [t.shape for t in wide], torch.float32),
        lambda: [part.float() for part in buffer.split(sizes)], (), (4 + dtype.itemsize) * n,
        differentiates=False,
    )  # fmt: skip
    flat = torch.randn(n // 256 * 256, device=device, dtype=dtype)
    codes, scales = kernels.quantize_blockwise(flat)
    moved = flat.numel() * (dtype.itemsize + 1) + scales.numel() * 4
    yield Case("quantize_blockwise", f"{flat.numel()} int8", dtype,
               lambda: kernels.quantize_blockwise(flat), lambda: quantize(flat), (), moved,
               differentiates=False)  # fmt: skip
    yield Case(
        "dequantize_blockwise", f"{flat.numel()} int8", dtype,
        lambda: kernels.dequantize_blockwise(codes, scales, dtype),
        lambda: (codes.view(-1, 256).float() * scales[:, None]).to(dtype), (), moved,
        differentiates=False,
    )  # fmt: skip


def time_us(device: str, call: Callable[[], Any]) -> float:
    """Median microseconds of a call."""
    if device == "cuda":
        from triton.testing import do_bench_cudagraph

        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            return float(do_bench_cudagraph(call, return_mode="median")) * 1e3
    call()
    times = []
    for _ in range(3):
        begin = time.perf_counter()
        call()
        times.append((time.perf_counter() - begin) * 1e6)
    return median(times)


def copy_bytes_per_s(device: str, num_bytes: int) -> float:
    """What a copy of this size moves, read and written: by the driver or by a kernel."""
    source = torch.zeros(num_bytes // 4, dtype=torch.int32, device=device)
    target = torch.empty_like(source)
    calls = (lambda: target.copy_(source), lambda: torch.neg(source, out=target))
    return max(2 * num_bytes / time_us(device, call) * 1e6 for call in calls)


def measure(case: Case, device: str, bytes_per_s: float) -> dict[str, Any]:
    """Times of one case, and what they are of the bound."""
    torch._dynamo.reset()
    row: dict[str, Any] = {
        "kernel": case.kernel,
        "shape": case.shape,
        "dtype": str(case.dtype).removeprefix("torch."),
        "moved_bytes": case.moved_bytes,
    }
    compiled = torch.compile(case.plain)
    for name, function in (("kernel", case.ours), ("eager", case.plain), ("inductor", compiled)):
        row[f"{name}_us"] = time_us(device, case.call(function))
    if case.moved_bytes is not None:
        row["bound_us"] = case.moved_bytes / bytes_per_s * 1e6
        row["share_of_bound"] = row["bound_us"] / row["kernel_us"]
        row["bytes_per_s"] = case.moved_bytes / row["kernel_us"] * 1e6
    if case.differentiates:
        row["table_bytes"] = case.counted_bytes()
    elif case.table_bytes is not None:
        row["table_bytes"] = case.table_bytes
    row["rival_us"] = row[f"{case.rival}_us"]
    return row


def write_table(path: Path, device_name: str, rows: Sequence[dict[str, Any]]) -> None:
    """Write what `lower_kernels` and `update` decide by."""
    measured = [
        Measured(r["kernel"], r["dtype"], r["table_bytes"], r["kernel_us"], r["rival_us"])
        for r in rows
        if "table_bytes" in r
    ]
    content = {"device": device_name, "rows": [asdict(m) for m in measured]}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")


def render(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as a table."""
    header = ["kernel", "shape", "dtype", "us", "eager us", "inductor us", "GB/s", "of the bound"]
    lines = [
        [
            row["kernel"],
            row["shape"],
            row["dtype"],
            f"{row['kernel_us']:.1f}",
            f"{row['eager_us']:.1f}",
            f"{row['inductor_us']:.1f}",
            f"{row['bytes_per_s'] / 1e9:.0f}" if "bytes_per_s" in row else "",
            f"{row['share_of_bound']:.2f}" if "share_of_bound" in row else "",
        ]
        for row in rows
    ]
    return table(header, lines)


def main(
    *,
    json_path: Annotated[Path, typer.Option("--json", help="Where to write the figures.")],
    table_path: Annotated[
        Path | None, typer.Option("--table", help="Where to write a table for lower_kernels.")
    ] = None,
    dtypes: Annotated[str, typer.Option(help="fp32, bf16, fp16, by comma.")] = "bf16,fp32",
    only: Annotated[str, typer.Option(help="Kernels to measure, by comma; all without.")] = "",
    device: Annotated[Device, typer.Option(help="Where.")] = Device.cuda,
    scale: Annotated[int, typer.Option(help="Divides the sizes.", min=1)] = 1,
) -> None:
    """Measure every kernel against torch, Inductor and the memory's bandwidth."""
    if device is Device.cuda and not torch.cuda.is_available():
        raise typer.BadParameter("there is no GPU; --device cpu --scale 64 tries the script")
    unknown = [name for name in dtypes.split(",") if name not in DTYPES]
    if unknown:
        raise typer.BadParameter(f"--dtypes takes {', '.join(DTYPES)}, not {', '.join(unknown)}")
    torch.manual_seed(0)
    facts = machine("kernels.py", device.value)
    bytes_per_s = copy_bytes_per_s(device.value, (1 << 30) // scale)
    wanted = {name.strip() for name in only.split(",") if name.strip()}
    rows = []
    for name in dtypes.split(","):
        for case in cases(device.value, DTYPES[name], scale):
            if not wanted or case.kernel in wanted:
                rows.append(measure(case, device.value, bytes_per_s))
                print(render(rows[-1:]).splitlines()[-1], flush=True)
    if not rows:
        raise typer.BadParameter(f"--only {only}: no such kernel")
    facts |= {
        "copy_bytes_per_s": bytes_per_s,
        "times": "medians of CUDA-graph replays; forward and backward where there is a backward",
    }
    write_json(json_path, facts, rows)
    if table_path is not None:
        where = torch.cuda.get_device_name() if device is Device.cuda else "cpu"
        write_table(table_path, where, rows)
    print(f"{render(rows)}\na copy moves {bytes_per_s / 1e9:.0f} GB/s")


if __name__ == "__main__":
    typer.run(main)
