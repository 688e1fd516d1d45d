"""``fxzero export``: a checkpoint's weights as safetensors."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from fxzero.checkpoint import exporting, from_deepspeed
from fxzero.checkpoint.exporting import Exported
from fxzero.cli.arguments import (
    Dtype,
    JsonOption,
    TracebackOption,
    check_companions,
    dtype_of,
)
from fxzero.cli.failures import as_sentences
from fxzero.cli.terminal import console
from fxzero.errors import ConfigError
from fxzero.inspect.units import several, size
from fxzero.settings import UNITS

_SIZE = re.compile(r"([0-9]+(?:\.[0-9]*)?)\s*([a-z]*)")


def export(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="DIR",
            help="A folder of checkpoints, whose newest whole one is taken; or one checkpoint, of "
            "fxzero or of torch.distributed.checkpoint.save.",
        ),
    ],
    out: Annotated[
        Path,
        typer.Argument(help="A file ….safetensors to write, or a folder for model.safetensors."),
    ],
    dtype: Annotated[
        Dtype | None,
        typer.Option(help="Dtype of floating-point tensors. Default: each as it was saved."),
    ] = None,
    shard_size: Annotated[
        str,
        typer.Option(
            help="Most bytes in a file, as 5GB or 500MiB. Of more, several are written, with an "
            "index."
        ),
    ] = "5GB",
    prefix: Annotated[
        str | None,
        typer.Option(
            help="What is before the model's names in the checkpoint, such as app.model; it is "
            "taken off. Default: found, and model in fxzero's own."
        ),
    ] = None,
    deepspeed: Annotated[
        bool,
        typer.Option(
            "--deepspeed",
            help="DIR is what DeepSpeed's save_checkpoint wrote: DeepSpeed, which must be "
            "installed, converts its fp32 weights. It unpickles: only for files you trust.",
        ),
    ] = False,
    as_json: JsonOption = False,
    traceback: TracebackOption = False,
) -> None:
    """Write a checkpoint's weights as safetensors, as transformers loads them.

    The weights alone, each whole, whatever the layout was; tied ones once. Every byte is compared
    with its hash on the way, and no more than one large tensor is in memory. Beside a config.json,
    from_pretrained loads the folder.

    Examples:

    fxzero export checkpoints model.safetensors

    fxzero export checkpoints/step-0000000100 my-model --dtype bfloat16 --shard-size 2GB

    fxzero export fsdp2-checkpoint my-model --prefix app.model

    fxzero export --deepspeed ds-checkpoints my-model
    """
    with as_sentences(traceback, "Nothing was written"):
        check_companions({"--prefix": (prefix is not None, "no --deepspeed", not deepspeed)})
        shard_bytes = bytes_of("--shard-size", shard_size)
        wanted = dtype_of(dtype)
        if deepspeed:
            found = from_deepspeed.export_deepspeed(
                source, out, dtype=wanted, shard_bytes=shard_bytes
            )
        else:
            found = exporting.export(
                source, out, dtype=wanted, shard_bytes=shard_bytes, prefix=prefix
            )
        if as_json:
            typer.echo(json.dumps(found.to_json(), indent=1))
        else:
            print_exported(console(), found)


def bytes_of(option: str, text: str) -> int:
    """A number of bytes that somebody has written.

    Raises:
        ConfigError: it is none.
    """
    match = _SIZE.fullmatch(text.strip().lower())
    count = float(match[1]) * UNITS.get(match[2], 0) if match is not None else 0
    if not 1 <= count < 1 << 62:
        raise ConfigError(f"{option} {text}: write a number of bytes, as 5GB or 500MiB")
    return int(count)


def print_exported(out: Console, found: Exported) -> None:
    """The files, and what is in them and what is not."""

    def say(text: str) -> None:
        out.print(text, highlight=False, markup=False, soft_wrap=True)

    dtypes = ", ".join(f"{count} {dtype}" for dtype, count in found.dtypes.items())
    say(f"{found.source}: {found.num_tensors} tensors ({dtypes}), {size(found.tensor_bytes)}")
    if found.shared:
        say(f"tied, and written once: {several(list(found.shared))}")
    if found.left_out:
        left = ", ".join(f"{count} of {part}" for part, count in found.left_out.items())
        say(f"left out: {left}")
    for path in found.files:
        say(f"written: {path}")
    if found.index is not None:
        say(f"written: {found.index}")
    rate = found.tensor_bytes / max(found.seconds, 1e-9) / 1e6
    say(f"{found.seconds:.1f} s, {rate:,.0f} MB/s")
