"""What lies in ``checkpoint-100``, and going on from there.

    model.safetensors, config.json, …   whole weights, as Trainer has them: `from_pretrained` reads
    fxzero/step-0000000100/             each rank's shards of weights and of the optimizer's state
    scheduler.pt, rng_state_0.pth, …    Trainer's own
    trainer_state.json                  written last: a folder without it is not whole

Going on reads the shards, on any number of ranks and at any ZeRO stage.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fxzero.checkpoint import TrainState, load, save
from fxzero.checkpoint.folder import published
from fxzero.checkpoint.ranks import all_ranks
from fxzero.errors import CheckpointError
from fxzero.integrations.transformers import adapters
from fxzero.integrations.transformers.weights import weights_to_save

if TYPE_CHECKING:
    from transformers import Trainer as _Base
else:
    _Base = object

log = logging.getLogger("fxzero")

SHARDS = "fxzero"
"""The folder of a checkpoint in which shards are."""
SCHEDULER = "scheduler.pt"
TRAINER_STATE = "trainer_state.json"


class CheckpointsMixin(_Base):
    """Trainer's methods that save and load."""

    # -- saving

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write whole weights, configuration and tokenizer. All ranks call it."""
        folder = self.args.output_dir if output_dir is None else output_dir
        weights = weights_to_save(self.model, keep=self.args.should_save)
        if self.args.should_save:
            self._save(folder, state_dict=weights)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Every rank its shards; rank 0 the scheduler."""
        state = self._train_state(self.optimizer)
        save(state, Path(output_dir) / SHARDS, step=self.state.global_step, asynchronous=False)
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER)

    def _train_state(self, optimizer: Any = None) -> TrainState:
        while hasattr(optimizer, "optimizer"):  # accelerate's, around the one that updates
            optimizer = optimizer.optimizer
        peft = adapters.is_peft(self.model)
        model: nn.Module = adapters.Trained(self.model) if peft else self.model
        return TrainState(model, optimizer, rng=False)  # generators are Trainer's

    # -- loading

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Train. With ``resume_from_checkpoint=True`` go on from the newest that is whole."""
        if resume_from_checkpoint is True:
            resume_from_checkpoint = self._newest_whole()
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def _newest_whole(self) -> str:
        """The newest checkpoint of the run that was written to its end, as rank 0 sees it."""
        ranks = all_ranks()
        found: str | None = None
        skipped: list[str] = []
        if ranks.rank == 0:
            for path in _checkpoints(Path(self.args.output_dir)):
                if (path / TRAINER_STATE).is_file():
                    found = str(path)
                    break
                skipped.append(path.name)
        found, skipped = ranks.from_first((found, skipped))
        if found is None:
            raise CheckpointError(
                f"resume_from_checkpoint=True, and {self.args.output_dir} has no checkpoint that "
                f"is whole ({', '.join(skipped) or 'none at all'}). Train without it, or name one."
            )
        if skipped and ranks.rank == 0:
            log.warning("not written to their end, and skipped: %s", ", ".join(skipped))
        return found

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Load weights: this rank's shards of them, or its rows of whole ones."""
        folder = Path(resume_from_checkpoint)
        if has_shards(folder):
            load(self._train_state(), folder / SHARDS)
            return
        if self.is_in_train and (folder / "optimizer.pt").is_file():
            raise CheckpointError(
                f"{folder} was written by a Trainer without fxzero: the state of its optimizer "
                f"counts whole parameters. Begin with its weights: from_pretrained({str(folder)!r})"
            )
        super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Load this rank's shards of the optimizer's state, and the scheduler."""
        if checkpoint is None:
            return
        folder = Path(checkpoint)
        if not has_shards(folder):
            log.warning(
                "%s has weights alone (save_only_model=True): the optimizer and its schedule begin "
                "anew",
                folder,
            )
            return
        load(self._train_state(self.optimizer), folder / SHARDS)
        state = torch.load(folder / SCHEDULER, map_location="cpu", weights_only=True)
        self.lr_scheduler.load_state_dict(state)

    def _load_best_model(self) -> None:
        """Load the weights of the best checkpoint."""
        folder = Path(self.state.best_model_checkpoint)
        if has_shards(folder):
            load(self._train_state(), folder / SHARDS)
        else:
            super()._load_best_model()


def has_shards(checkpoint: str | os.PathLike[str]) -> bool:
    """Whether a checkpoint of Trainer has shards of fxzero in it."""
    folder = Path(checkpoint) / SHARDS
    return folder.is_dir() and bool(published(folder))


def _checkpoints(folder: Path) -> list[Path]:
    """The checkpoints of a run, the newest first."""
    found = []
    for path in folder.glob("checkpoint-*"):
        number = path.name.removeprefix("checkpoint-")
        if number.isdigit() and path.is_dir():
            found.append((int(number), path))
    return [path for _, path in sorted(found, reverse=True)]
