"""How a command ends: 0 as asked, 1 for a finding, 2 where there is no answer.

A finding is what was asked for: a difference, a pass that is to blame, what does not fit, bytes of
a checkpoint that are wrong. A target that cannot be made or compiled is none.

Whatever went wrong is one sentence on the standard error; ``--traceback`` shows where.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator
from typing import Any

import typer
from rich.markup import escape

from fxzero.cli.terminal import errors
from fxzero.errors import DYNAMOS_WORDS, CheckpointError, DiskError, FxZeroError, FxZeroWarning
from fxzero.inspect.targets import raised_at

FAILED = 1
NO_ANSWER = 2


@contextlib.contextmanager
def as_sentences(
    traceback: bool, failed: str = "The model could not be compiled"
) -> Iterator[None]:
    """Turn errors into a sentence and an exit code, and warnings into sentences.

    Args:
        traceback: let errors through as they are, and what torch logs of them.
        failed: what an error that nobody expects means.
    """
    if traceback:
        yield
        return
    level = logging.root.manager.disable
    logging.disable(logging.ERROR)  # torch logs the traceback of what it then raises
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            warnings.filterwarnings("ignore", category=DeprecationWarning)
            warnings.simplefilter("always", FxZeroWarning)
            yield
    except FxZeroError as error:
        say(type(error).__name__, str(error))
        found = isinstance(error, (CheckpointError, DiskError))
        raise typer.Exit(FAILED if found else NO_ANSWER) from None
    except (typer.Exit, typer.Abort, BrokenPipeError):
        raise
    except Exception as error:
        say(
            type(error).__name__,
            f"{str(error).strip() or 'no reason given'}\n{failed}; this was "
            f"raised at {raised_at(error)}. --traceback shows how it came there.",
        )
        raise typer.Exit(NO_ANSWER) from None
    finally:
        logging.disable(level)


def say(kind: str, message: str, style: str = "bold red") -> None:
    """A sentence on the standard error."""
    text = message.partition(DYNAMOS_WORDS)[0]
    errors().print(f"[{style}]{kind}[/]: {escape(text)}", highlight=False)


def _show_warning(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
    if issubclass(category, FxZeroWarning):
        say("warning", str(message), "bold yellow")
