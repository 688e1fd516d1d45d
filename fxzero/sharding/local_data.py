"""What means a sharded tensor as it is kept on this rank: its shape, its gradient, ``.data``.

w.data = average    takes the memory of the average, as with any tensor
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from fxzero._compat import local_tensor, mesh_of, ranks_of_mesh, set_local_tensor
from fxzero.errors import ShardingError

_ATTRIBUTES_THAT_COMPUTE = frozenset({"T", "mT", "H", "mH", "real", "imag"})
_OF_THE_SHARD = frozenset(
    (
        "to_local full_tensor redistribute requires_grad_ retain_grad grad register_hook backward "
        "register_post_accumulate_grad_hook size dim stride numel nelement ndimension wait "
        "element_size is_floating_point is_complex is_signed is_contiguous get_device __len__ "
        "__repr__ __format__ __deepcopy__ __reduce_ex__ __hash__ is_same_size storage_offset "
        "untyped_storage data_ptr share_memory_ is_shared is_set_to type is_pinned is_inference "
        "is_conj is_neg has_names"
    ).split()
)
"""Functions that mean the parameter as it is kept, wherever they are called."""


def describes(func: Callable[..., Any]) -> bool:
    """Whether a torch function asks about the tensor as it is kept: its shape, its gradient."""
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__", "__delete__"):
        return not computes_attribute(func)
    return name in _OF_THE_SHARD


_OF_OTHERS = frozenset("full_tensor redistribute".split())
"""What asks other ranks for their parts."""
_KEEPS_LAYOUT = frozenset(
    (
        "detach clone zeros_like ones_like empty_like full_like new_zeros new_empty new_full copy_ "
        "zero_ fill_ mul_ detach_ to cpu cuda float double half bfloat16 contiguous type_as"
    ).split()
)
"""What every rank does with its own part, nothing though it may be."""


def refuse_elsewhere(func: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """A tensor of another stage of a pipeline is not here, and empty.

    Raises:
        ShardingError: its value is asked for.
    """
    tensor = args[0] if args else None
    if not isinstance(tensor, DTensor) or mesh_of(tensor).get_coordinate() is not None:
        return
    name = getattr(func, "__name__", "")
    if name in _KEEPS_LAYOUT or (describes(func) and name not in _OF_OTHERS):
        return
    raise ShardingError(
        f"{name} asks for the value of a tensor of shape {tuple(tensor.shape)} that is on "
        f"ranks {ranks_of_mesh(mesh_of(tensor))}: it is of another stage of the pipeline, "
        "and empty here. Ask for it there, or save all stages by torch.distributed.checkpoint, "
        "which knows whose it is."
    )


def computes_attribute(func: Callable[..., Any]) -> bool:
    """Whether a torch function reads an attribute that is another view of the tensor."""
    return attribute_of(func) in _ATTRIBUTES_THAT_COMPUTE


def gets_data(func: Callable[..., Any]) -> bool:
    """Whether a torch function reads ``tensor.data``."""
    return attribute_of(func) == "data" and getattr(func, "__name__", "") == "__get__"


def sets_data(func: Callable[..., Any]) -> bool:
    """Whether a torch function assigns ``tensor.data``."""
    return attribute_of(func) == "data" and getattr(func, "__name__", "") == "__set__"


def sets_gradient(func: Callable[..., Any], args: tuple[Any, ...]) -> bool:
    """Whether a torch function assigns ``tensor.grad`` a plain tensor of the full shape."""
    if attribute_of(func) != "grad" or getattr(func, "__name__", "") != "__set__":
        return False
    tensor, value = args
    plain = isinstance(value, Tensor) and not isinstance(value, DTensor)
    return plain and isinstance(tensor, DTensor) and bool(value.shape == tensor.shape)


def attribute_of(func: Callable[..., Any]) -> str:
    """The attribute that a torch function reads or assigns; "" of any other function."""
    return getattr(getattr(func, "__self__", None), "__name__", "")


def assign(tensor: DTensor, value: Tensor) -> None:
    """``tensor.data = value``: the tensor takes the value's memory, as torch means it.

    Args:
        value: laid out like the tensor, or the full value, of which each rank takes its rows.

    Raises:
        ShardingError: another shape, dtype or layout.
    """
    if value.shape != tensor.shape or value.dtype != tensor.dtype:
        raise ShardingError(
            f".data of a sharded tensor of {tuple(tensor.shape)}, {tensor.dtype} was assigned one "
            f"of {tuple(value.shape)}, {value.dtype}. Assign a tensor of the same shape and dtype."
        )
    if not isinstance(value, DTensor):
        value = distribute_tensor(
            value.detach(), tensor.device_mesh, tensor.placements, src_data_rank=None
        )
    if value.placements != tensor.placements:
        value = value.redistribute(placements=tensor.placements)
    with torch.no_grad():
        set_local_tensor(tensor, local_tensor(value).detach())
