"""The compiler's settings as a commented YAML file, from the dataclasses that they are.

    # Overlap each gather with the layer before its use.   ← or what the field's docstring says
    prefetch:
      # How many buckets ahead of its use a gather starts; … Default null: chosen.
      distance: null

`conf/fxzero/default.yaml` is this text, so that Hydra's ``--cfg job`` shows every setting and
``fxzero.prefetch.distance=2`` needs no ``+``; a test holds the two together.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import textwrap
from collections.abc import Iterator
from enum import Enum
from typing import Any

import typer

from fxzero.compiler.config import Config
from fxzero.settings import fields_of

HEADER = """\
# The compiler's settings, each with its default. Written by `fxzero options`, which reads them from
# fxzero.Config: change them there.
"""
WIDTH = 100


def options_yaml() -> str:
    """Every setting of `fxzero.Config`, its default and what it means."""
    return HEADER + "\n".join(_lines(Config(), "")) + "\n"


def _lines(settings: Any, indent: str) -> Iterator[str]:
    documents = field_documents(type(settings))
    for name in fields_of(type(settings)):
        value = getattr(settings, name)
        nested = dataclasses.is_dataclass(value)
        document = documents.get(name) or (type(value).__doc__ if nested else "") or ""
        yield from textwrap.wrap(
            " ".join(document.split()),
            WIDTH,
            initial_indent=f"{indent}# ",
            subsequent_indent=f"{indent}# ",
            break_on_hyphens=False,
        )
        if nested:
            yield f"{indent}{name}:"
            yield from _lines(value, indent + "  ")
        else:
            yield f"{indent}{name}: {_scalar(value)}"


def _scalar(value: Any) -> str:
    """A value as YAML writes it, which for these is as JSON does."""
    if isinstance(value, Enum):
        return str(value.value)
    return json.dumps(value)


def field_documents(kind: type) -> dict[str, str]:
    """The docstring under each field of a dataclass."""
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(definition, ast.ClassDef)
    found = {}
    for field, after in zip(definition.body, definition.body[1:], strict=False):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(after, ast.Expr)
            and isinstance(after.value, ast.Constant)
            and isinstance(after.value.value, str)
        ):
            found[field.target.id] = inspect.cleandoc(after.value.value)
    return found


def options() -> None:
    """Print every setting of the compiler as YAML: its default, and what it does.

    The same names are taken by torch.compile(..., backend="fxzero", options={...}), by
    fxzero.compile_step(..., options={...}), by `fxzero inspect --options` as JSON, and by Hydra.
    """
    typer.echo(options_yaml(), nl=False)
