"""transformers' Trainer over fxzero: one more argument, and everything else as it was.

    trainer = FxZeroTrainer(model=model, args=args, train_dataset=data, fxzero=FxZeroPlugin(zero=3))

mixin        the trainer: shards and compiles, in place of DistributedDataParallel
arguments    which of `TrainingArguments` cannot be kept under fxzero, and why
checkpoints  what lies in ``checkpoint-100``, and going on from there
weights      whole weights, as ``from_pretrained`` reads them
adapters     peft: what is trained is what is saved
callback     for a Trainer whose base classes are somebody else's
"""

from transformers import Seq2SeqTrainer, Trainer

from fxzero.integrations.plugin import FxZeroPlugin
from fxzero.integrations.transformers.callback import FxZeroCallback
from fxzero.integrations.transformers.mixin import FxZeroMixin

__all__ = [
    "FxZeroCallback",
    "FxZeroMixin",
    "FxZeroPlugin",
    "FxZeroSeq2SeqTrainer",
    "FxZeroTrainer",
]


class FxZeroTrainer(FxZeroMixin, Trainer):
    """A `transformers.Trainer` that trains by fxzero. See `FxZeroMixin`."""


class FxZeroSeq2SeqTrainer(FxZeroMixin, Seq2SeqTrainer):
    """A `transformers.Seq2SeqTrainer` that trains by fxzero. See `FxZeroMixin`."""
