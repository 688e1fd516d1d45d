"""fxzero: a compiler for distributed training steps in PyTorch.

model = fxzero.shard(model, zero=3)
model = torch.compile(model, backend="fxzero")
"""

from fxzero import _checkout
from fxzero.compiler.config import Config
from fxzero.errors import (
    BatchError,
    CaptureError,
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
from fxzero.sharding.params import Traffic
from fxzero.sharding.precision import Precision
from fxzero.sharding.shard import no_sync, report, shard
from fxzero.step import StepOutput, TrainStep, compile_step

__version__ = "0.1.0"

__all__ = [
    "BatchError",
    "CaptureError",
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
    "TrainStep",
    "VerificationError",
    "compile_step",
    "init_distributed",
    "no_sync",
    "report",
    "shard",
]

_checkout.register_backend()
del _checkout, _ops
