"""Fine-tune an encoder and decoder: from a function's signature to what it does, by Trainer.

    torchrun --nproc-per-node 2 examples/trainer_seq2seq.py --output_dir outputs/seq2seq \
        --max_steps 200 --predict_with_generate --eval_strategy steps --eval_steps 50

        textwrap.dedent   "dedent(text)"  →  "Remove any common leading whitespace from …"

Pairs are Python's own documentation; without ``--model`` a tiny T5 learns them byte by byte, and
nothing is downloaded. ``--model google/flan-t5-xl`` fine-tunes that one, by its own tokenizer.
``--deepspeed_config ds_config.json`` trains by DeepSpeed's JSON: stage, offload, buckets, rows,
clipping, optimizer and schedule; ``"auto"`` there is what the arguments say.
What is left in ``--output_dir`` is a folder that ``from_pretrained`` reads.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    ByT5Tokenizer,
    DataCollatorForSeq2Seq,
    HfArgumentParser,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    set_seed,
)

import fxzero
from examples.docstrings import docstrings
from fxzero.integrations.deepspeed import FromDeepSpeed
from fxzero.integrations.transformers import FxZeroPlugin, FxZeroSeq2SeqTrainer


@dataclass
class Arguments:
    """What is trained, and on what."""

    model: str | None = field(default=None, metadata={"help": "name or folder; none: a tiny T5"})
    zero: int = field(default=3, metadata={"help": "ZeRO stage"})
    deepspeed_config: str | None = field(default=None, metadata={"help": "DeepSpeed's JSON"})
    source_length: int = field(default=64, metadata={"help": "tokens of a signature, at most"})
    target_length: int = field(default=64, metadata={"help": "tokens of a docstring, at most"})
    num_eval: int = field(default=64, metadata={"help": "pairs to evaluate on"})


def tiny_t5(tokenizer: Any) -> T5ForConditionalGeneration:
    """A T5 of some 90,000 parameters."""
    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=len(tokenizer),
            d_model=64,
            d_kv=16,
            d_ff=128,
            num_layers=2,
            num_heads=4,
            dropout_rate=0.0,
            decoder_start_token_id=tokenizer.pad_token_id,
        )
    )


def encoded(tokenizer: Any, arguments: Arguments) -> list[dict[str, Any]]:
    """Pairs as tokens."""
    signatures, said = zip(*docstrings(), strict=True)
    inputs = tokenizer(list(signatures), truncation=True, max_length=arguments.source_length)
    labels = tokenizer(text_target=list(said), truncation=True, max_length=arguments.target_length)
    return [
        {"input_ids": ids, "attention_mask": mask, "labels": label}
        for ids, mask, label in zip(
            inputs["input_ids"], inputs["attention_mask"], labels["input_ids"], strict=True
        )
    ]


def by_deepspeed(
    file: str, model: Any, args: Seq2SeqTrainingArguments, num_pairs: int
) -> FromDeepSpeed:
    """What DeepSpeed's JSON comes to; the arguments follow it."""
    steps = args.max_steps
    if steps <= 0:  # as many as Trainer will take
        batches = math.ceil(num_pairs / (args.per_device_train_batch_size * args.world_size))
        updates = math.ceil(batches / args.gradient_accumulation_steps)
        steps = math.ceil(args.num_train_epochs * updates)
    made = fxzero.from_deepspeed(file, args=args, model=model, num_training_steps=steps)
    args.per_device_train_batch_size = made.rows
    args.gradient_accumulation_steps = made.micro_batches
    args.max_grad_norm = made.clip_grad_norm or 0.0
    args.bf16 = made.param_dtype is torch.bfloat16
    return made


def take_optimizer(trainer: FxZeroSeq2SeqTrainer, made: FromDeepSpeed) -> None:
    """Let a Trainer have the file's optimizer and schedule; where it has none, its own."""
    if made.make_optimizer is not None:
        trainer.optimizer = made.make_optimizer(trainer.model.parameters())
    if made.make_scheduler is not None:
        trainer.lr_scheduler = made.make_scheduler(trainer.create_optimizer())


def main() -> None:
    """Train, evaluate, generate, save."""
    parser = HfArgumentParser((Arguments, Seq2SeqTrainingArguments))
    arguments, args = parser.parse_args_into_dataclasses()
    set_seed(args.seed)
    if arguments.model is None:
        tokenizer = ByT5Tokenizer(extra_ids=0)
        model = tiny_t5(tokenizer)
    else:
        tokenizer = AutoTokenizer.from_pretrained(arguments.model)
        model = AutoModelForSeq2SeqLM.from_pretrained(arguments.model)
    args.generation_max_length = args.generation_max_length or arguments.target_length
    data = encoded(tokenizer, arguments)
    train = data[arguments.num_eval :]
    made = None
    if arguments.deepspeed_config is not None:
        made = by_deepspeed(arguments.deepspeed_config, model, args, len(train))

    def right_bytes(prediction: Any) -> dict[str, float]:
        """The part of tokens that are the reference's, place by place."""
        labels = prediction.label_ids
        generated = prediction.predictions[:, 1 : labels.shape[1] + 1]  # begins with a start token
        wide = np.full_like(labels, tokenizer.pad_token_id)
        wide[:, : generated.shape[1]] = generated
        counted = labels != -100
        return {"right": float((wide == labels)[counted].mean())}

    trainer = FxZeroSeq2SeqTrainer(
        model=model,
        args=args,
        train_dataset=train,
        eval_dataset=data[: arguments.num_eval],
        data_collator=DataCollatorForSeq2Seq(tokenizer, model=model),
        processing_class=tokenizer,
        compute_metrics=right_bytes if args.predict_with_generate else None,
        fxzero=FxZeroPlugin(zero=arguments.zero) if made is None else made.plugin(),
    )
    if made is not None:
        take_optimizer(trainer, made)
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    trainer.log_metrics("eval", trainer.evaluate())
    trainer.save_model()


if __name__ == "__main__":
    main()
