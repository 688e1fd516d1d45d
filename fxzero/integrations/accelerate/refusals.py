"""What accelerate can be told that fxzero does itself, or that would be without effect.

Looked at before accelerate's shared state is made, so that a refusal leaves none behind. What
``accelerate launch`` and ``accelerate config`` say comes as variables of the environment.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from accelerate.utils import DistributedDataParallelKwargs

from fxzero.errors import ConfigError
from fxzero.integrations.plugin import FxZeroPlugin

_ENGINES = {
    "fsdp_plugin": "ACCELERATE_USE_FSDP",
    "deepspeed_plugin": "ACCELERATE_USE_DEEPSPEED",
    "deepspeed_plugins": "ACCELERATE_USE_DEEPSPEED",
    "megatron_lm_plugin": "ACCELERATE_USE_MEGATRON_LM",
    "torch_tp_plugin": "",
    "parallelism_config": "ACCELERATE_USE_PARALLELISM_CONFIG",
}
"""Arguments that choose another engine, and the variables that do."""

_NEEDLESS = frozenset({"find_unused_parameters", "gradient_as_bucket_view", "static_graph"})
"""What DistributedDataParallel must be told, and fxzero sees for itself."""


def refuse_other_engines(arguments: Mapping[str, Any]) -> None:
    """See that nothing else is asked to shard, to wrap or to compile.

    Raises:
        ConfigError: something is.
    """
    for name, variable in _ENGINES.items():
        if arguments.get(name) is not None:
            raise ConfigError(
                f"{name}= and fxzero= are both given, and a model is sharded by one of them. Leave "
                f"out {name}=, or take accelerate's own Accelerator."
            )
        if _is_set(variable):
            raise ConfigError(
                f"{variable} is set: accelerate launch was told, by a flag or by its config file, "
                "to use another engine beside fxzero. Launch with --multi_gpu, or with "
                "torchrun."
            )
    _refuse_compilers(arguments)
    _refuse_ddp(arguments.get("kwargs_handlers") or ())


def refuse_precision(mixed_precision: str, plugin: FxZeroPlugin) -> None:
    """See that one thing says in which dtype is computed.

    Raises:
        ConfigError: two do, or it is a precision that is accelerate's alone.
    """
    if mixed_precision == "fp8":
        raise ConfigError(
            "mixed_precision='fp8' replaces the model's layers by those of another library, which "
            "fxzero does not shard. Use 'bf16', or FxZeroPlugin(param_dtype=torch.bfloat16)."
        )
    if mixed_precision != "no" and plugin.param_dtype is not None:
        raise ConfigError(
            f"mixed_precision={mixed_precision!r} computes under autocast, and "
            f"FxZeroPlugin(param_dtype={plugin.param_dtype}) casts shards before they are "
            "gathered: leave out one of the two. The latter gathers half the bytes."
        )


def asked_precision(arguments: Mapping[str, Any]) -> str:
    """The precision that an Accelerator of these arguments will have."""
    asked = arguments.get("mixed_precision")
    return str(asked or os.environ.get("ACCELERATE_MIXED_PRECISION") or "no").lower()


def _refuse_compilers(arguments: Mapping[str, Any]) -> None:
    backend = arguments.get("dynamo_backend")
    plugin = arguments.get("dynamo_plugin")
    if plugin is not None:
        backend = getattr(plugin.backend, "value", plugin.backend)
    elif backend is None:
        backend = os.environ.get("ACCELERATE_DYNAMO_BACKEND")
    name = str(getattr(backend, "value", backend) or "no").lower()
    if name != "no":
        raise ConfigError(
            f"dynamo_backend={name!r} would compile with another backend a model that fxzero "
            "compiles: leave it out (or --dynamo_backend, of accelerate launch). Inductor compiles "
            "the regions that fxzero makes; FxZeroPlugin(options={'lower_regions': …}) says how."
        )


def _refuse_ddp(handlers: Any) -> None:
    default = DistributedDataParallelKwargs()
    for handler in handlers:
        if not isinstance(handler, DistributedDataParallelKwargs):
            continue
        given = {name for name, value in vars(handler).items() if value != vars(default)[name]}
        for name in sorted(given - _NEEDLESS):
            raise ConfigError(
                f"DistributedDataParallelKwargs({name}={vars(handler)[name]!r}) is for a wrapper "
                "that is not used here. Buckets are FxZeroPlugin(options={'bucket': …}); the dtype "
                "in which gradients are reduced is FxZeroPlugin(reduce_dtype=…)."
            )


def _is_set(variable: str) -> bool:
    return os.environ.get(variable, "false").lower() in ("1", "true", "yes", "on", "y", "t")
