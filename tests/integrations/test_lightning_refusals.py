"""What FxZeroStrategy does not take, and says so; nothing of it is accepted and ignored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.plugins import DoublePrecision, FSDPPrecision, MixedPrecision
from lightning.pytorch.strategies import StrategyRegistry

import fxzero
from fxzero.errors import ConfigError
from fxzero.integrations.lightning import FxZeroStrategy
from tests.integrations.lightning_habits import LineSearched
from tests.integrations.lightning_runs import Module, try_to_fit
from tests.parity.harness import Pools


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"zero": 4}, "no ZeRO stage"),
        ({"stage": 3}, "has no stage="),
        ({"find_unused_parameters": True}, "has no find_unused_parameters="),
        ({"options": {"strikt": True}}, "strict"),
        ({"precision_plugin": FSDPPrecision("32-true")}, "belongs to FSDP"),
        (
            {"precision_plugin": MixedPrecision("bf16-mixed", "cpu"), "param_dtype": torch.half},
            "Leave out one of the two",
        ),
        ({"precision_plugin": DoublePrecision(), "param_dtype": torch.half}, "float64"),
    ],
)
def test_a_setting_that_cannot_be_kept_is_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        FxZeroStrategy(**settings)


def test_its_name_is_registered() -> None:
    assert isinstance(StrategyRegistry.get("fxzero"), FxZeroStrategy)
    assert StrategyRegistry.get("fxzero").plugin.zero == 3


class ShardsAPart(Module):
    """Its head is nobody's."""

    def configure_model(self) -> None:
        """All but the head."""
        fxzero.shard(self.model.layers, zero=3)


class ShardsItself(Module):
    """At another stage than the strategy."""

    def configure_model(self) -> None:
        """Stage 2."""
        fxzero.shard(self, zero=2)


def compiled_elsewhere() -> Any:
    """What `trainer.fit(torch.compile(module))` gets."""
    return torch.compile(Module(), backend="eager")


def test_what_would_go_wrong_in_silence_is_refused(ranks: Pools, tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path, log_graph=True)
    for settings, said in (
        ({"make": ShardsAPart}, "nobody would reduce their gradients"),
        ({"make": ShardsItself}, "sharded with zero=2"),
        ({"make": compiled_elsewhere}, "was compiled by torch.compile"),
        ({"logger": logger}, "log_graph"),
    ):
        found = ranks(2).run(try_to_fit, {"zero": 3}, str(tmp_path), **settings)
        assert all("ConfigError" in text and said in text for text in found), found


def test_a_state_that_cannot_be_resumed_is_not_saved(ranks: Pools, tmp_path: Path) -> None:
    """Of LBFGS; its weights alone may be."""
    searched = {"make": LineSearched, "max_steps": 2, "enable_checkpointing": True}
    found = ranks(2).run(try_to_fit, {"zero": 3}, str(tmp_path), **searched)
    assert all("CheckpointError" in text and "save_weights_only=True" in text for text in found)
    saver = ModelCheckpoint(tmp_path / "weights", save_weights_only=True)
    found = ranks(2).run(try_to_fit, {"zero": 3}, str(tmp_path), **searched, callbacks=[saver])
    assert found == ["nothing was said"] * 2
