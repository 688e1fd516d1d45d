"""A checkpoint in a folder: each rank writes its own part, and no rank ever holds the whole.

    epoch=0-step=10.ckpt/step-0000000010     by fxzero.checkpoint: hashed, appears whole or not at
                                             all, `fxzero export` and `fxzero checkpoint` read it

The model, optimizers and generators are its own; what else Lightning saves (loops, callbacks,
schedulers, hyper-parameters) lies beside them as Lightning pickles it, and is read as it says by
``weights_only``.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch.optim import Optimizer

from fxzero import checkpoint as checkpoints
from fxzero.checkpoint.folder import unlock
from fxzero.checkpoint.opened import Opened, find
from fxzero.checkpoint.reader import names_of_ranks
from fxzero.checkpoint.state import MODEL_VALUES
from fxzero.checkpoint.values import decode
from fxzero.errors import CheckpointError
from fxzero.runtime.delayed import use_gradients

_PART = "lightning"
_MODEL = "model."


class _Rest:
    """What Lightning saves beside tensors, as a part of a run."""

    def __init__(self, content: bytes = b"") -> None:
        self.content = content

    def state_dict(self) -> dict[str, bytes]:
        return {"pickle": self.content}

    def load_state_dict(self, state: Mapping[str, bytes]) -> None:
        self.content = state["pickle"]


class Together(Optimizer):
    """Several optimizers as one that has the groups of all: for as long as it is saved or loaded.

    Raises:
        CheckpointError: two of them update one parameter.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        """See the class. It has no groups of its own."""
        self.optimizers = list(optimizers)
        self.param_groups = [g for optimizer in optimizers for g in optimizer.param_groups]
        parameters = [p for group in self.param_groups for p in group["params"]]
        if len({id(p) for p in parameters}) < len(parameters):
            raise CheckpointError(
                "two optimizers update one parameter: a folder would hold one of its two states. "
                "Write one file instead: save_distributed_checkpoint=False."
            )
        for optimizer in optimizers:
            use_gradients(optimizer)
        self.state = {p: s for optimizer in optimizers for p, s in optimizer.state.items()}  # type: ignore[assignment]

    def state_dict(self) -> dict[str, Any]:
        """All of them, whose parameters are counted through."""
        state: dict[int, Any] = {}
        groups: list[dict[str, Any]] = []
        for first, optimizer in self._counted():
            own = optimizer.state_dict()
            state.update({first + index: value for index, value in own["state"].items()})
            groups += [
                {**group, "params": [first + index for index in group["params"]]}
                for group in own["param_groups"]
            ]
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Give each its part."""
        groups = iter(state_dict["param_groups"])
        for first, optimizer in self._counted():
            own = [next(groups) for _ in optimizer.param_groups]
            counted = {i for group in own for i in group["params"]}
            optimizer.load_state_dict(
                {
                    "state": {i - first: s for i, s in state_dict["state"].items() if i in counted},
                    "param_groups": [
                        {**group, "params": [i - first for i in group["params"]]} for group in own
                    ],
                }
            )

    def _counted(self) -> Iterator[tuple[int, Optimizer]]:
        """Each, and the number of its first parameter."""
        first = 0
        for optimizer in self.optimizers:
            yield first, optimizer
            first += sum(len(group["params"]) for group in optimizer.param_groups)


def _state(
    module: LightningModule, optimizers: Sequence[Optimizer], rest: _Rest, goes_on: bool
) -> checkpoints.TrainState:
    optimizer = None
    if optimizers:
        optimizer = optimizers[0] if len(optimizers) == 1 else Together(optimizers)
    return checkpoints.TrainState(module, optimizer, rng=goes_on, **{_PART: rest})


def refuse_changed(given: Mapping[str, Any], state: Mapping[str, Any]) -> None:
    """See that hooks have left a model's state as it is.

    Raises:
        CheckpointError: one has not: a folder would hold what it has replaced.
    """
    missing = object()
    names = sorted(given.keys() | state.keys())
    changed = [n for n in names if given.get(n, missing) is not state.get(n, missing)]
    if changed:
        raise CheckpointError(
            f"on_save_checkpoint of the module or of a callback has changed {len(changed)} entries "
            f"of the state dict ({', '.join(changed[:4])}); a folder holds the model as it is. "
            "Write one file instead: save_distributed_checkpoint=False."
        )


def save(
    module: LightningModule,
    optimizers: Sequence[Optimizer],
    checkpoint: dict[str, Any],
    path: str,
    step: int,
) -> None:
    """Write a checkpoint. All ranks call it.

    Args:
        checkpoint: all that Lightning saves; of it the model's and the optimizers' states are
            taken from the module and the optimizers themselves.

    Raises:
        CheckpointError: it cannot be written.
    """
    rest = dict(checkpoint)
    rest.pop("state_dict")
    goes_on = rest.pop("optimizer_states", None) is not None
    if dist.get_rank() == 0 and Path(path).is_file():
        Path(path).unlink()
    buffer = io.BytesIO()
    torch.save(rest, buffer)
    content = [buffer.getvalue()]  # rank 0's, as in Lightning's own checkpoints
    dist.broadcast_object_list(content, src=0)
    run = _state(module, optimizers if goes_on else (), _Rest(content[0]), goes_on)
    checkpoints.save(run, path, step=step, keep=1, asynchronous=False)
    unlock(Path(path))


def load(
    module: LightningModule, optimizers: Sequence[Optimizer], path: str, weights_only: bool | None
) -> dict[str, Any]:
    """Load a checkpoint into a module, and its optimizers if there are any. All ranks call it.

    Returns:
        What else Lightning has saved.

    Raises:
        CheckpointError: it is of something else, or not whole.
    """
    rest = _Rest()
    run = _state(module, optimizers, rest, goes_on=bool(optimizers))
    if checkpoints.load(run, path) is None:
        raise CheckpointError(
            f"{path} holds no checkpoint that FxZeroStrategy(save_distributed_checkpoint=True) has "
            "written. Of ModelParallelStrategy's and FSDP's, make a file by `python -m "
            "lightning.pytorch.utilities.consolidate_checkpoint`."
        )
    return _unpickled(rest.content, weights_only)


def _unpickled(content: bytes, weights_only: bool | None) -> dict[str, Any]:
    return dict(torch.load(io.BytesIO(content), map_location="cpu", weights_only=weights_only))


def consolidate(folder: str | os.PathLike[str], file: str | os.PathLike[str]) -> None:
    """Make one file of a folder, in one process: what ``load_from_checkpoint`` takes.

        fxzero.integrations.lightning.consolidate("epoch=0-step=10.ckpt", "whole.ckpt")

    It has the weights, hyper-parameters and what callbacks keep; a run does not go on from it, as
    the optimizers' state is left in the folder.

    Raises:
        ConfigError: there is no checkpoint.
        CheckpointError: it is not whole, or not one of Lightning's.
    """
    found = Opened(find(Path(folder)))
    values = found.values() or {}
    if _PART not in values:
        raise CheckpointError(f"{found.path} was not written under Lightning's Trainer")
    state: dict[str, Any] = {}
    of_ranks = names_of_ranks(found.metadata.state_dict_metadata)
    own = {by_rank[min(by_rank)]: name for name, by_rank in of_ranks.items()}
    places = {name: own.get(name, name) for name in found.tensors}
    wanted = [name for name, place in places.items() if place.startswith(_MODEL)]
    for batch in found.batches(wanted):
        for name, tensor in found.read(batch).items():
            state[places[name].removeprefix(_MODEL)] = tensor
    state.update(_value(values.get(MODEL_VALUES, {"all": {}})))
    rest = _unpickled(_value(values[_PART])["pickle"], weights_only=None)
    partial = Path(file).with_name(f"{Path(file).name}.partial")
    torch.save({**rest, "state_dict": state}, partial)
    partial.replace(file)


def _value(by_rank: Mapping[str, Any]) -> Any:
    """What ranks have written of a part: all the same, or rank 0's."""
    return decode(by_rank["all"] if "all" in by_rank else by_rank["ranks"][0])
