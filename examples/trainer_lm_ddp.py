"""A language model of Python's own documentation, byte by byte, by transformers' Trainer.

    torchrun --nproc-per-node 2 examples/trainer_lm.py --output_dir outputs/lm --max_steps 100

Every argument of `TrainingArguments` is one of this script: `--per_device_train_batch_size 8`,
`--save_steps 20`, `--resume_from_checkpoint outputs/lm/checkpoint-20`, …
"""

from __future__ import annotations

import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    set_seed,
)

from examples.docstrings import docstrings

LENGTH = 64


def rows() -> list[dict[str, torch.Tensor]]:
    """All docstrings in one, cut into rows."""
    text = torch.tensor(list("\n".join(d for _, d in docstrings()).encode()))
    blocks = text[: len(text) // LENGTH * LENGTH].view(-1, LENGTH)
    return [{"input_ids": block, "labels": block} for block in blocks]


def main() -> None:
    """Train, evaluate, save."""
    (args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
    set_seed(args.seed)
    config = GPT2Config(
        vocab_size=256,
        n_positions=LENGTH,
        n_embd=64,
        n_layer=2,
        n_head=4,
        bos_token_id=0,
        eos_token_id=0,
        attn_pdrop=0.0,
        embd_pdrop=0.0,
        resid_pdrop=0.0,
    )
    data = rows()
    trainer = Trainer(
        model=GPT2LMHeadModel(config),
        args=args,
        train_dataset=data[32:],
        eval_dataset=data[:32],
    )
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    trainer.log_metrics("eval", trainer.evaluate())
    trainer.save_model()


if __name__ == "__main__":
    main()
