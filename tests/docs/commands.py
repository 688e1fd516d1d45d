"""A page for each command, of what it says of itself and of examples that are run."""

from __future__ import annotations

import inspect
import re
from typing import Any

import typer

from fxzero.cli.app import app
from tests.docs.examples import COMMANDS
from tests.docs.outputs import ROOT


def commands() -> dict[str, Any]:
    """All commands, in the order of ``fxzero --help``."""
    group: Any = typer.main.get_command(app)
    return dict(group.commands)


def page(name: str, command: Any) -> str:
    """One command, with those that are below it; blocks are still to be filled."""
    parts = [f"# `fxzero {name}`", _prose(inspect.cleandoc(command.help or ""))]
    below = getattr(command, "commands", {})
    for word, each in below.items():
        prose = _prose(inspect.cleandoc(each.help or ""))
        heading, *usage = _usage(f"{name} {word}", each)
        parts += [f"## `fxzero {name} {word}`", prose, f"#{heading}", *usage]
    if not below:
        parts += _usage(name, command)
    if COMMANDS.get(name):
        parts.append("## Examples")
    for example in COMMANDS.get(name, ()):
        code = f", exit {example.exit_code}" if example.exit_code else ""
        parts += [example.says, f"<!-- run{code}: {example.line} -->"]
    if (ROOT / "docs" / f"{name}.md").exists():  # more about it, without its title
        parts += ["## More", f'--8<-- "{name}.md:2:"']
    return "\n\n".join(parts) + "\n"


def _prose(text: str) -> str:
    """A command's help; lines that are commands are code."""
    found: list[str] = []
    for block in re.split(r"\n\s*\n", text.replace("\b", "").replace("\f", "")):
        is_code = all(line.strip().startswith("fxzero ") for line in block.splitlines())
        if is_code and found and found[-1].endswith("```"):
            found[-1] = f"{found[-1][:-3]}{block.strip()}\n```"
        else:
            found.append(f"```sh\n{block.strip()}\n```" if is_code else block.strip())
    return "\n\n".join(found)


def _usage(name: str, command: Any) -> list[str]:
    """How it is called, and a row for each argument and option."""
    words, rows = [f"fxzero {name}", "[OPTIONS]"], []
    for param in command.params:
        text = " ".join((getattr(param, "help", None) or "").split()).replace("|", "\\|")
        if param.param_type_name == "argument":
            word = param.metavar or param.name.upper()
            words.append(word if param.required else f"[{word}]")
            rows.append(f"| `{word}` | | {text} |")
            continue
        shown = ", ".join(f"`{option}`" for option in param.opts)
        rows.append(f"| {shown} | {_default(param)} | {text} |")
    table = ["| | default | |", "|---|---|---|", *rows]
    return ["## Usage", f"```sh\n{' '.join(words)}\n```", *(["\n".join(table)] if rows else [])]


def _default(param: Any) -> str:
    """What holds without the option; empty for a flag, and where nothing does."""
    if getattr(param, "is_flag", False) or param.default is None or callable(param.default):
        return ""
    return f"`{param.default}`"
