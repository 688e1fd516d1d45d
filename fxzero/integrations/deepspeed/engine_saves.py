"""DeepSpeed's ``save_checkpoint`` and ``load_checkpoint``, in the format of `fxzero.checkpoint`.

folder/step-0000000100          without a tag
folder/TAG/step-0000000100      with one; ``folder/latest`` names the last one saved, as there
"""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from fxzero import checkpoint
from fxzero.checkpoint.folder import sync_folder, write_file
from fxzero.checkpoint.ranks import all_ranks
from fxzero.errors import CheckpointError, ConfigError
from fxzero.integrations.deepspeed.engine_says import EngineSays

_COUNTERS = ("global_steps", "skipped_steps", "micro_steps", "global_samples")
_LATEST, _ASIDE = "latest", ".latest"
_HERE = "."
"""What ``latest`` says of a checkpoint without a tag."""


class _Counted:
    """The part of a checkpoint that is the engine's own."""

    def __init__(self, engine: EngineSays, client_state: Mapping[str, Any]) -> None:
        self.engine, self.client_state = engine, dict(client_state)

    def state_dict(self) -> dict[str, Any]:
        """Counters, and what the caller gives."""
        counters = {name: getattr(self.engine, name) for name in _COUNTERS}
        return {**counters, "client_state": self.client_state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take them."""
        for name in _COUNTERS:
            setattr(self.engine, name, state[name])
        self.client_state = state["client_state"]


class EngineSaves(EngineSays):
    """The two calls."""

    lr_scheduler: LRScheduler | None

    def save_checkpoint(
        self,
        save_dir: str | PathLike[str],
        tag: str | int | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Save the run, behind a step. All ranks call it; when it returns, all is on disk.

        Args:
            save_dir: a folder that all ranks share.
            tag: a folder of its own inside of it; by default none.
            client_state: what to give back on loading: numbers, strings, tensors, lists, mappings.
            save_latest: whether to load this one where no tag is said.
            exclude_frozen_parameters: False.

        Raises:
            CheckpointError: something cannot be saved.
            ConfigError: frozen parameters are to be left out.
        """
        if exclude_frozen_parameters:
            raise ConfigError(
                "save_checkpoint(exclude_frozen_parameters=True): all of the model is saved here. "
                "Leave it out."
            )
        state = self._run(_Counted(self, client_state or {}))
        folder = Path(save_dir) if tag is None else Path(save_dir, str(tag))
        checkpoint.save(state, folder, step=self.global_steps, asynchronous=False).wait()
        if save_latest:
            _note_latest(Path(save_dir), _HERE if tag is None else str(tag))
        return True

    def load_checkpoint(
        self,
        load_dir: str | PathLike[str],
        tag: str | int | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Go on from what `save_checkpoint` has saved, on any number of ranks. All ranks call it.

        Args:
            load_dir: the folder.
            tag: by default the last one saved.
            load_module_strict: True.
            load_optimizer_states, load_lr_scheduler_states: whether to load them too.
            load_module_only: whether to load the model, and nothing else.

        Returns:
            What was loaded, and the client state; None where nothing was saved.

        Raises:
            CheckpointError: it is not whole, or of another model.
            ConfigError: names that do not fit are to be passed over.
        """
        if not load_module_strict:
            raise ConfigError(
                "load_checkpoint(load_module_strict=False): every tensor of the model must be "
                "there. Leave it out, or load weights before from_deepspeed(…).engine(model)."
            )
        tag = _latest(Path(load_dir)) if tag is None else str(tag)
        counted = _Counted(self, {})
        state = self._run(counted)
        leave = {
            "optimizer": load_optimizer_states and not load_module_only,
            "scheduler": load_lr_scheduler_states and not load_module_only,
            **dict.fromkeys(("loss_scale", "engine", "rng"), not load_module_only),
        }
        loaded = checkpoint.load(
            state,
            Path(load_dir, tag),
            leave=[n for n, wanted in leave.items() if not wanted and n in _names(state)],
        )
        return (None, None) if loaded is None else (str(loaded.path), counted.client_state)

    def _run(self, counted: _Counted) -> checkpoint.TrainState:
        state = checkpoint.TrainState(
            self.module, self.optimizer, scheduler=self.lr_scheduler, engine=counted
        )
        if self.loss_scale is not None:
            state.parts["loss_scale"] = self.loss_scale
        return state


def _names(state: checkpoint.TrainState) -> set[str]:
    return {"optimizer", *state.parts}


def _note_latest(folder: Path, tag: str) -> None:
    """Let rank 0 write the name of the last checkpoint, whole or not at all."""
    ranks = all_ranks()
    failed: CheckpointError | None = None
    if ranks.rank == 0:
        try:
            write_file(folder / _ASIDE, tag.encode())
            (folder / _ASIDE).replace(folder / _LATEST)
            sync_folder(folder)
        except CheckpointError as error:
            failed = error
        except OSError as error:
            failed = CheckpointError(f"{folder / _LATEST} cannot be written: {error.strerror}")
    ranks.agree(failed)


def _latest(folder: Path) -> str:
    """What rank 0 reads there, on all ranks: they load one checkpoint."""
    ranks, tag = all_ranks(), _HERE
    failed: CheckpointError | None = None
    if ranks.rank == 0 and (folder / _LATEST).is_file():
        try:
            tag = (folder / _LATEST).read_text(encoding="utf-8").strip() or _HERE
        except (OSError, UnicodeDecodeError) as error:
            failed = CheckpointError(f"{folder / _LATEST} cannot be read: {error}")
    ranks.agree(failed)
    return ranks.from_first(tag)
