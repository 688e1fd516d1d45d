"""What a DTensor is made of, and where torch meets a tensor of a subclass."""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor._api import _ToTorchTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from fxzero._compat.fakes import real_tensors


def is_view_function() -> Callable[..., Any]:
    """What asks a tensor whether it looks at another's memory."""
    return torch.Tensor._is_view


def local_tensor(tensor: DTensor) -> torch.Tensor:
    """This rank's part of a DTensor, outside of autograd."""
    return tensor._local_tensor


class _Local(_ToTorchTensor):
    """What ``to_local`` does, with a backward that can be differentiated."""

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> Any:
        gradient, none = _ToTorchTensor.backward(ctx, grad)
        if grad is None or not grad.requires_grad or gradient.grad_fn is not None:
            return gradient, none
        like = gradient._spec
        return (
            DTensor.from_local(
                grad, like.mesh, like.placements, shape=like.shape, stride=like.stride
            ),
            none,
        )


def differentiable_local(tensor: DTensor) -> torch.Tensor:
    """This rank's part of a DTensor, in autograd's sight.

    In torch 2.11 the gradient that comes of ``to_local`` forgets what it was computed from, and
    gradients of gradients are wrong without a word.
    """
    if not torch.is_grad_enabled():
        return local_tensor(tensor)
    local: torch.Tensor = _Local.apply(tensor, None)
    return local


def squeeze(tensor: torch.Tensor, dim: int | Sequence[int] | None = None) -> torch.Tensor:
    """`torch.squeeze` by the sizes that a DTensor has over all ranks.

    torch 2.11 goes by those of each rank's own part: who has one row loses it.
    """
    dims = range(tensor.dim()) if dim is None else (dim,) if isinstance(dim, int) else dim
    ones = {index % tensor.dim() for index in dims if tensor.dim() and tensor.shape[index] == 1}
    result: torch.Tensor = torch.ops.aten.alias.default(tensor)
    for index in sorted(ones, reverse=True):
        result = result.squeeze(index)
    return result


def set_local_tensor(tensor: DTensor, local: torch.Tensor) -> None:
    """Let a DTensor hold another local tensor of the same layout."""
    tensor._local_tensor = local


def ranks_of_mesh(mesh: DeviceMesh) -> list[int]:
    """The ranks of a mesh, first one first, whatever mode tensors are made in."""
    with real_tensors():
        ranks: list[int] = mesh.mesh.flatten().tolist()
        return ranks


def mesh_of(tensor: DTensor) -> DeviceMesh:
    """A DTensor's mesh, without asking ``__torch_function__``."""
    return tensor._spec.mesh


def layout_of(tensor: DTensor) -> Any:
    """A DTensor's global shape, mesh and placements."""
    return tensor._spec


def mesh_without_groups(
    device_type: str, ranks: torch.Tensor, names: tuple[str, ...]
) -> DeviceMesh:
    """A mesh that says where something lies, over which nothing communicates."""
    mesh = DeviceMesh(device_type, ranks, mesh_dim_names=names, _init_backend=False)
    # Dynamo asks every mesh for it, those of other ranks too.
    setattr(mesh, "_dim_group_names", [])  # noqa: B010
    return mesh


def dtensor_at_home(
    local: torch.Tensor,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    shape: Sequence[int],
    stride: Sequence[int],
) -> DTensor:
    """A DTensor whose local tensor stays where it is: `DTensor.from_local` moves it to the mesh's
    device."""
    meta = TensorMeta(torch.Size(shape), tuple(stride), local.dtype)
    return DTensor(local, DTensorSpec(mesh, tuple(placements), meta), requires_grad=False)


def dtensor_of(local: torch.Tensor, layout: Any) -> DTensor:
    """A DTensor of a layout, around a local tensor."""
    return DTensor(local.detach(), layout, requires_grad=False)


def gradient_of(local: torch.Tensor, layout: Any) -> DTensor:
    """A DTensor of a layout around a local tensor that autograd does not record."""
    return DTensor(local, layout, requires_grad=False)


def dtensor_like(local: torch.Tensor, like: DTensor) -> DTensor:
    """A DTensor of the same global shape and layout, around another local tensor.

    `DTensor.from_local` does the same through autograd, ten times as slowly.
    """
    return dtensor_of(local, layout_of(like))


class _KeptLayout(DTensorSpec):
    """A parameter's layout: one object for life, so that to compare it mostly is to look at it.

    Dynamo's guards compare each parameter's layout with a deep copy of the one that it had, in
    every call: 5 ms at a thousand parameters.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> _KeptLayout:
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickled as torch's own, for who loads it without fxzero."""
        fields = [field.name for field in dataclasses.fields(DTensorSpec) if field.init]
        return DTensorSpec, tuple(getattr(self, name) for name in fields)

    def _check_equals(self, other: object, skip_shapes: bool = False) -> bool:
        return other is self or super()._check_equals(other, skip_shapes)


def keep_layout(tensor: DTensor) -> None:
    """Say that a DTensor's layout is replaced, if ever, and never changed in place."""
    tensor._spec.__class__ = _KeptLayout


def without_torch_function() -> Any:
    """A context in which subclasses' ``__torch_function__`` is not asked."""
    return torch._C.DisableTorchFunctionSubclass()


as_it_is = torch._C._disabled_torch_function_impl
"""What a ``__torch_function__`` returns that does not ask itself again: the same as calling the
function in `without_torch_function`, in half of the time. It takes the same arguments."""


def makes_parameter(depth: int) -> bool:
    """Whether a caller, so many frames above, is the constructor of `torch.nn.Parameter`."""
    return sys._getframe(depth + 1).f_code is torch.nn.Parameter.__new__.__code__


def plain_reduce(tensor: DTensor) -> tuple[Any, ...]:
    """How torch pickles a tensor of a subclass: `rebuild_function`, and what that takes."""
    function, arguments, *_ = torch.Tensor.__reduce_ex__(tensor, 2)
    return function, arguments


def rebuild_function() -> Callable[..., torch.Tensor]:
    """What torch unpickles a tensor of a subclass with."""
    found: Callable[..., torch.Tensor] = vars(torch)["_tensor"]._rebuild_from_type_v2
    return found


@functools.cache
def let_anomaly_mode_read_dtensors() -> None:
    """Give DTensor the operator by which autograd's anomaly mode looks for NaNs in gradients.

    torch 2.11 to 2.13 have none: ``set_detect_anomaly`` fails in every backward that hands a
    DTensor on. All ranks look at the whole gradient, so that all of them stop.
    """
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.experimental import register_sharding

    operator = torch.ops.aten._is_any_true.default
    register_sharding(operator)(lambda _: [([Replicate()], [Replicate()])])
