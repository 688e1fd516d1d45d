"""A language model of Python's own sources, byte by byte, in accelerate's loop.

torchrun --nproc-per-node 2 FILE --steps 100 --cpu
"""

from __future__ import annotations

import argparse
import inspect
import json
import textwrap

import torch
from accelerate.utils import set_seed
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

from fxzero.integrations.accelerate import FxZeroAccelerator, FxZeroPlugin

LENGTH = 64


def rows() -> list[dict[str, torch.Tensor]]:
    """The text, in rows."""
    text = torch.tensor(list("".join(inspect.getsource(m) for m in (argparse, textwrap)).encode()))
    blocks = text[: len(text) // LENGTH * LENGTH].view(-1, LENGTH)
    return [{"input_ids": block, "labels": block} for block in blocks]


def make_model() -> GPT2LMHeadModel:
    """A GPT-2 that one can train on a laptop."""
    config = GPT2Config(vocab_size=256, n_positions=LENGTH, n_embd=64, n_layer=2, n_head=4)
    config.attn_pdrop = config.embd_pdrop = config.resid_pdrop = 0.0
    return GPT2LMHeadModel(config)


def main() -> None:
    """Train, evaluate, save."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--out", default="outputs/accelerate_lm")
    args = parser.parse_args()
    set_seed(0)
    accelerator = FxZeroAccelerator(
        gradient_accumulation_steps=2,
        cpu=args.cpu,
        fxzero=FxZeroPlugin(zero=3),
    )
    data = rows()
    loader, eval_loader = DataLoader(data[32:], 4, shuffle=True), DataLoader(data[:32], 4)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, eps=1e-4)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 2 * args.steps)
    model, optimizer, loader, eval_loader, scheduler = accelerator.prepare(
        model, optimizer, loader, eval_loader, scheduler
    )
    losses: list[float] = []
    while len(losses) < args.steps:
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    losses.append(accelerator.reduce(loss.detach(), "mean").item())
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if len(losses) == args.steps:
                break
    model.eval()
    with torch.no_grad():
        found = [accelerator.gather_for_metrics(model(**batch).loss[None]) for batch in eval_loader]
    accelerator.print(json.dumps({"losses": losses, "eval_loss": torch.cat(found).mean().item()}))
    accelerator.save_state(f"{args.out}/state")
    accelerator.unwrap_model(model).save_pretrained(
        f"{args.out}/model",
        state_dict=accelerator.get_state_dict(model),
        is_main_process=accelerator.is_main_process,
        save_function=accelerator.save,
    )
    accelerator.end_training()


if __name__ == "__main__":
    main()
