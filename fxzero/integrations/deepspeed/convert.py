"""`fxzero.from_deepspeed`: every key of a DeepSpeed configuration mapped, needless, or refused."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Unpack

import torch.distributed as dist

from fxzero.compiler.config import Config
from fxzero.errors import ConfigError
from fxzero.integrations.deepspeed.autos import (
    TrainerValues,
    checked,
    hidden_size_of,
    of_arguments,
    resolve,
    value_at,
)
from fxzero.integrations.deepspeed.batches import map_batches
from fxzero.integrations.deepspeed.lines import Found, Line, Verdict, raise_refused
from fxzero.integrations.deepspeed.map_optimizer import map_optimizer
from fxzero.integrations.deepspeed.map_schedule import map_schedule
from fxzero.integrations.deepspeed.precisions import map_precision
from fxzero.integrations.deepspeed.read_config import Source, read_config, without
from fxzero.integrations.deepspeed.result import FromDeepSpeed
from fxzero.integrations.deepspeed.versions import CLIPS_BY_DEFAULT, Version, parse_version
from fxzero.integrations.deepspeed.walk import walk
from fxzero.integrations.deepspeed.zero import map_zero


def from_deepspeed(
    config: Source,
    *,
    world_size: int | None = None,
    deepspeed_version: str | None = None,
    args: Any = None,
    model: Any = None,
    leave_out: Collection[str] = (),
    **values: Unpack[TrainerValues],
) -> FromDeepSpeed:
    """Read a DeepSpeed configuration, and say of every key what becomes of it.

        ds = fxzero.from_deepspeed("ds_config.json", deepspeed_version="0.19.8")
        step = ds.compile_step(model, loss_fn=loss_fn)      # or: engine = ds.engine(model)
        for batch in loader:
            loss = step(*batch).loss

    Args:
        config: the path of a JSON file, or what one holds.
        world_size: ranks that read rows of their own; by default those of the process group, or of
            torchrun's variables, else 1.
        deepspeed_version: the version that the configuration was written for, where its defaults
            differ: without ``gradient_clipping`` DeepSpeed clips to 1.0 since 0.19.3.
        args: a ``transformers.TrainingArguments`` to resolve ``"auto"`` by.
        model: a model whose configuration says a hidden size, for the sizes of buckets.
        leave_out: keys to do without, by their paths: ``["tensorboard", "optimizer"]``.
        values: what else resolves ``"auto"``: `TrainerValues`.

    Raises:
        ConfigError: what is refused, with all of its keys; a file that cannot be read.
    """
    result, lines, source = examine(
        config,
        world_size=world_size,
        deepspeed_version=deepspeed_version,
        args=args,
        model=model,
        leave_out=leave_out,
        **values,
    )
    raise_refused(lines, source)
    assert result is not None
    return result


@dataclass(frozen=True)
class Examined:
    """A configuration that was looked at."""

    result: FromDeepSpeed | None
    """None where something is refused."""
    lines: tuple[Line, ...]
    source: str

    def __iter__(self) -> Any:
        return iter((self.result, self.lines, self.source))


def examine(
    config: Source,
    *,
    world_size: int | None = None,
    deepspeed_version: str | None = None,
    args: Any = None,
    model: Any = None,
    leave_out: Collection[str] = (),
    **values: Any,
) -> Examined:
    """As `from_deepspeed`, but what is refused is in the lines.

    Raises:
        ConfigError: a file that cannot be read, or an argument that cannot be.
    """
    version = parse_version(deepspeed_version)
    ranks = _world_size(world_size)
    said = checked(values)
    if args is not None:
        said = of_arguments(args, said.get("num_training_steps")) | said
    keys, source = read_config(config)
    if isinstance(leave_out, str):
        raise ConfigError(f"leave_out={leave_out!r} must be a list of keys")
    left = {path: without(keys, path, source) for path in leave_out}
    hidden = said.get("hidden_size") or hidden_size_of(model)
    resolved, problems = resolve(keys, said, hidden, ranks)
    found = walk(keys, version)
    for path, reason in problems.items():
        found.lines.pop(path, None)
        found.values.pop(path, None)
        found.say(path, value_at(keys, path), Verdict.REFUSED, reason)
    for path, value in left.items():
        found.say(path, value, Verdict.NEEDLESS, "left out by leave_out")
    result = _map(found, ranks, version, source)
    order = [*left, *keys]  # a line for each key, sections together
    lines = tuple(
        _with_auto(line, resolved)
        for line in sorted(found.lines.values(), key=lambda line: _place(line, order))
    )
    if result is None:
        return Examined(None, lines, source)
    made = FromDeepSpeed(**result, lines=lines)
    Config.from_options(made.options)  # what does not go together says so
    return Examined(made, lines, source)


def _map(
    found: Found, ranks: int, version: Version | None, source: str
) -> Mapping[str, Any] | None:
    """All that is mapped; None where something is refused."""
    dtypes = map_precision(found, version)
    placed = map_zero(found, dtypes)
    batches = map_batches(found, ranks)
    optimizer = map_optimizer(found)
    scheduler = map_schedule(found, optimizer, version)
    clip = _clip(found, version)
    if found.refused:
        return None
    return {
        "source": source,
        "world_size": ranks,
        "zero": placed.zero,
        "param_dtype": dtypes.param_dtype,
        "reduce_dtype": dtypes.reduce_dtype,
        "offload": placed.offload,
        "options": placed.options,
        "train_batch_size": batches.whole,
        "rows": batches.rows,
        "micro_batches": batches.micro_batches,
        "clip_grad_norm": clip,
        "precision": dtypes.precision,
        "make_optimizer": optimizer,
        "make_scheduler": scheduler,
    }


def _clip(found: Found, version: Version | None) -> float | None:
    path = "gradient_clipping"
    if path in found.values:
        clip = float(found.get(path, 0.0))
        found.mapped(path, f"clip_grad_norm={clip:g}" if clip else "0: nothing is clipped")
        return clip or None
    if path in found.lines:  # refused already
        return None
    if version is None:
        found.refuse(
            path,
            "without it DeepSpeed clips to 1.0 since 0.19.3, and not at all before. Say "
            "gradient_clipping, or deepspeed_version.",
        )
        return None
    clip = 1.0 if version >= CLIPS_BY_DEFAULT else 0.0
    words = f"clip_grad_norm={clip:g}" if clip else "nothing is clipped"
    since = "the default since 0.19.3" if clip else "the default before 0.19.3"
    found.lines[path] = Line(path, found._value(path), Verdict.MAPPED, f"{words}: {since}")
    return clip or None


def _place(line: Line, order: list[str]) -> int:
    top = line.key.partition(".")[0]
    return order.index(top) if top in order else len(order)


def _with_auto(line: Line, resolved: Mapping[str, str]) -> Line:
    how = resolved.get(line.key)
    if not how:
        return line
    return Line(line.key, line.value, line.verdict, f'{line.reason} ("auto", by {how.rstrip("=")})')


def _world_size(given: int | None) -> int:
    if given is not None:
        if type(given) is not int or given < 1:
            raise ConfigError(f"world_size={given!r} must be a whole number of 1 or more")
        return given
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    return int(os.environ.get("WORLD_SIZE", "1"))
