"""Command-line values that the benchmarks share."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Sequence
from enum import StrEnum
from typing import Any

import typer
from hydra.errors import HydraException

from examples.benchmarks import link
from examples.benchmarks.contenders import CONTENDERS
from examples.benchmarks.workload import DTYPES, Workload

Device = StrEnum("Device", ["cpu", "cuda"])
Dtype = StrEnum("Dtype", list(DTYPES))
Rate = StrEnum("Rate", list(link.RATES))
Mode = StrEnum("Mode", ["loop", "step", "both", "none"])
DOORS = {
    Mode.loop: "fxzero",
    Mode.step: "fxzero-step",
    Mode.both: "fxzero,fxzero-step",
    Mode.none: "",
}
"""fxzero's own contenders: the ordinary loop under torch.compile, and `compile_step`."""


def chosen(doors: str, peers: str) -> tuple[list[str], str]:
    """Return all contenders to measure, and the one that ratios refer to: the first peer."""
    peer_names = contenders(peers)
    names = list(dict.fromkeys([*contenders(doors), *peer_names]))
    if not names:
        raise typer.BadParameter("nothing to measure: no door of fxzero and no peer was chosen")
    return names, (peer_names or names)[0]


def numbers(option: str, text: str) -> list[int]:
    """Read an option's comma-separated list of numbers."""
    try:
        return [int(number) for number in text.split(",")]
    except ValueError:
        raise typer.BadParameter(f"{option} must be numbers, by comma, not {text!r}") from None


def contenders(text: str) -> list[str]:
    """Split a comma-separated list of contenders and reject unknown ones."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in CONTENDERS]
    if unknown:
        raise typer.BadParameter(
            f"unknown contender {', '.join(unknown)}; the known ones are {', '.join(CONTENDERS)}"
        )
    for name in names:
        for module in CONTENDERS[name].imports:
            if importlib.util.find_spec(module.partition(".")[0]) is None:
                raise typer.BadParameter(
                    f"{name} needs {module}, which is not installed: pip install -e "
                    "'.[bench,peers]' --no-build-isolation"
                )
    return names


def compile_options(text: str) -> dict[str, Any]:
    """Read the options of torch.compile, given as a JSON object."""
    try:
        options = json.loads(text)
    except json.JSONDecodeError as error:
        raise typer.BadParameter(f"--fxzero-options is not JSON: {error}") from None
    if not isinstance(options, dict):
        raise typer.BadParameter(f"--fxzero-options must be a JSON object, not {text}")
    return options


def workload(overrides: Sequence[str] | None, batch: int, dtype: Dtype, device: Device) -> Workload:
    """Choose the model as Hydra does, and its batches."""
    try:
        model = Workload.settings(overrides or ())
    except HydraException as error:
        raise typer.BadParameter(str(error)) from None
    return Workload(model=model, batch=batch, dtype=dtype.value, device=device.value)


def check_link(ranks: int, device: Device) -> None:
    """See that two hosts can be played here."""
    if device is not Device.cpu:
        raise typer.BadParameter("--link joins two hosts of CPU ranks; use --device cpu")
    try:
        link.check(ranks)
    except link.LinkError as error:
        raise typer.BadParameter(str(error)) from None
