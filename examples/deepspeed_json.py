"""``examples/train.py deepspeed=FILE``: DeepSpeed's JSON decides how the model is trained.

Stage, precision, what is offloaded, rows and micro-batches, clipping, optimizer and schedule are
the file's; a setting of theirs on the command line beside it is an error. Without an optimizer in
the file that of the settings is used, without a scheduler the learning rate stays.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import fxzero
from examples.failures import SettingsError
from examples.ranks import ranks_to_train
from examples.settings import Dtype, PrecisionSettings, Settings
from fxzero.integrations.deepspeed import FromDeepSpeed
from fxzero.integrations.deepspeed.result import merged

DECIDED = (
    "zero",
    "precision",
    "optimizer",
    "trainer.batch_size",
    "trainer.micro_batches",
    "trainer.clip_grad_norm",
    "trainer.warmup_steps",
    "trainer.min_lr_ratio",
)
"""Settings that the file decides."""


def by_deepspeed(settings: Settings) -> FromDeepSpeed | None:
    """What the file says for the ranks that will train; None where there is none.

    Raises:
        fxzero.ConfigError: what fxzero cannot train by, key by key.
    """
    if settings.deepspeed is None:
        return None
    return fxzero.from_deepspeed(
        settings.deepspeed,
        world_size=ranks_to_train(settings.ranks),
        deepspeed_version=settings.deepspeed_version,
        **settings.deepspeed_auto,
    )


def decided(settings: Settings, said: Iterable[str]) -> Settings:
    """The settings with what the file decides.

    Args:
        said: the command line's settings: ``zero=2``.

    Raises:
        SettingsError: the command line says what the file decides.
    """
    made = by_deepspeed(settings)
    if made is None:
        return settings
    _refuse_both(settings, made, said)
    if settings.trainer.step.value == "eager":
        options = dict(made.plugin().options or {})  # refuses what only whole steps do
    else:
        options = dict(made.options)
    param = made.param_dtype or Dtype.float32.value
    reduced = made.reduce_dtype or param
    return replace(
        settings,
        zero=made.zero,
        precision=PrecisionSettings(Dtype(param), Dtype(reduced)),
        trainer=replace(
            settings.trainer,
            batch_size=made.train_batch_size,
            micro_batches=made.micro_batches,
            clip_grad_norm=made.clip_grad_norm,
        ),
        fxzero=merged(settings.fxzero, options),
    )


def _refuse_both(settings: Settings, made: FromDeepSpeed, said: Iterable[str]) -> None:
    if settings.mesh.pipeline > 1:
        raise SettingsError(
            f"deepspeed={settings.deepspeed} and mesh.pipeline={settings.mesh.pipeline}: the batch "
            "sizes there are those of ranks that all read rows. Leave out one."
        )
    mine = [name for name in DECIDED if name != "optimizer" or made.make_optimizer is not None]
    mine += [f"fxzero.{path}" for path in _paths(made.options)]
    for override in said:
        name = override.partition("=")[0].lstrip("+~")
        if name == "trainer" or any(name == m or name.startswith(f"{m}.") for m in mine):
            raise SettingsError(
                f"{override}: deepspeed={settings.deepspeed} decides that. Leave out one of them."
            )


def _paths(options: Any, start: str = "") -> Iterable[str]:
    for name, value in options.items():
        if isinstance(value, dict):
            yield from _paths(value, f"{start}{name}.")
        else:
            yield f"{start}{name}"
