"""What DeepSpeed itself computes: of `deepspeed_cases` losses, learning rates and parameters, of
`deepspeed_more_cases` losses.

    python -m tests.integrations.deepspeed_reference --write

writes `deepspeed_reference.json` and `deepspeed_more.json` beside it. That needs
``deepspeed==0.19.8``, g++ and ninja, and no GPU; the tests need the files alone.
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

from tests.integrations.deepspeed_cases import CASES, STEPS, Net, batch, loss_of_step
from tests.integrations.deepspeed_more_cases import MORE
from tests.integrations.deepspeed_more_cases import STEPS as MORE_STEPS

FILE = Path(__file__).with_suffix(".json")
MORE_FILE = FILE.with_name("deepspeed_more.json")
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
        losses.append(loss_of_step(engine, inputs.to(dtype), targets, count))
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


def losses_of(config: dict[str, Any]) -> list[list[float]]:
    """Losses of the first steps of one more case, of each rank; on every rank.

    A configuration without an optimizer gets one, as a Trainer gives it its own.
    """
    import deepspeed

    net = Net()
    own = None if "optimizer" in config else own_optimizer(net)
    engine, *_ = deepspeed.initialize(
        model=net,
        model_parameters=net.parameters(),
        optimizer=own,
        config=json.loads(json.dumps(config)),
    )
    count = engine.gradient_accumulation_steps()
    dtype = torch.bfloat16 if engine.bfloat16_enabled() else torch.float32
    rows = engine.train_batch_size() // dist.get_world_size()
    losses = []
    for step in range(MORE_STEPS):
        inputs, targets = batch(step, dist.get_rank(), dist.get_world_size())
        losses.append(loss_of_step(engine, inputs[:rows].to(dtype), targets[:rows], count))
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, [rounded(x) for x in losses])
    return everyone


def own_optimizer(net: Any) -> torch.optim.Optimizer:
    """What is given where a configuration has none."""
    return torch.optim.AdamW(net.parameters(), lr=0.02, weight_decay=0.1)


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
    more: dict[str, Any] = {}
    for name, case in MORE.items() if dist.get_world_size() == 2 else ():
        print(name, flush=True)
        try:
            more[name] = losses_of(case["resolved"])
        except Exception as error:  # what DeepSpeed does not do on a CPU, it says in many ways
            more[name] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
    if dist.get_rank() == 0:
        output.write_text(
            json.dumps({"deepspeed": deepspeed.__version__, "cases": done, "more": more})
        )


def write() -> None:
    """Run all cases, each on its number of ranks, and write the file."""
    cases: dict[str, Any] = {}
    more: dict[str, Any] = {}
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
        more |= found["more"]
    for file, found in ((FILE, cases), (MORE_FILE, more)):
        lines = [f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in found.items()]
        head = f'{{"deepspeed": "{version}", "torch": "{torch.__version__}", "cases": {{\n'
        file.write_text(head + ",\n".join(lines) + "\n}}\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["run"]:
        run(Path(sys.argv[2]))
    elif sys.argv[1:] == ["--write"]:
        write()
    else:
        sys.exit(__doc__)
