"""fxzero under Lightning: ``Trainer(strategy=FxZeroStrategy(zero=3))``.

    import fxzero.integrations.lightning          Trainer(strategy="fxzero") is ZeRO-3 from here on

strategy        what a Trainer asks of it: processes, set-up, accumulation, checkpoints
set_up          what of a LightningModule is sharded, moved and compiled, and what is refused
whole_file      a checkpoint in one file, as DDP writes and reads it
sharded_folder  a checkpoint in a folder, to which each rank writes its own part
"""

from lightning.pytorch.strategies import StrategyRegistry

from fxzero.integrations.lightning.sharded_folder import consolidate
from fxzero.integrations.lightning.strategy import FxZeroStrategy

__all__ = ["FxZeroStrategy", "consolidate"]

StrategyRegistry.register(
    "fxzero", FxZeroStrategy, description="ZeRO-3, compiled by fxzero", override=True
)
