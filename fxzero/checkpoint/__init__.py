"""Saving a run and going on from it, by torch.distributed.checkpoint.

state = fxzero.TrainState(step, loader=loader)
fxzero.checkpoint.save(state, "checkpoints", step=100, keep=3)
loaded = fxzero.checkpoint.load(state, "checkpoints")

state           what a run consists of: tensors by name, and values
saving, loading the two calls
keeper          both of them in a training loop, with signals
folder          what is in a folder, and how a checkpoint appears in it
writer, reader  files of torch.distributed.checkpoint, hashed and checked
"""

from fxzero.checkpoint.keeper import SIGNALS, Checkpoints, Resume
from fxzero.checkpoint.loading import Loaded, load
from fxzero.checkpoint.saving import Saving, save
from fxzero.checkpoint.state import TrainState

__all__ = ["SIGNALS", "Checkpoints", "Loaded", "Resume", "Saving", "TrainState", "load", "save"]
