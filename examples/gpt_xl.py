"""Train GPT-XL, 1.5 billion parameters, on a device that cannot hold its states.

    python examples/gpt_xl.py --memory all_host --dtype bf16             # one GPU of 32 GB
    torchrun --standalone --nproc-per-node 2 examples/gpt_xl.py --memory infinity --tiny
    fxzero estimate gpt2-1.5b --world-size 1 --cluster dgx2 --options '{"memory": "all_host"}'

With AdamW it takes 16 bytes a parameter, 25 GB, before the first activation. `--memory` says what
is held elsewhere, and `--memory-budget` how much of the device a step may take:

    none          everything on the device
    states_host   optimizer state and fp32 masters in the host's memory, updated there
    all_host      parameters too, copied to the device where they are used
    infinity      the same, and on to disk, in the folder --disk
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).resolve().parents[1]))  # where `examples` lies

import fxzero
from examples.data import Batches, stdlib_text
from examples.gpt_lite import DTYPES, TINY
from examples.logs import StepLog, open_log
from examples.models import gpt_xl
from examples.ranks import rank, set_threads, world_size


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    presets = ("none", "states_host", "all_host", "infinity")
    parser.add_argument("--memory", default="all_host", choices=presets)
    parser.add_argument("--memory-budget", default="none", help="24GiB, 80%%, auto or none")
    parser.add_argument("--disk", help="with --memory infinity: a folder on a fast disk")
    parser.add_argument("--zero", type=int, default=3, choices=(0, 1, 2, 3))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=4, help="rows of a step, over all ranks")
    parser.add_argument("--dtype", default="fp32", choices=DTYPES, help="to compute in")
    parser.add_argument("--options", default={}, type=json.loads, help="the compiler's, as JSON")
    parser.add_argument("--tiny", action="store_true", help="a model for two CPU cores")
    parser.add_argument("--output", type=Path, default=Path("outputs/gpt_xl"))
    args = parser.parse_args()
    if args.disk and args.memory != "infinity":
        parser.error("--disk is for --memory infinity")
    fxzero.init_distributed(from_host=args.memory != "none")
    set_threads(None)

    torch.manual_seed(0)
    with torch.device("meta"):
        model = gpt_xl(dropout=0.0, **(TINY if args.tiny else {}))
    length = model.config.block_size
    # An update on the host needs the parameters there; without a GPU they are.
    offload = args.memory != "none" and torch.cuda.is_available()
    fxzero.shard(model, args.zero, param_dtype=DTYPES[args.dtype], offload=offload)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4, betas=(0.9, 0.95), fused=True)
    options: dict[str, Any] = {"memory": args.memory, "memory_budget": args.memory_budget}
    if args.disk:
        options["disk"] = {"paths": [args.disk]}
    options |= args.options
    step = fxzero.compile_step(model, optimizer, clip_grad_norm=1.0, options=options)

    batches = Batches(stdlib_text(4_000_000), length, args.batch, 0, rank(), world_size())
    device = "cuda" if torch.cuda.is_available() else "cpu"
    sizes = {"samples_per_step": args.batch, "tokens_per_step": args.batch * length}
    with open_log(args.output, args.steps, {**vars(args), "output": str(args.output)}) as log:
        steps = StepLog(log, model, **sizes)
        for number in range(1, args.steps + 1):
            tokens, targets = batches[number]
            done = step(tokens.to(device), targets.to(device))
            steps.after(number, done.loss, 2e-4, done.grad_norm)


if __name__ == "__main__":
    main()
