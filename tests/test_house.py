"""Imports run downward, private torch APIs are in one room, a pass is added by a line."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

import fxzero
import fxzero.passes
from fxzero.compiler import pipelines
from fxzero.passes import Pass
from tests.stepping import chain_of, compiled_step
from tests.tracing import observed

ROOT = Path(__file__).parents[1]
FLOORS = (
    "errors _compat settings transfer disk pipeline ranks sharding graph capture regions runtime "
    "cost kernels schedule passes compiler backend checkpoint step inspect doctor integrations cli"
).split()
"""From the ground up. `_checkout` and the package itself are doors, not rooms."""


def sources() -> Iterator[tuple[str, Path]]:
    """Every module that is installed: its dotted name and its file."""
    for folder, name in (
        ("fxzero", "fxzero"),
        ("passes", "fxzero.passes"),
        ("kernels", "fxzero.kernels"),
    ):
        for file in sorted((ROOT / folder).rglob("*.py")):
            parts = file.relative_to(ROOT / folder).with_suffix("").parts
            yield ".".join([name, *parts]).removesuffix(".__init__"), file


MODULES = dict(sources())


def imports(file: Path) -> Iterator[tuple[int, str]]:
    """What a file imports, anywhere in it: line and module."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            assert not node.level, f"{file}:{node.lineno} imports by dots"
            for alias in node.names:
                module = f"{node.module}.{alias.name}"
                yield node.lineno, module if module in MODULES else node.module


def floor(module: str) -> int | None:
    """On which floor a module of ours is."""
    _, _, rest = module.partition("fxzero.")
    name = rest.partition(".")[0]
    return FLOORS.index(name) if name in FLOORS else None


def test_imports_run_downward() -> None:
    """Hidden ones and those for types too."""
    upward = []
    for module, file in MODULES.items():
        mine = floor(module)
        if mine is None:
            assert module in ("fxzero", "fxzero.__main__", "fxzero._checkout"), (
                f"{module} has no floor"
            )
            continue
        for line, other in imports(file):
            theirs = floor(other) if other.startswith("fxzero.") else None
            if theirs is not None and theirs > mine:
                upward.append(f"{file.relative_to(ROOT)}:{line} imports {other}")
            at_the_door = other == "fxzero" and module != "fxzero.cli.app"  # its version
            if at_the_door:
                upward.append(f"{file.relative_to(ROOT)}:{line} imports the whole package")
    assert upward == []


def dotted(node: ast.Attribute) -> list[str]:
    """``torch.utils._pytree`` as its parts; empty of what begins elsewhere."""
    parts = [node.attr]
    inner: ast.expr = node.value
    while isinstance(inner, ast.Attribute):
        parts.append(inner.attr)
        inner = inner.value
    return [inner.id, *reversed(parts)] if isinstance(inner, ast.Name) else []


def is_private(name: str) -> bool:
    """Whether a name begins with one underscore."""
    return name.startswith("_") and not name.startswith("__")


def private_uses(file: Path) -> Iterator[str]:
    """Private torch APIs that a file names. Operators' namespaces and names are public."""
    where = file.relative_to(ROOT)
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            names = [*str(node.module).split("."), *(alias.name for alias in node.names)]
            if any(map(is_private, names)):
                yield f"{where}:{node.lineno} {ast.unparse(node)}"
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith("torch.") and any(map(is_private, alias.name.split("."))):
                    yield f"{where}:{node.lineno} {alias.name}"
        elif isinstance(node, ast.Attribute):
            parts = dotted(node)
            of_torch = parts[:1] in (["torch"], ["dist"], ["fx"], ["nn"])
            if of_torch and parts[:2] != ["torch", "ops"] and is_private(node.attr):
                yield f"{where}:{node.lineno} {'.'.join(parts)}"


def test_private_torch_apis_are_in_one_room() -> None:
    """`_compat` says what each is for, and from which versions it is known to hold."""
    found = [
        use for _, file in sources() if "_compat" not in file.parts for use in private_uses(file)
    ]
    assert found == []


def test_the_walk_sees_what_it_looks_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A test that finds nothing must be able to."""
    file = tmp_path / "guilty.py"
    file.write_text(
        "import torch\nimport torch._dynamo\nfrom torch.utils import _pytree\n\n\n"
        "def f():\n    from fxzero.cli import app\n    return torch._C._set_grad_enabled\n"
    )
    monkeypatch.setattr("tests.test_house.ROOT", tmp_path)
    assert len(list(private_uses(file))) == 4
    assert "fxzero.cli.app" in {other for _, other in imports(file)}


def pass_of_the_guide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> type[Pass]:
    """The pass that CONTRIBUTING shows, made to the letter: its header, and work to do."""
    guide = (ROOT / "CONTRIBUTING.md").read_text()
    section = guide.split("## Add a pass")[1]
    found = re.search(r"```python\n(.*?)```", section, re.DOTALL)
    assert found is not None
    shown = re.sub(r"^   ", "", found[1], flags=re.MULTILINE)
    header = (
        "from dataclasses import dataclass\nfrom typing import ClassVar\n"
        "from fxzero.graph import StepGraph\n"
        "from fxzero.passes.base import Context, Fact, Notes, Pass\n\n"
        "def move_things(graph):\n    return len(list(graph.nodes()))\n\n"
    )
    module = ModuleType("fxzero.passes.my_pass")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    code = compile(header + shown, str(tmp_path / "my_pass.py"), "exec", dont_inherit=True)
    exec(code, module.__dict__)
    kind = module.__dict__["MyPass"]
    assert issubclass(kind, Pass)
    return kind


def test_a_pass_is_added_by_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Someone who follows the guide gets a pass that runs, in both doors."""
    kind = pass_of_the_guide(tmp_path, monkeypatch)
    order = pipelines.SCHEDULING
    place = order.index(fxzero.passes.Bucket) + 1
    monkeypatch.setattr(pipelines, "SCHEDULING", (*order[:place], kind, *order[place:]))
    (record,) = (r for r in compiled_step(chain_of()).records if r.name == kind.name)
    assert 0 < int(str(record.notes["moved"])) <= record.nodes_after
    torch._dynamo.reset()
    found = []
    with observed(found.append):
        compiled = torch.compile(fxzero.shard(nn.Linear(4, 4)), backend="fxzero")
        compiled(torch.randn(2, 4)).sum().backward()
    assert kind.name in [record.name for record in found[0].records]


def test_a_pass_in_the_wrong_place_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything runs."""
    kind = pass_of_the_guide(tmp_path, monkeypatch)
    monkeypatch.setattr(pipelines, "SCHEDULING", (kind, *pipelines.SCHEDULING))
    with pytest.raises(Exception, match="requires a graph that is bucketed: run it after bucket"):
        compiled_step(chain_of())
