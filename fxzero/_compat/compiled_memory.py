"""What a graph that Inductor has compiled allocates, read from the Python that it generated.

    buf0 = empty_strided_cpu((512, 1024), (1024, 1), torch.float32)      + 2 MiB
    buf1 = buf0; del buf0  # reuse
    buf2 = torch.ops.aten.mm.default(…); assert_size_stride(buf2, …)     + its size
    del buf1                                                             − 2 MiB

The wrapper is a list of statements without branches, on CPU and on CUDA alike (torch 2.11 to 2.13);
where it is anything else nothing is claimed.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch


class Called(NamedTuple):
    """An operator that no kernel is generated for: what its code does not say."""

    workspace_bytes: int = 0
    """What it takes for itself while it runs."""
    item_bytes: tuple[int, ...] = ()
    """Of an element of each of its results."""


def held_bytes(
    compiled: Callable[..., Any] | str, operators: Mapping[str, Called] = MappingProxyType({})
) -> int | None:
    """The most bytes that a compiled graph holds while it runs: outputs included, inputs not.

    Args:
        compiled: what `compile_fx_inner` has returned, or the Python that it would call.
        operators: by name, those that are called as they are.

    Returns:
        None where its source is missing, or says something that is not understood.
    """
    source = compiled if isinstance(compiled, str) else getattr(compiled, "source_code", None)
    if not isinstance(source, str):
        return None
    try:
        return _Wrapper(_body(ast.parse(source)), operators).peak()
    except _NotUnderstoodError:
        return None


class _NotUnderstoodError(Exception):
    pass


def _body(module: ast.Module) -> list[ast.stmt]:
    """The statements of the wrapper's ``call``, those below a device guard too."""
    for node in ast.walk(module):
        if isinstance(node, ast.FunctionDef) and node.name == "call":
            return list(_flat(node.body))
    raise _NotUnderstoodError


def _flat(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    for statement in body:
        if isinstance(statement, ast.With):
            yield from _flat(statement.body)
        elif isinstance(statement, (ast.If, ast.For, ast.While, ast.Try)):
            raise _NotUnderstoodError
        else:
            yield statement


class _Wrapper:
    """The statements, run for what they allocate."""

    def __init__(self, body: Sequence[ast.stmt], operators: Mapping[str, Called]) -> None:
        self.body = body
        self.operators = operators
        self.sizes: dict[str, int] = {}
        """By name, what an assertion says of a result that some operator has allocated."""
        self.item_bytes: Counter[int] = Counter()
        self.storage: dict[str, list[int]] = {}
        """By name, the storages that it keeps alive; none of an input."""
        self.num_bytes: list[int] = []
        self.names: Counter[int] = Counter()
        """By storage, how many names keep it alive."""
        self.parts = {
            target.id: (value.value.id, _index(value.slice))
            for statement in body
            if isinstance(statement, ast.Assign)
            and isinstance(target := statement.targets[0], ast.Name)
            and isinstance(value := statement.value, ast.Subscript)
            and isinstance(value.value, ast.Name)
        }
        """By name of a part, the list that it is taken from, which an operator has returned, and
        its place there."""
        self.of_part: dict[str, int] = {}
        self.held = self.most = 0

    def peak(self) -> int:
        for statement in self.body:
            self._note_sizes(statement)
        for statement in self.body:
            if isinstance(statement, ast.Assign):
                self._assign(statement)
            elif isinstance(statement, ast.Delete):
                for target in statement.targets:
                    if isinstance(target, ast.Name):
                        self._forget(target.id)
            elif isinstance(statement, ast.Return):
                break
        return self.most

    def _note_sizes(self, statement: ast.stmt) -> None:
        """Find what is asserted of results, and which dtypes there are."""
        call = statement.value if isinstance(statement, (ast.Expr, ast.Assign)) else None
        if not isinstance(call, ast.Call):
            return
        name = _name(call.func)
        if name.startswith("empty_strided"):
            self.item_bytes[_item_bytes(call.args[2])] += 1
        elif name == "assert_size_stride" and isinstance(call.args[0], ast.Name):
            self.sizes[call.args[0].id] = _extent(call.args[1], call.args[2])

    def _assign(self, statement: ast.Assign) -> None:
        (target,) = statement.targets
        if not isinstance(target, ast.Name):
            return  # the inputs
        made = self._value(target.id, statement.value)
        for storage in made:
            self.names[storage] += 1
        self._forget(target.id)
        self.storage[target.id] = made

    def _value(self, name: str, value: ast.expr) -> list[int]:
        """The storages of what is assigned to a name."""
        if isinstance(value, ast.Name):
            return self.storage.get(value.id, [])
        if isinstance(value, ast.Subscript) and isinstance(value.value, ast.Name):
            # A part of a list that an operator returned: known by name only from here on.
            return self._part(name, value.value.id)
        if not isinstance(value, ast.Call):
            return []
        called = _name(value.func)
        if called.startswith("empty_strided"):
            size = _extent(value.args[0], value.args[1])
            return [self._allocate(size * _item_bytes(value.args[2]))]
        if called in ("reinterpret_tensor", "as_strided") and isinstance(value.args[0], ast.Name):
            return self.storage.get(value.args[0].id, [])
        if called.startswith(("get_raw_stream", "async_compile", "getattr")):
            return []
        words = _words(value.func)
        operator = next((self.operators[w] for w in reversed(words) if w in self.operators), None)
        operator = operator or Called()
        parts = {part: place for part, (source, place) in self.parts.items() if source == name}
        made = {
            part: self._allocate(self._size_of(part, operator.item_bytes[place : place + 1]))
            for part, place in (parts or {name: 0}).items()
        }
        self.of_part.update(made)
        self.most = max(self.most, self.held + operator.workspace_bytes)
        return list(made.values())

    def _part(self, name: str, source: str) -> list[int]:
        if name in self.of_part:
            return [self.of_part[name]]
        return self.storage.get(source, [])

    def _size_of(self, name: str, item_bytes: tuple[int, ...]) -> int:
        """Bytes of an operator's result, by what is asserted of it; 0 of what is no tensor.

        Args:
            item_bytes: of an element; where nobody has said it, that of most buffers.
        """
        usual = self.item_bytes.most_common(1)
        of_each = item_bytes[0] if item_bytes else usual[0][0] if usual else 4
        return self.sizes.get(name, 0) * of_each

    def _allocate(self, num_bytes: int) -> int:
        self.num_bytes.append(num_bytes)
        self.held += num_bytes
        self.most = max(self.most, self.held)
        return len(self.num_bytes) - 1

    def _forget(self, name: str) -> None:
        for storage in self.storage.pop(name, []):
            self.names[storage] -= 1
            if not self.names[storage]:
                self.held -= self.num_bytes[storage]


def _index(place: ast.expr) -> int:
    """Which element is taken."""
    return place.value if isinstance(place, ast.Constant) and isinstance(place.value, int) else 0


def _name(function: ast.expr) -> str:
    """The last word of what is called."""
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def _words(function: ast.expr) -> list[str]:
    """All words of what is called: ``torch.ops.aten.mm.default``."""
    if isinstance(function, ast.Attribute):
        return [*_words(function.value), function.attr]
    return [function.id] if isinstance(function, ast.Name) else []


def _numbers(node: ast.expr) -> list[int]:
    try:
        return list(ast.literal_eval(node))
    except (ValueError, TypeError):  # symbolic sizes
        raise _NotUnderstoodError from None


def _extent(size: ast.expr, stride: ast.expr) -> int:
    """How many elements lie between the first and the last of a tensor, both included."""
    sizes, strides = _numbers(size), _numbers(stride)
    if 0 in sizes:
        return 0
    return 1 + sum((n - 1) * s for n, s in zip(sizes, strides, strict=True))


def _item_bytes(dtype: ast.expr) -> int:
    found = getattr(torch, _name(dtype), None)
    if not isinstance(found, torch.dtype):
        raise _NotUnderstoodError
    return found.itemsize
