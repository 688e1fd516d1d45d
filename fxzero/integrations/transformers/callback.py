"""fxzero for a Trainer whose base classes are somebody else's: what a callback can do of it.

    on_init_end      shards and compiles; refuses arguments that need the mixin
    on_train_begin   sees that the model which is trained is the one that was sharded

A callback cannot write checkpoints, so Trainer must write none: it would write rank 0's shards.
"""

from __future__ import annotations

import contextlib
import logging
from typing import Any

from transformers import TrainerCallback

from fxzero.errors import ConfigError, ShardingError
from fxzero.integrations.plugin import FxZeroPlugin
from fxzero.integrations.transformers import arguments
from fxzero.integrations.transformers.generation import generate_together
from fxzero.integrations.transformers.weights import save_whole
from fxzero.sharding.shard import model_state

log = logging.getLogger("fxzero")


class FxZeroCallback(TrainerCallback):
    """Train by fxzero under any Trainer: ``Trainer(…, callbacks=[FxZeroCallback()])``.

    It shards, compiles, and keeps the model from being wrapped. Saving, going on from a checkpoint,
    bf16, and one reduction for several micro-batches need `FxZeroMixin`: what would be
    wrong without it is refused. The whole model lies on each rank's device until it is sharded.

    Args:
        fxzero: how to shard and to compile; by default ZeRO-3.
    """

    def __init__(self, fxzero: FxZeroPlugin | None = None) -> None:
        """See the class."""
        self.fxzero = fxzero if fxzero is not None else FxZeroPlugin()

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Shard the model that the Trainer was made with.

        Raises:
            ConfigError: an argument that a callback cannot keep.
            ShardingError: a model that cannot be sharded.
        """
        model = kwargs["model"]
        self.fxzero.refuse_whole_step(
            "FxZeroCallback",
            "a callback cannot replace what Trainer does in a step: use FxZeroMixin",
        )
        arguments.check_arguments(args, self.fxzero)
        _refuse_what_needs_the_mixin(args)
        arguments.check_optimizer_name(args, self.fxzero.zero)
        several = args.world_size > 1
        arguments.check_model(model, self.fxzero.zero if several else 0)
        self.fxzero.shard(model)
        self.fxzero.compile_forward(model)
        if several:
            save_whole(model, by_callback=True)
        generate_together(model, contextlib.nullcontext, synced=several and self.fxzero.zero > 0)
        model._is_accelerate_prepared = True  # accelerate then wraps and moves nothing
        if state.is_world_process_zero:
            log.warning("%s", self.fxzero.sentence(model))

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """See that what is trained was sharded, and that it begins anew.

        Raises:
            ShardingError: another model came in its place.
            ConfigError: training goes on from a checkpoint.
        """
        if model_state(kwargs["model"]) is None:
            raise ShardingError(
                "the model that is trained is not the one that FxZeroCallback has sharded: "
                "model_init makes another for each training, and add_callback comes too late. Use "
                "FxZeroMixin; or pass model= and callbacks=[FxZeroCallback(…)] to the Trainer."
            )
        if state.global_step:
            raise ConfigError(
                "resume_from_checkpoint needs FxZeroMixin: the state of the optimizer that a "
                "Trainer saves counts whole parameters, and ranks have shards."
            )


def _refuse_what_needs_the_mixin(args: Any) -> None:
    save = str(getattr(args.save_strategy, "value", args.save_strategy))
    asked = {
        f"save_strategy={save!r}": save != "no",
        "load_best_model_at_end=True": args.load_best_model_at_end,
        "push_to_hub=True": args.push_to_hub,
        "bf16=True": args.bf16,
    }
    for name, is_asked in asked.items():
        if is_asked:
            raise ConfigError(
                f"{name} and FxZeroCallback: a callback cannot change what Trainer does there. "
                "Give your class a base: class Mine(FxZeroMixin, YourTrainer)"
                + (", or save_strategy='no' and fxzero.checkpoint." if "save" in name else ".")
            )
