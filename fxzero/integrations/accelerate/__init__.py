"""accelerate's loop over a model that fxzero has sharded: an `Accelerator` that knows how.

accelerator = FxZeroAccelerator(fxzero=FxZeroPlugin(zero=3), gradient_accumulation_steps=2)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

accelerator   what is done otherwise than in accelerate's own: prepare, no_sync, full weights
refusals      what else accelerate can be told, and what is right instead
saved_state   what `save_state` writes and `load_state` reads
"""

from fxzero.integrations.accelerate.accelerator import FxZeroAccelerator
from fxzero.integrations.plugin import FxZeroPlugin

__all__ = ["FxZeroAccelerator", "FxZeroPlugin"]
