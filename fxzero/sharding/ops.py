"""The operators of a step graph: what is logically needed, and what physically happens.

Logical, put in the model by `fxzero.shard` and replaced by passes:

    unshard(shard, param, sync)       -> full parameter, in its compute dtype
    reshard_grad(grad, param, sync)   -> this rank's shard of the reduced gradient

Each has a fake kernel, and an eager kernel that runs a real collective, so that an
uncompiled call, a graph break or a debugger computes the same thing. The backward
of `unshard` is `reshard_grad`.

    micro_batch(batch, index, count)  -> rows of one micro-batch, in a whole step

Physical, put in the graph by passes next to `_c10d_functional`'s collectives:

    keep_grad(grad, param)      -> a zero shard; the full gradient is kept on this rank
    add_kept_grad(grad, param)  -> grad plus what was kept
    begin_blocks(part, dim, start, size)  -> a tensor of that size along dim, the part in place
    put_block_(whole, part, dim, start)   -> whole, with another part in place
    add_block_(whole, part, dim, start)   -> whole, with a part added to what is there
    release(tensors)            ends the life of gathered parameters
    release_saved(tensors)      ends the life of saved activations, unless the caller
                                asked autograd to retain the graph
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fxzero._compat import backward_keeps_graph, backward_number, free_storage, local_tensor
from fxzero.errors import CaptureError, FxZeroWarning
from fxzero.ranks.agree import agree_eagerly
from fxzero.ranks.lost import explaining
from fxzero.sharding.gradients import note_reduced
from fxzero.sharding.host import HOST
from fxzero.sharding.params import GradSync, KeptGradient, ModelState, ParamSpec, spec_of

_c10d = torch.ops._c10d_functional

_library = torch.library.Library("fxzero", "DEF")
_library.define("unshard(Tensor shard, str param, str sync) -> Tensor")
_library.define("reshard_grad(Tensor grad, str param, str sync) -> Tensor")
_library.define("keep_grad(Tensor grad, str param) -> Tensor")
_library.define("add_kept_grad(Tensor grad, str param) -> Tensor")
_library.define("micro_batch(Tensor batch, int index, int count) -> Tensor")
_library.define("begin_blocks(Tensor part, int dim, int start, int size) -> Tensor")
_library.define("put_block_(Tensor(a!) whole, Tensor part, int dim, int start) -> Tensor(a!)")
_library.define("add_block_(Tensor(a!) whole, Tensor part, int dim, int start) -> Tensor(a!)")
_library.define("release(Tensor(a!)[] tensors) -> ()")
_library.define("release_saved(Tensor(a!)[] tensors) -> ()")


def pad_rows(tensor: Tensor, rows: int) -> Tensor:
    """Append zero rows until dim 0 has `rows` of them."""
    missing = rows - tensor.shape[0]
    if missing == 0:
        return tensor
    return torch.cat([tensor, tensor.new_zeros((missing, *tensor.shape[1:]))])


def _unshard(shard: Tensor, param: str, sync: str) -> Tensor:
    spec = spec_of(param)
    spec.refuse_outside_of_a_step()
    part = shard.detach().to(spec.compute_dtype).to(spec.device or shard.device)
    if spec.shard_group is None:
        # An operator's output may not alias its input.
        return part.clone() if part.data_ptr() == shard.data_ptr() else part
    part = pad_rows(part, spec.chunk_rows).contiguous()
    ((_, axis),) = spec.layout.gathers
    group = axis.group
    agree_eagerly(group.name, f"gather {param}")
    full = _c10d.wait_tensor(_c10d.all_gather_into_tensor(part, group.size, group.name))
    return full[: spec.shape[0]]


def _unshard_fake(shard: Tensor, param: str, sync: str) -> Tensor:
    spec = spec_of(param)
    device = spec.device or shard.device
    if spec.shard_group is None and spec.is_here:  # a copy, with the strides of what is copied
        return torch.empty_like(shard, dtype=spec.compute_dtype, device=device)
    return shard.new_empty(spec.shape, dtype=spec.compute_dtype, device=device)


def _average(tensor: Tensor, spec: ParamSpec) -> Tensor:
    """Average over the groups that hold the same part."""
    for group in spec.replica_groups:
        agree_eagerly(group.name, f"reduce the gradient of {spec.key}")
        tensor = _c10d.wait_tensor(_c10d.all_reduce(tensor, "avg", group.name))
    return tensor


def _reshard_grad(grad: Tensor, param: str, sync: str) -> Tensor:
    spec = spec_of(param)
    if spec.device is not None:
        grad = grad.to(spec.device)  # what came to a parameter by another way is on the host
    home = grad.device if spec.device is None else HOST
    if sync == GradSync.ACCUMULATE.value:
        kept = _keep_grad(grad, param).to(home)
        note_reduced(param, kept)
        return kept
    if sync == GradSync.REDUCE_ACCUMULATED.value:
        grad = _add_kept_grad(grad, param)
    full = grad.to(spec.reduce_dtype).contiguous()
    if spec.shard_group is None:
        reduced = _average(full, spec).to(home).to(spec.dtype)
        reduced = reduced.clone() if reduced.data_ptr() == grad.data_ptr() else reduced
        note_reduced(param, reduced)
        return reduced
    full = pad_rows(full, spec.padded_rows)
    group = spec.shard_group
    agree_eagerly(group.name, f"reduce the gradient of {spec.key}")
    part = _c10d.wait_tensor(_c10d.reduce_scatter_tensor(full, "avg", group.size, group.name))
    return _average(part, spec)[: spec.local_shape[0]].to(home).to(spec.dtype)


def _reshard_fake(grad: Tensor, param: str, sync: str) -> Tensor:
    spec = spec_of(param)
    home = grad.device if spec.device is None else HOST
    return grad.new_empty(spec.local_shape, dtype=spec.dtype, device=home)


def _keep_fake(grad: Tensor, param: str) -> Tensor:
    spec = spec_of(param)
    return grad.new_empty(spec.local_shape, dtype=spec.dtype)


def kept_of(spec: ParamSpec) -> KeptGradient | None:
    """What is kept of a parameter's gradient, unless the caller has forgotten it.

    An earlier backward left a zero gradient behind. If it is None now, or was written to and
    is zero, zero_grad() came between, and must forget what was kept too.
    """
    kept = spec.state.kept.get(spec.key)
    parameter = spec.parameter() if spec.parameter is not None else None
    if kept is None or parameter is None or kept.backward == backward_number():
        return kept
    if parameter.grad is None:
        return None
    written = kept.version is not None and parameter.grad._version != kept.version
    if not written or local_of(parameter.grad).any():
        return kept
    warnings.warn(
        "micro-batches kept by fxzero.no_sync are dropped: .grad was written in place and holds "
        "zeros, as after zero_grad(set_to_none=False). Was it scaled or clipped? It held zeros "
        "already: what is kept shows in .grad after the synchronised backward. Do it then.",
        FxZeroWarning,
        stacklevel=3,
    )
    return None


def local_of(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor; any other tensor as it is."""
    return local_tensor(tensor) if isinstance(tensor, DTensor) else tensor


def _note_version(spec: ParamSpec, kept: KeptGradient) -> None:
    """Note the version of ``.grad`` once autograd has added to it what `_keep_grad` returns."""
    parameter = spec.parameter() if spec.parameter is not None else None
    if parameter is None or not parameter.requires_grad:
        return

    def note(parameter: Tensor) -> None:
        handle.remove()
        if parameter.grad is not None:
            kept.version = parameter.grad._version

    handle = parameter.register_post_accumulate_grad_hook(note)


def _warn_of_leftovers(state: ModelState) -> None:
    """Say so if the last synchronised backward did not reach what was kept before it."""
    if state.synchronised and state.kept:
        names = ", ".join(key.partition("/")[2] for key in list(state.kept)[:8])
        warnings.warn(
            f"gradients of {names} were kept under fxzero.no_sync, and the synchronised "
            "micro-batch did not use these parameters: they are not reduced yet, and join the next "
            "backward that does. Call fxzero.reduce_leftovers(model) behind the last backward.",
            FxZeroWarning,
            stacklevel=3,
        )
    state.synchronised = False


def _keep_grad(grad: Tensor, param: str) -> Tensor:
    spec = spec_of(param)
    state = spec.state
    late = state.synchronised and state.sync == GradSync.REDUCE.value
    _warn_of_leftovers(state)
    kept = kept_of(spec)
    if kept is None:
        kept = state.kept[param] = KeptGradient(grad.to(spec.dtype, copy=True), backward_number())
    else:
        kept.grad.add_(grad)
        kept.backward = backward_number()
        kept.version = None
    _note_version(spec, kept)
    if state.sync == GradSync.REDUCE.value:
        state.sync = GradSync.REDUCE_ACCUMULATED.value
    if late:
        warnings.warn(
            f"the gradient of {spec.name}, whose forward ran under fxzero.no_sync, came after the "
            "synchronised backward: it is kept for the next one. Run the backwards of no_sync "
            "first, each by its own call.",
            FxZeroWarning,
            stacklevel=2,
        )
    return grad.new_zeros(spec.local_shape, dtype=spec.dtype)


def _add_kept_grad(grad: Tensor, param: str) -> Tensor:
    spec = spec_of(param)
    state = spec.state
    kept = kept_of(spec)
    state.kept.pop(param, None)
    state.synchronised = True
    if not state.kept and state.sync == GradSync.REDUCE_ACCUMULATED.value:
        state.sync = GradSync.REDUCE.value
    return kept.grad.add_(grad) if kept is not None else grad.to(spec.dtype, copy=True)


def _full_like_fake(grad: Tensor, param: str) -> Tensor:
    return grad.new_empty(grad.shape, dtype=spec_of(param).dtype)


def _micro_batch(batch: Tensor, index: int, count: int) -> Tensor:
    rows = batch.shape[0] // count
    part = batch[index * rows : (index + 1) * rows]
    if 0 in part.stride():  # expanded: rows that share memory cannot be written apart
        return part.clone()
    return part.new_empty_strided(part.shape, part.stride()).copy_(part)


def _micro_batch_fake(batch: Tensor, index: int, count: int) -> Tensor:
    # Strides too: what runs in its place is a view, and a batch need not be contiguous.
    shape = (batch.shape[0] // count, *batch.shape[1:])
    return batch.new_empty_strided(shape, batch.stride())


def _begin_blocks_fake(part: Tensor, dim: int, start: int, size: int) -> Tensor:
    return part.new_empty((*part.shape[:dim], size, *part.shape[dim + 1 :]))


def _begin_blocks(part: Tensor, dim: int, start: int, size: int) -> Tensor:
    return _put_block(_begin_blocks_fake(part, dim, start, size), part, dim, start)


def _put_block(whole: Tensor, part: Tensor, dim: int, start: int) -> Tensor:
    whole.narrow(dim, start, part.shape[dim]).copy_(part)
    return whole


def _add_block(whole: Tensor, part: Tensor, dim: int, start: int) -> Tensor:
    whole.narrow(dim, start, part.shape[dim]).add_(part)
    return whole


def _block_fake(whole: Tensor, part: Tensor, dim: int, start: int) -> Tensor:
    return whole


def _release(tensors: list[Tensor]) -> None:
    for tensor in tensors:
        free_storage(tensor)


def _release_saved(tensors: list[Tensor]) -> None:
    if not backward_keeps_graph():
        _release(tensors)


def _release_fake(tensors: list[Tensor]) -> None:
    return None


for _name, _eager, _fake in (
    ("unshard", explaining(_unshard), _unshard_fake),
    ("reshard_grad", explaining(_reshard_grad), _reshard_fake),
    ("keep_grad", _keep_grad, _keep_fake),
    ("add_kept_grad", _add_kept_grad, _full_like_fake),
    ("micro_batch", _micro_batch, _micro_batch_fake),
    ("begin_blocks", _begin_blocks, _begin_blocks_fake),
    ("put_block_", _put_block, _block_fake),
    ("add_block_", _add_block, _block_fake),
    ("release", _release, _release_fake),
    ("release_saved", _release_saved, _release_fake),
):
    # Dynamo must not trace what runs when nothing is compiled.
    _kernel = torch.compiler.disable(_eager)
    _library.impl(_name, _kernel, "CPU")
    _library.impl(_name, _kernel, "CUDA")
    torch.library.register_fake(f"fxzero::{_name}", _fake, lib=_library)


def _remember(ctx: Any, inputs: tuple[Tensor, str, str], output: Tensor) -> None:
    _, ctx.param, ctx.sync = inputs


def _unshard_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    if grad.layout is not torch.strided:
        raise CaptureError(
            f"the gradient of {spec_of(ctx.param).name} is sparse ({grad.layout}), and the ranks "
            "reduce dense ones. Use nn.Embedding(sparse=False)."
        )
    return torch.ops.fxzero.reshard_grad(grad, ctx.param, ctx.sync), None, None


torch.library.register_autograd(
    "fxzero::unshard", _unshard_backward, setup_context=_remember, lib=_library
)


def _reshard_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    """Second derivatives, of the mean over the ranks of what each computes from a gradient.

    With g = mean g_s and f = mean f_r(g), what g_s gets is mean f_r'(g), whose mean over the ranks
    s the parameters get. What ranks hold in parts was averaged where it was gathered: see
    `fxzero.sharding.sharded_value`.
    """
    if spec_of(ctx.param).shard_group is None:
        grad = torch.ops.fxzero.reshard_grad(grad, ctx.param, GradSync.REDUCE.value)
    return torch.ops.fxzero.unshard(grad, ctx.param, ctx.sync), None, None


torch.library.register_autograd(
    "fxzero::reshard_grad", _reshard_backward, setup_context=_remember, lib=_library
)
