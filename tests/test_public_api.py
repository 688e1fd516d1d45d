"""What `import fxzero` gives, and what it does not load."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points, version

import pytest

import fxzero

_PUBLIC = [
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


def test_the_list() -> None:
    """A name that appears or goes is a decision."""
    assert fxzero.__all__ == _PUBLIC
    for name in _PUBLIC:
        assert getattr(fxzero, name).__doc__, name


def test_the_version() -> None:
    """One number."""
    assert fxzero.__version__ == version("fxzero")


def test_dynamo_finds_the_backend() -> None:
    """Without an import."""
    from fxzero.backend import fxzero as backend

    (entry,) = [e for e in entry_points(group="torch_dynamo_backends") if e.name == "fxzero"]
    assert entry.load() is backend


@pytest.mark.slow
def test_imports_are_light() -> None:
    """Neither the command line nor an integration; nor Inductor, which takes seconds."""
    code = (
        "import sys, fxzero\n"
        "heavy = ('typer', 'rich', 'hydra', 'omegaconf', 'tensorboard', 'torch._inductor.ir', "
        "'fxzero.integrations.deepspeed')\n"
        "print([name for name in heavy if name in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300
    )
    assert result.stdout.strip() == "[]"
