"""Saving a run and going on from it, by torch.distributed.checkpoint.

state = fxzero.TrainState(step, loader=loader)
fxzero.checkpoint.save(state, "checkpoints", step=100, keep=3)
loaded = fxzero.checkpoint.load(state, "checkpoints")

state           what a run consists of: tensors by name, and values
saving, loading the two calls
keeper          both of them in a training loop, with signals
folder          what is in a folder, and how a checkpoint appears in it
writer, reader  files of torch.distributed.checkpoint, hashed and checked
opened          one as it lies on disk, without a model: what the next three read
exporting       its weights as safetensors; from_deepspeed: those of DeepSpeed's checkpoints
verifying       whether it is what was written
comparing       what differs between two
"""

from fxzero.checkpoint.exporting import Exported, export
from fxzero.checkpoint.from_deepspeed import deepspeed_weights, export_deepspeed
from fxzero.checkpoint.keeper import SIGNALS, Checkpoints, Resume
from fxzero.checkpoint.loading import Loaded, load
from fxzero.checkpoint.saving import Saving, save
from fxzero.checkpoint.state import TrainState

__all__ = [
    "SIGNALS",
    "Checkpoints",
    "Exported",
    "Loaded",
    "Resume",
    "Saving",
    "TrainState",
    "deepspeed_weights",
    "export",
    "export_deepspeed",
    "load",
    "save",
]
