"""Command-line values that the benchmarks share."""

from __future__ import annotations

import importlib.util
import json
from enum import StrEnum
from typing import Any

import typer

from examples.benchmarks.contenders import CONTENDERS
from examples.benchmarks.workload import DTYPES

Device = StrEnum("Device", ["cpu", "cuda"])
Dtype = StrEnum("Dtype", list(DTYPES))
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
