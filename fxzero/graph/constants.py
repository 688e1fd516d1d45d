"""What a graph reads from its module: constants, by identity.

    _tensor_constant0 = self._tensor_constant0        a node and a name, no value

A name means something in one module only. So the value is written on the node as soon as the
graph has been traced; whoever copies the node into another module hands the value over with
`adopt`, under a name that is free there, and `verify` compares.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor, fx, nn

from fxzero._compat import is_fake, real_tensors

_KEY = "fxzero_constant"


class Constant(NamedTuple):
    """What a node read when it was traced."""

    value: Any
    version: int
    """How often a tensor had been written to by then."""

    @classmethod
    def of(cls, value: Any) -> Constant:
        """A value as it is now."""
        return cls(value, _version(value))


def read(module: nn.Module, target: object) -> Any:
    """What a `get_attr` node of this target reads; None if there is nothing of that name."""
    found: Any = module
    for part in str(target).split("."):
        found = getattr(found, part, None)
    return found


def record(module: fx.GraphModule) -> None:
    """Write on every `get_attr` node what it reads, once: just after tracing."""
    for node in module.graph.find_nodes(op="get_attr"):
        if _KEY not in node.meta:
            node.meta[_KEY] = Constant.of(read(module, node.target))


def recorded(node: fx.Node) -> Constant | None:
    """What a `get_attr` node read when it was traced; None if nobody wrote it down."""
    found = node.meta.get(_KEY)
    return found if isinstance(found, Constant) else None


def adopt(module: nn.Module, node: fx.Node) -> str:
    """Give a module what a node of another one reads; the name under which it is found there."""
    constant = recorded(node)
    assert constant is not None, f"{node.name} was traced without its constants being recorded"
    base = "constant_" + str(node.target).replace(".", "_").strip("_")
    name, number = base, 0
    while (there := read(module, name)) is not constant.value:
        if there is None and not hasattr(module, name):
            setattr(module, name, constant.value)
            break
        number += 1
        name = f"{base}_{number}"
    return name


def mismatch(module: nn.Module, node: fx.Node) -> str:
    """How what a `get_attr` node reads differs from what it was traced with; else empty."""
    constant = recorded(node)
    if constant is None:
        return "nobody recorded what it was traced with"
    found = read(module, node.target)
    if _version(constant.value) != constant.version:
        return f"{_brief(constant.value)} has been written to since it was traced"
    if found is not constant.value and not _is_copy(found, constant.value):
        return f"it was traced with {_brief(constant.value)} and would read {_brief(found)}"
    return ""


def _is_copy(value: Any, of: Any) -> bool:
    """Whether a value equals another one: AOTAutograd deep-copies the module of a backward."""
    if isinstance(value, fx.GraphModule) and isinstance(of, fx.GraphModule):
        return value.code == of.code
    if not isinstance(value, Tensor) or not isinstance(of, Tensor):
        return False
    if is_fake(value) or is_fake(of):
        return False
    if (value.shape, value.dtype, value.device) != (of.shape, of.dtype, of.device):
        return False
    with real_tensors():  # a graph is verified inside of a compilation
        both_nan = (value != value) & (of != of)
        return bool(((value == of) | both_nan).all())


def _version(value: Any) -> int:
    """How often a tensor was written to; inference tensors do not count."""
    return value._version if isinstance(value, Tensor) and not value.is_inference() else 0


def _brief(value: Any) -> str:
    """A constant in a line."""
    if value is None:
        return "nothing"
    if is_fake(value):
        return f"a {value.dtype} tensor of shape {list(value.shape)} without values"
    with real_tensors():  # a graph is verified inside of a compilation
        text = " ".join(str(value).split())
    return text if len(text) <= 80 else f"{text[:77]}..."
