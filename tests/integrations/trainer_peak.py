"""Train a model whose states outweigh all else, and print the peak of this rank's memory.

    torchrun --nproc-per-node 2 tests/integrations/trainer_peak.py ddp|3 FOLDER

What counts is resident memory above that before the model was made, by Linux's own high-water mark.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import transformers
from transformers import Trainer, TrainingArguments

from fxzero.integrations.transformers import FxZeroPlugin, FxZeroTrainer

CHEAP = {"lower_regions": {"backend": "eager"}}


def resident(name: str) -> int:
    """Bytes by a name of /proc/self/status."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return 1024 * int(line.split()[1])
    raise KeyError(name)


def main(stage: str, folder: str) -> None:
    """Train three steps; rank 0 writes what it took."""
    args = TrainingArguments(
        folder,
        per_device_train_batch_size=1,
        max_steps=3,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        ddp_backend="gloo",
    )
    torch.zeros(1, requires_grad=True).sum().backward()
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    config = transformers.LlamaConfig(
        vocab_size=512,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=8,
        num_attention_heads=8,
    )
    model = transformers.LlamaForCausalLM(config)
    ids = torch.arange(32)
    data = [{"input_ids": ids, "labels": ids}] * 64
    if stage == "ddp":
        trainer = Trainer(model=model, args=args, train_dataset=data)
    else:
        plugin = FxZeroPlugin(zero=int(stage), options=CHEAP)
        trainer = FxZeroTrainer(model=model, args=args, train_dataset=data, fxzero=plugin)
    del model
    trainer.train()
    if trainer.is_world_process_zero():
        Path(folder, "peak").write_text(str(resident("VmHWM") - before))


if __name__ == "__main__":
    main(*sys.argv[1:])
