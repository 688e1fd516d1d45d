"""Pre-train GPT-lite, 125 million parameters, under a ZeRO stage, in a pipeline, or both.

    torchrun --standalone --nproc-per-node 8 examples/gpt_lite.py --zero 2
    torchrun --standalone --nproc-per-node 8 examples/gpt_lite.py --zero 1 --pipeline 4
    torchrun --standalone --nproc-per-node 2 examples/gpt_lite.py --zero 3 --tiny
    fxzero estimate gpt-lite --world-size 8 --cluster dgx2 --mesh pipeline=4,shard=2

Every rank reads its own rows of one batch; ranks of one pipeline read the same. `--ddp` is the
same loop as PyTorch has it, to compare with. `examples/train.py` has checkpoints, sweeps and all
settings.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

sys.path.append(str(Path(__file__).resolve().parents[1]))  # where `examples` lies

import fxzero
from examples.data import Batches, stdlib_text
from examples.logs import StepLog, open_log
from examples.meshes import check_ranks, make_mesh, reader
from examples.models import GPT, gpt_lite
from examples.ranks import set_threads, world_size
from examples.settings import MeshSettings

TINY = {"num_layers": 4, "num_heads": 2, "hidden": 32, "block_size": 32, "vocab_size": 256}
DTYPES = {"fp32": None, "bf16": torch.bfloat16}
Step = Callable[[Tensor, Tensor], fxzero.StepOutput]


def parse() -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--zero", type=int, default=3, choices=(0, 1, 2, 3))
    parser.add_argument("--pipeline", type=int, default=1, metavar="STAGES")
    parser.add_argument("--schedule", default="1f1b", help="of the pipeline")
    parser.add_argument("--ddp", action="store_true", help="DistributedDataParallel, no fxzero")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=64, help="rows of a step, over all ranks")
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--dtype", default="fp32", choices=DTYPES, help="to compute in")
    parser.add_argument("--options", default={}, type=json.loads, help="the compiler's, as JSON")
    parser.add_argument("--tiny", action="store_true", help="a model for two CPU cores")
    parser.add_argument("--output", type=Path, default=Path("outputs/gpt_lite"))
    return parser.parse_args()


def build(tiny: bool) -> GPT:
    """The model, without dropout, so that all ways to train it see the same numbers."""
    return gpt_lite(dropout=0.0, **(TINY if tiny else {}))


def sharded(args: argparse.Namespace, mesh: MeshSettings) -> nn.Module:
    """Sharded; made on the meta device, so that no rank ever holds all of it."""
    with torch.device("meta"):
        model = build(args.tiny)
    stages: dict[str, Any] = {}
    if args.pipeline > 1:
        rows = args.batch * args.pipeline // world_size() // args.micro_batches
        stages = {"example_inputs": model.example_inputs(rows), "schedule": args.schedule}
    return fxzero.shard(
        model, args.zero, mesh=make_mesh(mesh), param_dtype=DTYPES[args.dtype], **stages
    )


def ddp_step(model: nn.Module, optimizer: torch.optim.Optimizer, micro_batches: int) -> Step:
    """The loop that `fxzero.compile_step` stands for."""

    def run(tokens: Tensor, targets: Tensor) -> fxzero.StepOutput:
        parts = zip(tokens.chunk(micro_batches), targets.chunk(micro_batches), strict=True)
        losses = []
        for part in parts:
            loss = model(*part) / micro_batches
            loss.backward()
            losses.append(loss.detach())
        norm = clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return fxzero.StepOutput(torch.stack(losses).sum(), norm, (), skipped=False)

    return run


def main() -> None:
    """Train."""
    args = parse()
    fxzero.init_distributed()
    set_threads(None)
    mesh = MeshSettings(pipeline=args.pipeline, replicate=1)
    check_ranks(mesh, world_size())
    torch.manual_seed(0)
    if args.ddp:
        model: nn.Module = DistributedDataParallel(build(args.tiny))
    else:
        model = sharded(args, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, betas=(0.9, 0.95), weight_decay=0.1)
    step = (
        ddp_step(model, optimizer, args.micro_batches)
        if args.ddp
        else fxzero.compile_step(
            model,
            optimizer,
            micro_batches=args.micro_batches,
            clip_grad_norm=1.0,
            options=args.options,
        )
    )
    length = TINY["block_size"] if args.tiny else 2048
    batches = Batches(stdlib_text(4_000_000), length, args.batch, 0, *reader(mesh, world_size()))
    sizes = {"samples_per_step": args.batch, "tokens_per_step": args.batch * length}
    with open_log(args.output, args.steps, {**vars(args), "output": str(args.output)}) as log:
        steps = StepLog(log, model, every=1 if args.tiny else 10, **sizes)
        for number in range(1, args.steps + 1):
            done = step(*batches[number])
            steps.after(number, done.loss, 6e-4, done.grad_norm)


if __name__ == "__main__":
    main()
