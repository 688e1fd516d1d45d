"""What torch's operators allocate on this machine's CPU or GPU: each is run once, and its allocator
asked.

    convolution 3x3, 64 to 64 channels, stride 2     copies in oneDNN's layouts, of its own choice
    cdist, linalg, sort, gelu_backward of a view     buffers of the library behind it
    sum over the rows of a matrix, on CUDA           4096 partial sums for each of its columns

Which copies there are depends on sizes, layouts, the library's version and the processor, so that a
formula follows it for some cases only (`fxzero.cost.workspace` has some). A budget that bounds what
a step holds here has them measured, for what the step calls; `workspace_bytes` answers by that.

Inductor calls operators that the graph does not have: a determinant's factorization, a sort with
its indices. So a region that it has compiled is run too, and says by itself what it holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, fx

from fxzero._compat import (
    OpOverload,
    allocations_on,
    has_symbolic_shape,
    is_symbolic,
    pytree,
    real_tensors,
)
from fxzero.cost.analytic import flops_of
from fxzero.graph.aliases import is_view

_measured: dict[Any, int] = {}
"""Bytes, by what is called, with what, by how many threads."""
_BY_DATA = {torch.ops.aten.linalg_matrix_exp}
"""Operators that take more or less by the numbers in their input."""


def is_measuring() -> bool:
    """Whether operators of this process were measured."""
    return bool(_measured)


def measured_region_bytes(run: Callable[[list[Any]], Any], inputs: Sequence[fx.Node]) -> int | None:
    """The most bytes that a compiled region holds while it runs: results included, inputs not.

    Args:
        run: what was compiled; it empties the list that it gets.
        inputs: what it takes, with fake values.

    Returns:
        None where an input is elsewhere or of a size that is not known, and where the region
        cannot do with numbers that mean nothing.
    """
    values = [node.meta.get("val") for node in inputs]
    device = _device_of(values)
    if device is None or not all(map(_is_known, values)):
        return None
    try:
        with real_tensors(), torch.no_grad():
            made = [_made_like(value) for value in values]
            run([*made])  # the first call may leave something for all that follow
            _, changes = allocations_on(device, lambda: run([*made]))
    except (RuntimeError, IndexError, ValueError, AssertionError):
        return None
    return max(0, max(accumulate(changes), default=0))


def _is_known(value: Any) -> bool:
    """Whether something can be made that is like a fake value."""
    return not (has_symbolic_shape(value) if isinstance(value, Tensor) else is_symbolic(value))


def _device_of(values: Iterable[Any]) -> str | None:
    """The kind of device that all tensors are on, if it is one that can be asked."""
    found = {value.device.type for value in values if isinstance(value, Tensor)}
    if found == {"cuda"} and torch.cuda.is_available():
        return "cuda"
    return "cpu" if found <= {"cpu"} else None


def measured_bytes(node: fx.Node) -> int | None:
    """Bytes that a node's operator holds while it runs, its arguments and results aside; None if
    nobody has measured it."""
    return _measured.get(_key(node)) if _measured else None


def measure(nodes: Iterable[fx.Node]) -> None:
    """Run operators that were not measured yet, on numbers that mean nothing.

    What is random, what is a view, and what is not torch's own is left alone; so is what raises, as
    a factorization may of such numbers. It takes about as long as two times the operators that are
    not alike, and as much memory as the largest of them.
    """
    for node in nodes:
        if not _is_measurable(node) or (key := _key(node)) in _measured:
            continue
        if (num_bytes := _seen(node)) is not None:
            _measured[key] = num_bytes


def seen_bytes(node: fx.Node) -> int | None:
    """What an operator is seen to hold when it is run, once and for nobody else; None of one for
    which a formula does, which cannot be run, or which would take long."""
    if not chooses_layouts(node) or flops_of(node) > _MOST_FLOPS or not _is_measurable(node):
        return None
    return _seen(node)


def chooses_layouts(node: fx.Node) -> bool:
    """Whether a library works on copies of an operator's tensors, in layouts that it chooses by the
    processor."""
    return node.target in _BY_LAYOUT


_BY_LAYOUT = {torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default}
_MOST_FLOPS = 5e10
"""Half a second on one core."""


def _seen(node: fx.Node) -> int | None:
    try:
        return _run(node)
    except (RuntimeError, IndexError, ValueError):
        return None


def _is_measurable(node: fx.Node) -> bool:
    target = node.target
    if node.op != "call_function" or not isinstance(target, OpOverload) or is_view(node):
        return False
    if target.namespace != "aten" or target.overloadpacket in _BY_DATA:
        return False
    if torch.Tag.nondeterministic_seeded in target.tags or target._schema.is_mutable:
        return False
    values = [*pytree.tree_iter([n.meta.get("val") for n in (node, *node.all_input_nodes)])]
    tensors = [value for value in values if isinstance(value, Tensor)]
    if not all(map(_is_known, values)):
        return False  # to make such a tensor would be to decide on a size
    return bool(tensors) and _device_of(tensors) is not None


def _key(node: fx.Node) -> Any:
    def described(value: Any) -> Any:
        if isinstance(value, fx.Node):
            value = value.meta.get("val")
        if isinstance(value, Tensor):
            return (
                "tensor",
                tuple(value.shape),
                tuple(value.stride()),
                value.dtype,
                value.device.type,
            )
        return value

    arguments = pytree.tree_map(described, (node.args, node.kwargs), is_leaf=_is_node)
    return node.target, repr(arguments), torch.get_num_threads()


def _is_node(value: Any) -> bool:
    return isinstance(value, fx.Node)


def _run(node: fx.Node) -> int:
    """Run it twice, as the first call may leave something for all that follow."""
    target: Any = node.target
    with real_tensors(), torch.no_grad():
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: _made_like(n.meta["val"]))
        device = _device_of(pytree.tree_iter((args, kwargs, target(*args, **kwargs))))
        results, changes = allocations_on(device or "cpu", lambda: target(*args, **kwargs))
        given = {t.untyped_storage().data_ptr() for t in pytree.tree_iter((args, kwargs)) if _is(t)}
        made = {t.untyped_storage().data_ptr(): t for t in pytree.tree_iter(results) if _is(t)}
    left = sum(t.untyped_storage().nbytes() for at, t in made.items() if at not in given)
    return max(0, max(accumulate(changes), default=0) - left)


def _is(value: Any) -> bool:
    return isinstance(value, Tensor)


def _made_like(value: Any) -> Any:
    """Memory of a value's layout: halves, and zeros, which are indices of whatever there is."""
    if not isinstance(value, Tensor):
        return value
    like = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
    return like.fill_(0.5 if value.dtype.is_floating_point else 0)
