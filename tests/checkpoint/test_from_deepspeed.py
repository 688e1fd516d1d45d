"""Weights of DeepSpeed's checkpoints, by DeepSpeed itself; and what is said without it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fxzero.checkpoint import deepspeed_weights, export_deepspeed
from fxzero.errors import CheckpointError, ConfigError

TRAIN = """
import sys
import deepspeed, torch
from torch import nn

folder, stage = sys.argv[1:]
deepspeed.init_distributed(dist_backend="gloo")

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(12, 8)
        self.mid = nn.Linear(8, 8)
        self.head = nn.Linear(8, 12, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("counts", torch.tensor([1, 2]))

    def forward(self, ids):
        return self.head(self.mid(self.embed(ids))).square().mean()

model = Net()
engine, *_ = deepspeed.initialize(
    model=model,
    model_parameters=model.parameters(),
    config={
        "train_batch_size": 2,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": int(stage)},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
    },
)
engine.backward(engine(torch.tensor([1, 2, 3])))
engine.step()
engine.save_checkpoint(folder)
"""


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_what_deepspeed_has_saved(stage: int, tmp_path: Path) -> None:
    """On two ranks: the same as its own conversion, tied weights once."""
    pytest.importorskip("deepspeed", reason="pip install 'fxzero[peers]'")
    safetensors = pytest.importorskip("safetensors.torch", reason="pip install 'fxzero[hf]'")
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    (tmp_path / "train.py").write_text(TRAIN)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    words = [*torchrun, "--nproc-per-node", "2", tmp_path / "train.py", tmp_path / "ds", str(stage)]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    expected = get_fp32_state_dict_from_zero_checkpoint(str(tmp_path / "ds"))
    weights = deepspeed_weights(tmp_path / "ds")
    assert set(weights) == {"embed.weight", "mid.weight", "mid.bias", "head.weight", "counts"}
    assert weights["head.weight"] is weights["embed.weight"]
    found = export_deepspeed(tmp_path / "ds", tmp_path / "out")
    assert found.shared == {"head.weight": "embed.weight"}
    written = safetensors.load_file(found.files[0])
    assert set(written) == set(expected) - {"head.weight"}
    for name, tensor in expected.items():
        assert torch.equal(weights[name], tensor), name
        assert name == "head.weight" or torch.equal(written[name], tensor), name
    half = export_deepspeed(tmp_path / "ds", tmp_path / "half", dtype=torch.bfloat16)
    assert half.dtypes == {"bfloat16": 3, "int64": 1}


def test_without_deepspeed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What to install, or where else to convert."""
    (tmp_path / "latest").write_text("global_step1")
    for name in ("deepspeed", "deepspeed.utils", "deepspeed.utils.zero_to_fp32"):
        monkeypatch.setitem(sys.modules, name, None)
    for call in (lambda: deepspeed_weights(tmp_path), lambda: export_deepspeed(tmp_path, "out")):
        with pytest.raises(ConfigError, match=r"pip install 'deepspeed>=.*zero_to_fp32\.py"):
            call()
    assert not os.path.exists("out")


def test_no_checkpoint_of_deepspeed(tmp_path: Path) -> None:
    """Said before DeepSpeed is asked for."""
    with pytest.raises(ConfigError, match="has no file 'latest'"):
        deepspeed_weights(tmp_path)
    with pytest.raises(ConfigError, match="is no folder"):
        deepspeed_weights(tmp_path / "nowhere")


def test_a_checkpoint_that_deepspeed_cannot_read(tmp_path: Path) -> None:
    """Its own words."""
    pytest.importorskip("deepspeed", reason="pip install 'fxzero[peers]'")
    (tmp_path / "latest").write_text("global_step1")
    with pytest.raises(CheckpointError, match=r"DeepSpeed cannot convert .*global_step1"):
        deepspeed_weights(tmp_path)
