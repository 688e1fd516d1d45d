"""What a command or a piece of Python prints, without what differs from run to run.

    fxzero inspect examples.small_nets:two_layers --cluster dgx_h100 | head -n 12

Commands run in this process, as importing torch takes longer than most of them. Behind a pipe stand
`head`, `tail` and `grep`, and mean what they do in a shell. Masked are the milliseconds that a pass
took, the numbers of models (this process has had others before), and where the checkout lies.
"""

from __future__ import annotations

import contextlib
import functools
import io
import re
import shlex
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

from typer.testing import CliRunner

from fxzero._compat import reset_dynamo
from fxzero.cli.app import app

ROOT = Path(__file__).resolve().parents[2]
WIDTH = "200"


class UnexpectedEndError(AssertionError):
    """A command that ended with another exit code than its page says."""


def run(line: str, *, exit_code: int = 0, over_gloo: bool = False) -> str:
    """What a command line prints, masked.

    Args:
        over_gloo: lower transfers as gloo's are, which ranks in name only have not.

    Raises:
        UnexpectedEndError: it ends otherwise than with `exit_code`.
    """
    command, *filters = line.split(" | ")
    ended, printed = _called(command, over_gloo)
    if ended != exit_code:
        raise UnexpectedEndError(f"{line!r} ended with {ended}:\n{printed}")
    lines = masked(printed).splitlines()
    for text in filters:
        lines = _filtered(lines, shlex.split(text))
    return "\n".join(lines).strip("\n")


@functools.cache
def _called(command: str, over_gloo: bool) -> tuple[int, str]:
    """How a command ends, and what it prints; pages look at some from several sides."""
    program, *words = shlex.split(command)
    assert program == "fxzero", f"a page can run fxzero alone, not {command!r}"
    with _warnings_are_no_errors(), _lowered_for_gloo() if over_gloo else nullcontext():
        result = CliRunner().invoke(app, words, env={"COLUMNS": WIDTH}, prog_name="fxzero")
    return result.exit_code, result.output


def _filtered(lines: list[str], words: Sequence[str]) -> list[str]:
    """A shell's filters, as far as pages need them."""
    match words:
        case ["head", "-n", count]:
            return lines[: int(count)]
        case ["tail", "-n", count]:
            return lines[-int(count) :]
        case ["grep", word]:
            return [line for line in lines if re.search(word, line)]
    raise AssertionError(f"a page can use head -n, tail -n and grep, not {shlex.join(words)!r}")


def _lowered_for_gloo() -> AbstractContextManager[Any]:
    return mock.patch("fxzero.passes.lower_transfers.backend_of", return_value="gloo")


def execute(code: str) -> str:
    """What Python prints that runs by itself, and the error that ends it, if one does."""
    reset_dynamo()
    printed = io.StringIO()
    names: dict[str, Any] = {"__name__": "__main__"}
    with contextlib.redirect_stdout(printed), _warnings_are_no_errors(printed):
        try:
            exec(compile(code, "<page>", "exec", dont_inherit=True), names)
        except Exception as error:
            print(f"{type(error).__name__}: {_reason(error)}")
    return masked(printed.getvalue()).strip("\n")


def _reason(error: Exception) -> str:
    """What an error says, without torch's advice on how to see more of its stack."""
    return str(error).strip()


@contextlib.contextmanager
def _warnings_are_no_errors(shown: io.StringIO | None = None) -> Iterator[None]:
    """As outside of pytest; fxzero's own are shown as a line of what is printed."""

    def show(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
        if shown is not None and category.__name__ == "FxZeroWarning":
            shown.write(f"{category.__name__}: {message}\n")

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = show
        yield


def masked(text: str) -> str:
    """Text without what differs from run to run."""
    text = text.replace(f"{ROOT}/", "")
    text = re.sub(r"(?<![\w/.-])\d+/(?=[a-z]\w*[.\w]*\b(weight|bias)\b)", "0/", text)
    return "\n".join(_without_times(text.splitlines())) + "\n"


_BORDER = re.compile(r"[│┃┏┳┓┡╇┩└┴┘├┼┤]")
_FILL = {"━": "━━━", "─": "───"}


def _without_times(lines: list[str]) -> Iterator[str]:
    """Tables whose column ``ms`` has ``…`` in each row, and one width."""
    column = None
    for line in lines:
        if not _BORDER.match(line[:1]):
            column = None
            yield line
            continue
        cells = _BORDER.split(line)
        if line.startswith("┏"):  # the header comes next, and says which column it is
            column = None
            top = line
            continue
        if line.startswith("┃"):
            names = [cell.strip() for cell in cells]
            column = names.index("ms") if "ms" in names else None
            yield _with_cell(top, column)
        yield _with_cell(line, column)


def _with_cell(line: str, column: int | None) -> str:
    """A line of a table with one cell replaced."""
    if column is None:
        return line
    borders = [found.start() for found in _BORDER.finditer(line)]
    start, end = borders[column - 1] + 1, borders[column]
    cell = line[start:end]
    new = _FILL[cell[0]] + cell[0] if cell[0] in _FILL else " ms " if "ms" in cell else "  … "
    return line[:start] + new + line[end:]
