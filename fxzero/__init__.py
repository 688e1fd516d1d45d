"""fxzero: a compiler for distributed training steps in PyTorch.

model = fxzero.shard(model, zero=3)
model = torch.compile(model, backend="fxzero")
"""

from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

from fxzero import _checkout, checkpoint
from fxzero.checkpoint import TrainState
from fxzero.compiler import dump_folder as _dump_folder
from fxzero.compiler.config import Config
from fxzero.errors import (
    BatchError,
    CaptureError,
    CheckpointError,
    ConfigError,
    ContractError,
    DiskError,
    FxZeroError,
    FxZeroWarning,
    HostMemoryError,
    NonFiniteGradientError,
    PassError,
    RankLostError,
    RanksDisagreeError,
    ShardingError,
    VerificationError,
)
from fxzero.ranks.groups import init_distributed
from fxzero.sharding import ops as _ops
from fxzero.sharding import pipeline as _pipeline
from fxzero.sharding import shard as _shard
from fxzero.sharding.leftovers import reduce_leftovers
from fxzero.sharding.params import Traffic
from fxzero.sharding.precision import Precision
from fxzero.sharding.shard import no_sync, report, shard
from fxzero.step import StepOutput, TrainStep, compile_step
from fxzero.step.find_non_finite import find_non_finite

if _TYPE_CHECKING:
    from fxzero.integrations.deepspeed import from_deepspeed

_INTEGRATIONS = {"from_deepspeed": "fxzero.integrations.deepspeed"}
"""Names that are imported when somebody asks for them, and from where."""


def __getattr__(name: str) -> _Any:
    if name not in _INTEGRATIONS:
        raise AttributeError(f"module 'fxzero' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_INTEGRATIONS[name]), name)


def _find_holders(
    model: _Any, example_inputs: _Any, wanted: _pipeline.StagesWanted
) -> dict[str, tuple[int, ...]]:
    from fxzero.inspect.find_stages import find_holders  # what looks at graphs is rarely wanted

    return find_holders(model, example_inputs, wanted)


def _write_graph(compilation: _Any) -> None:
    from fxzero.inspect.dump import write_graph

    write_graph(compilation)


_pipeline.find_holders = _find_holders
_dump_folder.write_graph = _write_graph
_shard.when_sharded = _dump_folder.expect

__version__ = "0.1.0"

__all__ = [
    "BatchError",
    "CaptureError",
    "CheckpointError",
    "Config",
    "ConfigError",
    "ContractError",
    "DiskError",
    "FxZeroError",
    "FxZeroWarning",
    "HostMemoryError",
    "NonFiniteGradientError",
    "PassError",
    "Precision",
    "RankLostError",
    "RanksDisagreeError",
    "ShardingError",
    "StepOutput",
    "Traffic",
    "TrainState",
    "TrainStep",
    "VerificationError",
    "checkpoint",
    "compile_step",
    "find_non_finite",
    "from_deepspeed",
    "init_distributed",
    "no_sync",
    "reduce_leftovers",
    "report",
    "shard",
]

_checkout.register_backend()
del _checkout, _ops
