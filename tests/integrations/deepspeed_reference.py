"""What DeepSpeed itself computes for `deepspeed_cases`: losses, learning rates, parameters.

    python -m tests.integrations.deepspeed_reference --write

writes `deepspeed_reference.json` beside it. That needs ``deepspeed==0.19.8``, g++ and ninja, and no
GPU; the tests need the file alone.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.integrations.deepspeed_cases import CASES, STEPS, Net, batch, loss_fn

FILE = Path(__file__).with_suffix(".json")
MODULE = "tests.integrations.deepspeed_reference"


def train(config: dict[str, Any]) -> dict[str, Any]:
    """Train one case by DeepSpeed; on every rank."""
    import deepspeed

    net = Net()
    engine, *_ = deepspeed.initialize(
        model=net, model_parameters=net.parameters(), config=json.loads(json.dumps(config))
    )
    count = engine.gradient_accumulation_steps()
    losses, rates, norms = [], [], []
    dtype = torch.bfloat16 if config.get("bf16") else torch.float32
    for step in range(STEPS):
        inputs, targets = batch(step, dist.get_rank(), dist.get_world_size())
        rates.append(engine.get_lr()[0])
        parts = []
        for x, y in zip(inputs.chunk(count), targets.chunk(count), strict=True):
            loss = loss_fn(engine(x.to(dtype)), y)
            engine.backward(loss)
            engine.step()
            parts.append(loss.detach())
        losses.append(torch.stack(parts).mean().item())
        norm = engine.get_global_grad_norm()
        norms.append(None if norm is None else float(norm))
    mine = torch.tensor(losses)
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    return {
        "losses": [[rounded(x) for x in each.tolist()] for each in everyone],
        "learning_rates": [rounded(float(x)) for x in rates],
        "grad_norms": [None if x is None else rounded(x) for x in norms],
        "parameters": dict(full_parameters(engine)),
    }


def full_parameters(engine: Any) -> Any:
    """fp32 masters, in full, by their names."""
    from deepspeed.utils import safe_get_full_fp32_param

    for name, parameter in engine.module.named_parameters():
        full = None
        if engine.zero_optimization():
            full = safe_get_full_fp32_param(parameter)
        full = parameter if full is None else full
        yield name, [rounded(x) for x in full.detach().float().flatten().tolist()]


def rounded(value: float) -> float:
    """Nine digits, which say an fp32."""
    return float(f"{value:.9g}")


def run(output: Path) -> None:
    """Train all cases of this many ranks."""
    import deepspeed

    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    done = {}
    for name, case in CASES.items():
        if case["world_size"] != dist.get_world_size():
            continue
        print(name, flush=True)
        done[name] = train(case["config"])
    if dist.get_rank() == 0:
        output.write_text(json.dumps({"deepspeed": deepspeed.__version__, "cases": done}))


def write() -> None:
    """Run all cases, each on its number of ranks, and write the file."""
    cases: dict[str, Any] = {}
    version = ""
    for world_size in sorted({case["world_size"] for case in CASES.values()}):
        with tempfile.TemporaryDirectory() as folder:
            output = Path(folder, "found.json")
            launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
            launch += ["--nproc-per-node", str(world_size), "-m", MODULE, "run", str(output)]
            subprocess.run(
                launch,
                check=True,
                env={**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"},
            )
            found = json.loads(output.read_text())
        version = found["deepspeed"]
        cases |= found["cases"]
    lines = [f"  {json.dumps(name)}: {json.dumps(cases[name])}" for name in CASES]
    head = f'{{"deepspeed": "{version}", "torch": "{torch.__version__}", "cases": {{\n'
    FILE.write_text(head + ",\n".join(lines) + "\n}}\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["run"]:
        run(Path(sys.argv[2]))
    elif sys.argv[1:] == ["--write"]:
        write()
    else:
        sys.exit(__doc__)
