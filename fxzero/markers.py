"""What `fxzero.shard` leaves in a model: reading a parameter asks for the full one.

    before   linear.weight                    the full parameter
    after    linear._parameters["weight"]     a DTensor holding this rank's rows
             linear.weight                    fxzero::unshard(shard, "0/linear.weight", …)

The reading property lives in a subclass made for the module, so names, `isinstance` and
hooks stay as they were.
"""

from __future__ import annotations

import functools
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fxzero._compat import never_compile_alone
from fxzero.errors import ShardingError
from fxzero.params import ModelState

KEYS = "_fxzero_keys"
"""Attribute of a marked module: its parameters' keys, by name."""
STATE = "_fxzero_state"
"""Attribute of a marked module: what all parameters of its model share."""


_shown: ContextVar[bool] = ContextVar("shown", default=False)
"""Whether a module is being printed: reading a parameter must then not communicate."""

_classes: dict[tuple[type, tuple[str, ...]], type] = {}


def mark(module: nn.Module, keys: dict[str, str], state: ModelState) -> None:
    """Give the module a class in which reading a parameter unshards it."""
    if not keys:
        return
    module.__dict__[KEYS] = keys
    module.__dict__[STATE] = state
    base = type(module)
    identity = (base, tuple(keys))
    if identity not in _classes:
        members: dict[str, Any] = {name: _reader(name) for name in keys}
        members["extra_repr"] = _extra_repr(base)
        members["__deepcopy__"] = members["__reduce_ex__"] = _refuse_copy
        if isinstance(module, nn.RNNBase):
            members["_flat_weights"] = _flat_weights()
        _classes[identity] = _subclass(base, members)
    module.__class__ = _classes[identity]


def cast_inputs(model: nn.Module, dtype: torch.dtype) -> None:
    """Let the model's forward cast its floating-point inputs.

    In a class of its own rather than a hook: Dynamo compiles a hook of the outermost
    module as a graph of its own.
    """
    base = type(model)

    def cast(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            return value.to(dtype)
        return value

    @functools.wraps(base.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = torch.utils._pytree.tree_map(cast, (args, kwargs))
        return base.forward(self, *args, **kwargs)

    model.__class__ = _subclass(base, {"forward": forward})


def compute_in_fp32(module: nn.Module, result: torch.dtype) -> None:
    """Let one module of a low-precision model compute in fp32; `result` is what it returns."""
    base = type(module)

    def cast(value: Any, dtype: torch.dtype) -> Any:
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            return value.to(dtype)
        return value

    @functools.wraps(base.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        tree_map = torch.utils._pytree.tree_map
        args, kwargs = tree_map(lambda v: cast(v, torch.float32), (args, kwargs))
        return tree_map(lambda v: cast(v, result), base.forward(self, *args, **kwargs))

    module.__class__ = _subclass(base, {"forward": forward})


def _unshard(parameter: nn.Parameter, key: str, sync: str) -> torch.Tensor:
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return torch.ops.fxzero.unshard(local, key, sync)


_unshard_eagerly = torch.compiler.disable(_unshard)
"""For modules that Dynamo leaves to Python (nn.LSTM): what they call, it would compile."""


def _reader(name: str) -> property:
    """A property that reads a parameter as its full self."""

    def read(self: nn.Module) -> Any:
        parameter = self._parameters[name]
        if parameter is None or (not torch.compiler.is_compiling() and _shown.get()):
            return parameter
        keys: dict[str, str] = getattr(self, KEYS)
        unshard = _unshard if torch.compiler.is_compiling() else _unshard_eagerly
        return unshard(parameter, keys[name], getattr(self, STATE).sync)

    never_compile_alone(read)
    return property(read)


def _extra_repr(base: type[nn.Module]) -> Any:
    """What a module says of itself when printed, on one rank as well as on all."""

    def extra_repr(self: nn.Module) -> str:
        token = _shown.set(True)
        try:
            return base.extra_repr(self)
        finally:
            _shown.reset(token)

    return extra_repr


def _refuse_copy(self: nn.Module, *_: Any) -> Any:
    """A copy would share the original's keys, and with them its kept gradients."""
    raise ShardingError(
        f"a sharded {type(self).__name__} cannot be copied or pickled. Copy the model before "
        "fxzero.shard, or save its state_dict()."
    )


def _flat_weights() -> property:
    """`nn.LSTM` and its kin keep their weights in a list as well: derive it from the readers."""

    def read(self: nn.RNNBase) -> list[Any]:
        return [getattr(self, name, None) for name in self._flat_weights_names]

    def write(self: nn.RNNBase, value: list[Any]) -> None:
        """Torch refreshes the list when a parameter is replaced; there is nothing to refresh."""

    return property(read, write)


def _subclass(base: type, members: dict[str, Any]) -> type:
    """A class that differs from its base in some members and in nothing that shows."""
    names = {n: getattr(base, n) for n in ("__module__", "__qualname__", "__doc__")}
    return type(base.__name__, (base,), {**names, **members})
