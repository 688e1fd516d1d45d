"""A scheduled graph as Python: pieces as functions, then the step that calls them.

Node order is launch order. `program_of` makes a file of it that runs by itself, in one process, on
made-up inputs and with a process group that exists only in name: to step through, to time a piece,
to try another order. What comes from a user's model into such a file is written as literals.
"""

from __future__ import annotations

import importlib
import re
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from fxzero.graph import StepGraph
from fxzero.graph.pieces import Piece
from fxzero.inspect.capture import Capture


def codes(captured: Capture) -> list[str]:
    """The scheduled graphs as Python."""
    return [
        "\n\n".join([f"# graph {number}", *functions_of(compilation.joint.graph)])
        for number, compilation in enumerate(captured.compilations)
        if compilation.joint is not None
    ]


def functions_of(graph: fx.Graph) -> list[str]:
    """The code of each piece, then that of the step."""
    step = graph.python_code("self", verbose=False)
    functions = [
        piece.body.python_code("self", verbose=False)
        .src.strip()
        .replace("def forward(self, ", f"def {name}(", 1)
        for name, piece in step.globals.items()
        if isinstance(piece, Piece)
    ]
    return [*functions, step.src.strip()]


PROGRAM = '''\
"""One training step as it was scheduled: node order is launch order.

    python schedule.py

runs it once, in one process, on made-up inputs. The process group has {world_size} ranks in name
only: collectives move nothing, and what they return is undefined. This is rank {rank}'s graph.
"""

from types import SimpleNamespace

import torch
from torch import device, inf, nan

import fxzero
{imports}

{functions}


def inputs():
    """Tensors of the right shapes, in the order of the arguments."""
    return [
{inputs}
    ]


if __name__ == "__main__":
    from fxzero.inspect.capture import fake_ranks

    torch.manual_seed(0)
    with fake_ranks({world_size}, {rank}), torch.no_grad():
        constants = SimpleNamespace({constants})
        for result in forward(constants, *inputs()):
            print(tuple(result.shape) if isinstance(result, torch.Tensor) else result)
'''


def program_of(
    graph: StepGraph, world_size: int, rank: int, groups: Sequence[Mapping[str, Any]] = ()
) -> str:
    """A scheduled graph as a file that runs by itself.

    Args:
        groups: the optimizer's parameter groups, of a whole step.
    """
    plain = fx.Graph()  # of a loop's graph, the code would take its arguments in two lists
    plain.output(plain.graph_copy(graph.graph, {}))
    code = plain.python_code("self", verbose=False)
    pieces = [value for value in code.globals.values() if isinstance(value, Piece)]
    every = dict(code.globals)
    for piece in pieces:
        every |= piece.body.python_code("self", verbose=False).globals
    constants = (
        f"{node.target}={_made(getattr(graph.module, str(node.target), None))}"
        for node in graph.graph.find_nodes(op="get_attr")
        if re.fullmatch(r"\w+", str(node.target))
    )
    placeholders = graph.graph.find_nodes(op="placeholder")
    return PROGRAM.format(
        world_size=world_size,
        rank=rank,
        imports="\n".join(_imports(every)),
        functions="\n\n\n".join(functions_of(plain)),
        inputs="\n".join(
            f"        {_input(node, groups)},  # {node.name}" for node in placeholders
        ),
        constants=", ".join(dict.fromkeys(constants)),
    )


_KNOWN = frozenset({"torch", "device", "inf", "nan", "fx_pytree", "pytree"})


def _imports(names: dict[str, Any]) -> Iterator[str]:
    """What gives a file the names that its code uses."""
    for name, value in names.items():
        if name in _KNOWN or isinstance(value, Piece):
            continue
        module, path = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
        if isinstance(value, types.ModuleType):
            yield f"import {value.__name__} as {name}"
        elif name == "NoneType":
            yield f"{name} = type(None)"
        elif _is_at(module, path, value):
            yield f"from {module} import {path} as {name}"
        elif made := getattr(value, "as_code", ""):
            yield f"import {module}"
            yield f"{name} = {made}"
        else:
            yield f"def {name}(*_):"
            yield f"    raise NotImplementedError({f'{path} was made for the step that ran'!r})"


def _is_at(module: Any, path: Any, value: Any) -> bool:
    """Whether an import of a name gives just this object."""
    if not isinstance(module, str) or not isinstance(path, str) or not path.isidentifier():
        return False
    try:
        return getattr(importlib.import_module(module), path, None) is value
    except ImportError:
        return False


def _input(node: fx.Node, groups: Sequence[Mapping[str, Any]]) -> str:
    """An expression for what a step is called with."""
    source = node.meta.get("fxzero_source")
    if source is not None and source[0] == "group" and source[1] < len(groups):
        given = groups[source[1]].items()
        known = {name: value for name, value in given if name != "params" and _is_literal(value)}
        return repr(known)
    return _made(node.meta.get("val"))


def _is_literal(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return all(map(_is_literal, value))
    return isinstance(value, (int, float, bool, str, type(None)))


def _made(value: Any) -> str:
    """An expression for something like a value: of a tensor its shape, dtype and device."""
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_made, value))}]"
    if isinstance(value, torch.SymInt):
        return str(int(value))
    if not isinstance(value, torch.Tensor):
        return repr(value) if isinstance(value, (int, float, bool, str, type(None))) else "None"
    shape = [int(size) for size in value.shape]
    where = f"dtype={value.dtype}, device={value.device.type!r}"
    if value.dtype.is_floating_point:
        return f"torch.rand({shape}, {where})" if shape else f"torch.ones({shape}, {where})"
    return f"torch.zeros({shape}, {where})"
