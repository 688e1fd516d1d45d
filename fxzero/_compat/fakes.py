"""What has no value yet: fake tensors, the modes that make them, and symbolic numbers."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode


def is_fake(value: Any) -> bool:
    """Whether a value is a tensor without values."""
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(value, FakeTensor)


def is_plain_fake(value: Any) -> bool:
    """Whether a value is a fake tensor that is no subclass of it, and dense."""
    from torch._subclasses.fake_tensor import FakeTensor

    return type(value) is FakeTensor and value.layout is torch.strided


def has_symbolic_shape(value: torch.Tensor) -> bool:
    """Whether a fake tensor's layout depends on symbols."""
    return bool(value._has_symbolic_sizes_strides)


def fake_tensors() -> Any:
    """A context in which tensors are made without values."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode()


KNOWN_ELEMENTS = 1024
"""Most of a tensor whose values a fake one keeps while a model is built."""


class _AsReal(TorchFunctionMode):
    """Lets functions that make tensors do on fakes what they do on real ones.

    Rates that grow with depth are read from a ``torch.linspace``: a short one has its values. And
    ``torch.tensor`` on the meta device makes what no fake mode knows (torch 2.11 to 2.13).
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Call a function of torch."""
        kwargs = kwargs or {}
        if func is torch.linspace:
            return self._spaced(*args, **kwargs)
        made = func(*args, **kwargs)
        if func in (torch.tensor, torch.as_tensor) and made.device.type == "meta":
            shape, needs_grad = made.shape, made.requires_grad
            made = torch.empty(shape, dtype=made.dtype, device="meta", requires_grad=needs_grad)
        return made

    @staticmethod
    def _spaced(*args: Any, **kwargs: Any) -> torch.Tensor:
        device = torch.device(kwargs.get("device") or "cpu")
        tensors = any(isinstance(value, torch.Tensor) for value in (*args, *kwargs.values()))
        if tensors or device.type != "cpu":
            return torch.linspace(*args, **kwargs)
        with real_tensors():
            values = torch.linspace(*args, **kwargs)
        if values.numel() > KNOWN_ELEMENTS:
            return torch.linspace(*args, **kwargs)
        return torch.tensor(values.tolist(), dtype=values.dtype, requires_grad=values.requires_grad)


@contextlib.contextmanager
def building_on_fakes() -> Iterator[None]:
    """Within it what builds a model finds fake tensors to do what real ones do.

    Torch 2.11 to 2.13 converts (``model.to(torch.bfloat16)``) and copies (``copy.deepcopy``) no
    fake parameters, and reads values of those that ``trunc_normal_`` fills.
    """
    from torch._subclasses import fake_tensor
    from torch._subclasses.fake_tensor import FakeTensor

    if "__deepcopy__" in vars(FakeTensor):  # within another one
        yield
        return
    swap, truncated = torch.utils.swap_tensors, torch.nn.init._no_grad_trunc_normal_
    most_elements = fake_tensor.CONSTANT_NUMEL_LIMIT

    def fill(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return tensor if is_fake(tensor) else truncated(tensor, *args, **kwargs)

    def convert(tensor: Any, converted: Any) -> None:
        if is_fake(tensor) and is_fake(converted):
            _take_over(tensor, converted, swap)
        else:
            swap(tensor, converted)

    torch.utils.swap_tensors = convert
    torch.nn.init._no_grad_trunc_normal_ = fill
    fake_tensor.CONSTANT_NUMEL_LIMIT = KNOWN_ELEMENTS
    setattr(FakeTensor, "__deepcopy__", _copied_fake)  # noqa: B010
    try:
        with _AsReal():
            yield
    finally:
        torch.utils.swap_tensors = swap
        torch.nn.init._no_grad_trunc_normal_ = truncated
        fake_tensor.CONSTANT_NUMEL_LIMIT = most_elements
        delattr(FakeTensor, "__deepcopy__")  # Tensor's own is found again


def _take_over(tensor: Any, converted: Any, swap: Callable[[Any, Any], None]) -> None:
    """Let a fake tensor become another one.

    ``Module.to`` swaps the two, which torch refuses where a fake mode knows them by weak
    references. So the first takes over the other's data: who holds it, as tied modules and
    optimizers do, still holds it. From and to the meta device there is no taking over; there the
    modes forget them.
    """
    if (tensor.device.type == "meta") == (converted.device.type == "meta"):
        tensor.data = converted.detach()
        tensor.fake_device = converted.fake_device
        tensor.constant = converted.constant
        return
    for one in (tensor, converted):
        one.fake_mode.fake_tensor_converter = type(one.fake_mode.fake_tensor_converter)()
    swap(tensor, converted)


def _copied_fake(tensor: Any, memo: dict[int, Any]) -> Any:
    """A fake tensor of the same mode; what others have set on it is copied too."""
    if id(tensor) in memo:
        return memo[id(tensor)]
    if not tensor.is_leaf:
        raise RuntimeError(
            "Only Tensors created explicitly by the user (graph leaves) support the deepcopy "
            "protocol at the moment."
        )
    with torch.no_grad(), tensor.fake_mode:
        made = tensor.detach().clone()
    made.requires_grad_(tensor.requires_grad)
    memo[id(tensor)] = made
    for name, value in vars(tensor).items():
        if name not in vars(made):
            setattr(made, name, copy.deepcopy(value, memo))
    if tensor.grad is not None:
        made.grad = copy.deepcopy(tensor.grad, memo)
    return made


@contextlib.contextmanager
def fake_copies() -> Iterator[Callable[[Any], Any]]:
    """A context like `fake_tensors`, and what copies modules and tensors into it, without their
    values: those on the meta device for the CPU."""
    from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode

    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def on_cpu(value: torch.Tensor) -> torch.Tensor:
        with mode:
            made = torch.empty_like(value, device="cpu")
            if isinstance(value, torch.nn.Parameter):
                return torch.nn.Parameter(made, requires_grad=value.requires_grad)
            return made

    def copied(value: Any) -> Any:
        tensors = torch.utils._pytree.tree_leaves(value)
        if isinstance(value, torch.nn.Module):
            tensors = [*value.parameters(), *value.buffers()]
        known = {id(t): on_cpu(t) for t in tensors if isinstance(t, torch.Tensor) and t.is_meta}
        with FakeCopyMode(mode):
            return copy.deepcopy(value, known)

    with mode:
        yield copied


@contextlib.contextmanager
def real_tensors() -> Iterator[None]:
    """Make and use tensors with values inside of a compilation."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily
    from torch.utils._python_dispatch import _disable_current_modes

    with unset_fake_temporarily(), _disable_current_modes():
        yield


@functools.cache
def let_fakes_have_dtypes_of_real_ones() -> None:
    """Mend what torch says wrongly of tensors that it has not computed yet.

    torch 2.11 takes the logarithms that attention on CPU returns for fp32, and so would kernels
    that read them: those of float64 queries are float64.
    """
    operator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    with real_tensors(), fake_tensors():
        query = torch.empty((1, 1, 1, 1), dtype=torch.float64)
        if operator(query, query, query)[1].dtype == query.dtype:
            return
    from torch import _meta_registrations as traced
    from torch._subclasses.fake_impls import register_op_impl

    @register_op_impl(operator)
    def attention(mode: Any, _: Any, query: Any, *args: Any, **kwargs: Any) -> Any:
        with mode:
            shapes = traced.meta__scaled_dot_product_flash_attention_for_cpu
            result, logarithms = shapes(query, *args, **kwargs)
            return result, logarithms.double() if query.dtype == torch.float64 else logarithms


@functools.cache
def let_fakes_say_their_device_at_once() -> None:
    """Answer a question of AOTAutograd's, one for each input and trace, without its detours.

    Which device a fake tensor claims to be on goes through functionalization and four modes, 0.2 ms
    each time (torch 2.11 to 2.13), and comes out as the attribute that it is.
    """
    from torch._subclasses.fake_tensor import FakeTensor
    from torch._subclasses.functional_tensor import FunctionalTensorMode

    answer = FunctionalTensorMode.__torch_dispatch__
    device = torch.ops.prim.device.default

    @functools.wraps(answer)
    def dispatch(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        asks = func is device and type(args[0]) is FakeTensor
        if asks and not args[0].fake_mode.in_kernel_invocation:
            return args[0].fake_device
        return answer(self, func, types, args, kwargs)

    FunctionalTensorMode.__torch_dispatch__ = dispatch  # type: ignore[method-assign]


def empty_fake(like: torch.Tensor, mode: Any) -> torch.Tensor:
    """A fake tensor in a mode, with the layout of another one and memory of its own.

    What ``torch.empty_strided`` makes inside of the mode, at a third of its time.
    """
    from torch._subclasses.fake_tensor import FakeTensor, in_kernel_invocation_manager

    with in_kernel_invocation_manager(mode):
        meta = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device="meta")
    return FakeTensor(mode, meta, like.device)


def fake_beside(like: torch.Tensor, mode: Any) -> Any:
    """Another fake parameter that is like one of Dynamo's in all but its memory and identity."""
    if isinstance(like, DTensor):
        local = empty_fake(like._local_tensor, mode)
        made: torch.Tensor = DTensor.__new__(
            type(like), local, like._spec, requires_grad=like.requires_grad
        )
    else:
        made = empty_fake(like, mode).requires_grad_(like.requires_grad)
        for name in ("pytype", "dispatch_keys"):
            setattr(made, name, getattr(like, name, None))
    setattr(made, "_is_param", True)  # noqa: B010  # as nn.Parameter's isinstance asks
    return made


def no_value_error() -> type[Exception]:
    """What asking a fake tensor for its value raises."""
    from torch._subclasses.fake_tensor import DataDependentOutputException

    return DataDependentOutputException


def fake_mode_of_tensor(value: torch.Tensor) -> Any:
    """The mode that made a fake tensor."""
    from torch._subclasses.fake_tensor import FakeTensor

    assert isinstance(value, FakeTensor)
    return value.fake_mode


def mode_of(tensor: torch.Tensor) -> Any:
    """A context in which tensors are made as this one is: fake beside fake ones."""
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return fake_mode_of_tensor(local) if is_fake(local) else contextlib.nullcontext()


def fake_mode_of(graph: fx.Graph) -> Any:
    """The FakeTensorMode of the graph's values, None for a graph without tensors."""
    for node in graph.nodes:
        value = node.meta.get("val")
        mode = getattr(value, "fake_mode", None)
        if mode is not None:
            return mode
    return None


def is_symbolic(value: Any) -> bool:
    """Whether a value is a symbolic number."""
    return isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool))


def hint(number: Any) -> int:
    """A number that may be symbolic, as it is in the call that is being compiled.

    ``int()`` of it would make a guard, and another number another graph. 0 for a number that
    only the data tell.
    """
    if not is_symbolic(number):
        return int(number)
    known = number.node.hint
    return int(known) if isinstance(known, (int, float)) else 0


def hinted(value: torch.Tensor) -> torch.Tensor:
    """A tensor without symbolic sizes: itself, or one on the meta device of the sizes at hand."""
    if not any(is_symbolic(size) for size in value.shape):
        return value
    return torch.empty([hint(size) for size in value.shape], dtype=value.dtype, device="meta")
