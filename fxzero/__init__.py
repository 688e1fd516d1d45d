"""fxzero: a compiler for distributed training steps in PyTorch.

model = fxzero.shard(model, zero=3)
model = torch.compile(model, backend="fxzero")
"""

from fxzero import ops as _ops
from fxzero.config import Config
from fxzero.errors import (
    CaptureError,
    ConfigError,
    ContractError,
    FxZeroError,
    FxZeroWarning,
    PassError,
    ShardingError,
    VerificationError,
)
from fxzero.groups import init_distributed
from fxzero.params import Traffic
from fxzero.sharding import no_sync, report, shard

__version__ = "0.1.0"

__all__ = [
    "CaptureError",
    "Config",
    "ConfigError",
    "ContractError",
    "FxZeroError",
    "FxZeroWarning",
    "PassError",
    "ShardingError",
    "Traffic",
    "VerificationError",
    "init_distributed",
    "no_sync",
    "report",
    "shard",
]

del _ops
