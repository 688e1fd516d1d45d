"""A fault: a line of fxzero that is changed, and what must notice."""

from __future__ import annotations

import contextlib
import importlib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

ROOT = Path(__file__).parents[2]
"""The checkout."""


@dataclass(frozen=True)
class Fault:
    """One change of the source that must not go unnoticed."""

    name: str
    """What is done, in a few words."""
    file: str
    before: str
    """Occurs once in the file."""
    after: str
    caught_by: str
    """A test that fails; or ``verify: <graph>``, one of `tests.mutants.graphs.GRAPHS`."""
    says: str = ""
    """Part of what `verify` says."""

    @property
    def graph(self) -> str | None:
        """The graph that `verify` refuses."""
        kind, _, graph = self.caught_by.partition(": ")
        return graph if kind == "verify" else None

    @property
    def module(self) -> str:
        """The module that it changes, by the name under which it is imported."""
        name = self.file.removesuffix(".py").replace("/", ".")
        return name if name.startswith("fxzero.") else f"fxzero.{name}"

    def changed(self, root: Path = ROOT) -> str:
        """The file with the fault."""
        source = (root / self.file).read_text()
        count = source.count(self.before)
        assert count == 1, f"{self.name}: {count} times in {self.file}: {self.before!r}"
        return source.replace(self.before, self.after)

    @contextlib.contextmanager
    def in_process(self) -> Iterator[None]:
        """The fault in the functions of the imported module, and nowhere on disk."""
        module = importlib.import_module(self.module)
        new = dict(_code(compile(self.changed(), self.file, "exec", dont_inherit=True)))
        swapped: list[tuple[FunctionType, CodeType]] = []
        for function in _functions(module):
            code = new[function.__code__.co_qualname]
            if (
                code.co_code != function.__code__.co_code
                or _constants(code) != _constants(function.__code__)
                or code.co_names != function.__code__.co_names
            ):
                swapped.append((function, function.__code__))
        assert swapped, f"{self.name}: no function differs"
        try:
            for function, _ in swapped:
                function.__code__ = new[function.__code__.co_qualname]
            yield
        finally:
            for function, code in swapped:
                function.__code__ = code


def _code(code: CodeType) -> Iterator[tuple[str, CodeType]]:
    """All functions in a module's code, by qualified name."""
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant.co_qualname, constant
            if "<locals>" not in constant.co_qualname:
                yield from _code(constant)


def _constants(code: CodeType) -> list[Any]:
    """What a function's code holds, and the code of functions inside it."""
    return [
        (c.co_code, c.co_names, _constants(c)) if isinstance(c, CodeType) else c
        for c in code.co_consts
    ]


def _functions(module: Any) -> Iterator[FunctionType]:
    """The functions and methods that a module defines."""
    for value in vars(module).values():
        if getattr(value, "__module__", None) != module.__name__:
            continue
        members = vars(value).values() if inspect.isclass(value) else (value,)
        for member in members:
            member = member.fget if isinstance(member, property) else member
            member = getattr(member, "__func__", member)
            # A dataclass's own methods are made of no source.
            if isinstance(member, FunctionType) and member.__code__.co_filename == module.__file__:
                yield member
