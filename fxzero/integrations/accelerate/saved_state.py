"""What `save_state` writes of sharded models, and `load_state` reads.

    checkpoint_3/
      fxzero_0/step-…/        a model, its optimizer, what is registered and has shards
      scheduler.bin, random_states_0.pkl, custom_checkpoint_0.pkl, …     as accelerate writes them

accelerate writes an optimizer's state on the main process alone: of a sharded one that is rank
0's part, which every rank would then load. Here each rank writes its own, by
`fxzero.checkpoint`, and any number of ranks reads it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fxzero.checkpoint import TrainState, load, save
from fxzero.checkpoint.folder import published
from fxzero.checkpoint.ranks import all_ranks
from fxzero.errors import CheckpointError

FOLDER = "fxzero_"
"""Before the number of a model with its optimizer, in accelerate's folder."""


@dataclass
class Steps:
    """How far accumulation is: accelerate keeps it per rank, with the generators."""

    step: int = 0

    def state_dict(self) -> dict[str, int]:
        """What a checkpoint keeps."""
        return {"step": self.step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take it back."""
        self.step = int(state["step"])


@dataclass
class Trained:
    """What fxzero saves of an Accelerator's objects; the rest is accelerate's."""

    models: Sequence[nn.Module]
    """Prepared models that are sharded."""
    pairs: list[tuple[nn.Module, Optimizer | None]] = field(default_factory=list)
    """Each with its optimizer; a model that several train is there with each of them."""
    prepared: list[Any] = field(default_factory=list)
    """accelerate's wrappers of these optimizers."""
    registered: dict[str, Any] = field(default_factory=dict)
    """Objects that were registered, and whose state has shards: an average of the weights."""
    steps: Steps = field(default_factory=Steps)

    def states(self) -> Iterator[tuple[str, TrainState]]:
        """What is saved, by its folder."""
        for number, (model, optimizer) in enumerate(self.pairs):
            first = number == 0  # generators and registered objects are there once
            others = {"accelerate": self.steps, **self.registered} if first else {}
            yield f"{FOLDER}{number}", TrainState(model, optimizer, rng=first, **others)

    def save(self, folder: Path) -> None:
        """Write it. A collective.

        Raises:
            CheckpointError: something cannot be written.
        """
        for name, state in self.states():
            place = folder / name
            steps = all_ranks().from_first([item.step for item in published(place)])
            save(state, place, step=1 + max(steps, default=-1), keep=1, asynchronous=False).wait()

    def load(self, folder: Path) -> None:
        """Read it. A collective.

        Raises:
            CheckpointError: it is not there, or of something else.
        """
        wanted = [name for name, _ in self.states()]
        found = all_ranks().from_first(sorted(path.name for path in folder.glob(f"{FOLDER}*")))
        if found != wanted:
            raise CheckpointError(
                f"{folder} has {', '.join(found) or 'nothing that fxzero has saved'}, and "
                f"{', '.join(wanted)} were prepared here. A folder of a plain Accelerator has full "
                "tensors: load its model.safetensors into the model before prepare. Else prepare "
                "the models and optimizers that were saved, in that order."
            )
        for name, state in self.states():
            load(state, folder / name)


def trained(
    models: Sequence[nn.Module], optimizers: Sequence[Any], registered: Sequence[Any], step: int
) -> Trained:
    """Find what belongs to sharded models.

    Args:
        models: those that are sharded.
        optimizers: all that were prepared, as accelerate wraps them.
        registered: all objects that were registered for checkpointing.
        step: how far accumulation is.

    Raises:
        CheckpointError: an optimizer trains several models at once.
    """
    result = Trained(models, steps=Steps(step))
    owners = {id(p): number for number, model in enumerate(models) for p in model.parameters()}
    by_model: dict[int, list[Optimizer]] = {number: [] for number in range(len(models))}
    for prepared in optimizers:
        inner = _inner(prepared)
        updated = {owners.get(id(p)) for group in inner.param_groups for p in group["params"]}
        if updated == {None} or not updated:
            continue
        if len(updated) > 1:
            raise CheckpointError(
                f"{type(inner).__name__} trains parameters of more than one model, which "
                "save_state does not keep apart: make an optimizer for each model, or one model "
                "of both (nn.ModuleDict)."
            )
        by_model[next(number for number in updated if number is not None)].append(inner)
        result.prepared.append(prepared)
    for number, model in enumerate(models):
        mine: list[Optimizer | None] = [*by_model[number]]
        result.pairs += [(model, optimizer) for optimizer in mine or [None]]
    for number, item in enumerate(registered):
        if any(isinstance(value, DTensor) for value in _leaves(item.state_dict())):
            result.registered[f"registered_{number}"] = item
    return result


def _inner(optimizer: Any) -> Optimizer:
    """The optimizer below accelerate's wrapper."""
    inner: Optimizer = getattr(optimizer, "optimizer", optimizer)
    return inner


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _leaves(item)
    else:
        yield value
