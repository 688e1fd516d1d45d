"""Kinds of operators that passes ask about."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from fxzero._compat import OpOverload, by_identity, hint, is_symbolic
from fxzero.graph.aliases import is_view

_aten = torch.ops.aten
_prims = torch.ops.prims

_CASTS = {
    _prims.convert_element_type.default,
    _aten._to_copy.default,
}
_COPIES = {_aten.clone.default}


def is_random(node: fx.Node) -> bool:
    """Whether running a node twice gives two results. Attention without dropout does not."""
    target = node.target
    if not isinstance(target, OpOverload):
        return bool(getattr(target, "draws_random_numbers", False))
    if not _may_be_random(target):
        return False
    return _argument(node, "dropout_p") != 0


def uses_generator(node: fx.Node) -> bool:
    """Whether a node draws random numbers, new ones or the same ones again."""
    return is_random(node) or bool(getattr(node.target, "draws_again", False))


def can_draw_again(node: fx.Node) -> bool:
    """Whether a random node draws from its device's default generator, so that with the
    generator's state it can be run again."""
    if node.op != "call_function" or not is_random(node):
        return False
    value = node.meta.get("val")
    tensors = value if isinstance(value, (list, tuple)) else (value,)
    devices = {t.device.type for t in tensors if isinstance(t, torch.Tensor)}
    if len(devices) != 1 or not devices <= {"cpu", "cuda"}:
        return False
    if not isinstance(node.target, OpOverload):
        return True
    ours = node.target.namespace in ("aten", "prims")
    return ours and not writes_memory(node) and _argument(node, "generator") is None


@by_identity
def _may_be_random(target: OpOverload) -> bool:
    return torch.Tag.nondeterministic_seeded in target.tags


def _argument(node: fx.Node, name: str) -> object:
    """The value that an operator's argument has in a call; None if it has no such argument."""
    assert isinstance(node.target, OpOverload)
    for position, argument in enumerate(node.target._schema.arguments):
        if argument.name == name:
            given = node.args[position] if position < len(node.args) else node.kwargs.get(name)
            return argument.default_value if given is None else given
    return None


def writes_memory(node: fx.Node) -> bool:
    """Whether a node changes one of its inputs."""
    return isinstance(node.target, OpOverload) and _is_mutable(node.target)


@by_identity
def _is_mutable(target: OpOverload) -> bool:
    return bool(target._schema.is_mutable)


def is_pure(node: fx.Node) -> bool:
    """Whether a node may be run again, or not at all, unseen."""
    return (
        node.op == "call_function"
        and (isinstance(node.target, OpOverload) or node.target is operator.getitem)
        and not writes_memory(node)
        and not is_random(node)
    )


def is_cast_or_copy(node: fx.Node) -> bool:
    """Whether a node only changes dtype or layout."""
    return isinstance(node.target, OpOverload) and _casts_or_copies(node.target)


@by_identity
def _casts_or_copies(target: OpOverload) -> bool:
    return target in _CASTS or target in _COPIES


def is_cheap(node: fx.Node) -> bool:
    """Whether a node is a view, a cast, or computes each element from the same elements."""
    if not is_pure(node) or is_symbolic(node.meta.get("val")):
        return False
    if is_view(node) or is_cast_or_copy(node) or node.target is operator.getitem:
        return is_view(node) or is_cast_or_copy(node)
    return isinstance(node.target, OpOverload) and (torch.Tag.pointwise in node.target.tags)


def num_bytes(node: fx.Node) -> int:
    """Bytes of a node's value; 0 when it is no tensor."""
    return tensor_bytes(node.meta.get("val"))


def tensor_bytes(value: Any) -> int:
    """Bytes of a tensor, of one with symbolic sizes as large as it is now; 0 of anything else."""
    if not isinstance(value, torch.Tensor):
        return 0
    return hint(value.numel()) * value.element_size()
