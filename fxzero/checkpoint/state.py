"""What a run of training consists of: all that it needs to go on as if it had never stopped."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.optim import Optimizer

from fxzero import _compat
from fxzero.checkpoint import by_name
from fxzero.checkpoint.random_state import RandomState
from fxzero.checkpoint.staging import Staging, local_part
from fxzero.checkpoint.values import decode, encode
from fxzero.errors import CheckpointError, nearest
from fxzero.runtime.delayed import use_gradients

RNG = "rng"
KINDS = "kinds"
"""The classes of the run's parts."""
GROUPS = "optimizer.param_groups"
STATE_VALUES = "optimizer.state"
MODEL_VALUES = "model"
_OWN_NAMES = ("model", "optimizer", "loss_scale", RNG, KINDS, GROUPS, STATE_VALUES, "ranks")


@runtime_checkable
class Trains(Protocol):
    """A training step, as `fxzero.compile_step` makes one."""

    model: nn.Module
    optimizer: Optimizer
    scheduler: Any
    loss_scale: Any


@runtime_checkable
class HasState(Protocol):
    """Whatever can say what it needs to go on, and take it back."""

    def state_dict(self) -> Any:
        """What it needs: numbers, strings, containers of them, arrays, tensors."""

    def load_state_dict(self, state: Any, /) -> Any:
        """Go on from there."""


class TrainState:
    """The parts of a run that `fxzero.checkpoint` saves and loads.

        state = fxzero.TrainState(step, loader=loader)                      the whole step
        state = fxzero.TrainState(model, optimizer, scheduler=scheduler)    the ordinary loop

    Args:
        trained: what `fxzero.compile_step` returned: its model, optimizer, scheduler and loss scale
            belong to it. Or a model, sharded by fxzero, by FSDP2, or not at all.
        optimizer: beside a model, the optimizer over its parameters. Without one, the model alone
            is saved and loaded.
        scheduler: of learning rates.
        loader: gives batches; its ``state_dict`` says how far it is. Each rank has its own.
        rng: whether the random number generators of every rank belong to it.
        others: further parts with ``state_dict`` and ``load_state_dict``, by name, and
            `torch.Generator`s.

    Raises:
        CheckpointError: one of them has no state that could be saved.
    """

    def __init__(
        self,
        trained: Any,
        optimizer: Optimizer | None = None,
        *,
        scheduler: Any = None,
        loader: Any = None,
        rng: bool = True,
        **others: Any,
    ) -> None:
        """See the class."""
        loss_scale = None
        if isinstance(trained, nn.Module):
            model: nn.Module = trained
        elif isinstance(trained, Trains) and optimizer is None:
            model, optimizer, loss_scale = trained.model, trained.optimizer, trained.loss_scale
            scheduler = scheduler if scheduler is not None else trained.scheduler
        else:
            raise CheckpointError(
                "TrainState takes what fxzero.compile_step returned, or a model and its optimizer; "
                f"found {type(trained).__name__}"
                + (" and an optimizer beside it, which has one" if optimizer is not None else "")
            )
        self.model = by_name.unwrapped(model)
        self.optimizer = optimizer
        self.staging = Staging()
        """Where saving copies to."""
        self.parts: dict[str, HasState] = {}
        """What is no model and no optimizer, by name."""
        wanted = {"scheduler": scheduler, "loss_scale": loss_scale, "loader": loader}
        for name, part in {**wanted, **others}.items():
            if part is None:
                continue
            if name in others and name in _OWN_NAMES:
                raise CheckpointError(f"{name!r} is the name of a part of its own: take another")
            part = _Generator(part) if isinstance(part, torch.Generator) else part
            if not isinstance(part, HasState):
                raise CheckpointError(
                    f"{name} is a {type(part).__name__}, which has no state_dict() and no "
                    "load_state_dict(): a checkpoint could not bring it back. Give it both."
                )
            self.parts[name] = part
        if rng:
            self.parts[RNG] = RandomState()

    def look(self) -> tuple[dict[str, Any], dict[str, str]]:
        """The state as it is now.

        Returns:
            The model's and the optimizer's tensors, as `fxzero.checkpoint.by_name` has them, each
            once: the ones that are trained, not copies. And all else, by part, each as JSON.

        Raises:
            CheckpointError: something that a checkpoint cannot hold.
        """
        if self.optimizer is not None:
            use_gradients(self.optimizer)
        kept: dict[str, Tensor] = {}
        values = {
            name: encode(part.state_dict(), name, None if name == RNG else kept)
            for name, part in self.parts.items()
        }
        values[KINDS] = self.kinds()
        with _compat.without_torch_function():  # a hundred layers have thousands of tensors
            shared = by_name.shared_names(self.model)
            model = by_name.model_state(self.model)
            tensors: dict[str, Any] = {"model": {}, "parts": kept}
            extra = {}
            for name, value in model.items():
                if not isinstance(value, Tensor):
                    extra[name] = value
                elif name not in shared:
                    tensors["model"][name] = value
            if extra:
                values[MODEL_VALUES] = encode(extra, "the model's extra state")
            if self.optimizer is not None:
                own = by_name.optimizer_state(self.model, self.optimizer)
                values[GROUPS] = encode(own["param_groups"], GROUPS)
                states, rest = _apart(own["state"])
                values[STATE_VALUES] = encode(rest, STATE_VALUES)
                tensors["optimizer"] = {"state": states, "param_groups": own["param_groups"]}
            for name, tensor in flat(tensors).items():
                _refuse_layout(name, tensor)
        return tensors, {name: json.dumps(value) for name, value in values.items()}

    def kinds(self) -> dict[str, str]:
        """The class of each part, and of the optimizer, by name."""
        kinds = {name: type(part).__name__ for name, part in self.parts.items()}
        if self.optimizer is not None:
            kinds["optimizer"] = type(self.optimizer).__name__
        return kinds

    def state_dict(self) -> dict[str, Any]:
        """All of it: tensors as they are, and what else there is as Python's own objects. For
        `torch.distributed.checkpoint`, which then finds here what it saves and loads."""
        state, texts = self.look()
        kept = state.pop("parts")
        values = {name: decode(json.loads(text), kept) for name, text in texts.items()}
        state["model"] = {name: tensor.detach() for name, tensor in state["model"].items()}
        state["model"].update(
            {
                name: state["model"][first]
                for name, first in by_name.shared_names(self.model).items()
                if first in state["model"]
            }
        )
        state["model"].update(values.pop(MODEL_VALUES, {}))
        values.pop(GROUPS, None)
        values.pop(KINDS)
        for name, rest in values.pop(STATE_VALUES, {}).items():
            state["optimizer"]["state"][name].update(rest)
        return {**state, **values}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned. Nothing is changed where that cannot be.

        Raises:
            CheckpointError: it is of something else.
        """
        wanted = {"model", *self.parts} | ({"optimizer"} if self.optimizer is not None else set())
        if wanted != set(state):
            wrong = sorted(wanted ^ set(state))
            raise CheckpointError(
                f"the state to load has {sorted(state)}, and {sorted(wanted)} were asked for: "
                f"{nearest(wrong[0], wanted | set(state))}"
            )
        self._compare(state["model"])
        optimizer = None
        if self.optimizer is not None:
            optimizer = by_name.counted_state(self.model, self.optimizer, state["optimizer"])
        self.apply(state["model"], optimizer, {name: state[name] for name in self.parts})

    def _compare(self, model: Mapping[str, Any]) -> None:
        """See that a state dict of a model fits this one."""
        here = by_name.model_state(self.model)
        wrong = [f"{name} is not in both" for name in sorted(here.keys() ^ model.keys())]
        wrong += [
            f"{name} is {list(here[name].shape)} here and {list(value.shape)} there"
            for name, value in model.items()
            if isinstance(value, Tensor) and name in here and here[name].shape != value.shape
        ]
        if wrong:
            raise CheckpointError(
                f"the state to load is of another model: {'; '.join(wrong[:4])} ({len(wrong)} "
                "differences). Build the model that was saved."
            )

    def apply(
        self,
        model: Mapping[str, Any] | None,
        optimizer: Mapping[str, Any] | None,
        parts: Mapping[str, Any],
    ) -> None:
        """Take a state that fits.

        Args:
            model: every tensor of the model's state dict, by its plain name; None leaves it as it
                is.
            optimizer: as the optimizer itself loads it; None leaves it as it is.
            parts: states of parts, by name; others stay as they are.
        """
        if model is not None:
            own = self.model.state_dict(keep_vars=True)  # each detached would take a while
            names = {by_name.plain_name(name): name for name in own}
            self.model.load_state_dict({names[name]: value for name, value in model.items()})
        if optimizer is not None:
            assert self.optimizer is not None
            self.optimizer.load_state_dict(dict(optimizer))
        for name, state in parts.items():
            self.parts[name].load_state_dict(state)


class _Generator:
    """A generator of random numbers, as a part with a state."""

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.generator.set_state(state["generator"])


def _apart(
    state: Mapping[str, Mapping[str, Any]],
) -> tuple[dict[str, dict[str, Tensor]], dict[str, dict[str, Any]]]:
    """Tensors of an optimizer's state, and what else it has, each by parameter."""
    tensors: dict[str, dict[str, Tensor]] = {}
    rest: dict[str, dict[str, Any]] = {}
    for name, values in state.items():
        tensors[name] = {key: v for key, v in values.items() if isinstance(v, Tensor)}
        others = {key: v for key, v in values.items() if not isinstance(v, Tensor)}
        if others:
            rest[name] = others
    return tensors, rest


def flat(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors of `TrainState.look` by the names that files have them under."""
    found = {f"model.{name}": tensor for name, tensor in state["model"].items()}
    for name, own in state.get("optimizer", {}).get("state", {}).items():
        found.update({f"optimizer.state.{name}.{key}": tensor for key, tensor in own.items()})
    found.update({f"parts.{name}": tensor for name, tensor in state.get("parts", {}).items()})
    return found


def _refuse_layout(name: str, tensor: Tensor) -> None:
    """See that every element of a tensor is on some rank, as it is."""
    if isinstance(tensor, DTensor):
        odd = [p for p in tensor.placements if type(p) not in (Shard, Replicate)]
        if odd:
            raise CheckpointError(
                f"{name} lies over the ranks as {tensor.placements}, of which a checkpoint can "
                "hold Shard and Replicate alone. Redistribute it before saving."
            )
    elif type(tensor) not in (Tensor, nn.Parameter):
        raise CheckpointError(
            f"{name} is a {type(tensor).__name__}, which a checkpoint does not know how to read "
            "back. Save the tensors that it is made of."
        )
    if name.startswith("model.") and _overlaps(tensor):
        raise CheckpointError(
            f"{name} is expanded: several of its elements are one place in memory, and nothing "
            "could be loaded into it. Register a copy: tensor.expand(…).clone()."
        )
    if tensor.layout is not torch.strided or tensor.is_meta:
        raise CheckpointError(
            f"{name} is {'on meta: it has no values' if tensor.is_meta else tensor.layout}. Give "
            "it memory (fxzero.shard does), or make it dense, before saving."
        )


def _overlaps(tensor: Tensor) -> bool:
    """Whether elements of a tensor share memory."""
    part = local_part(tensor)
    if part.layout is not torch.strided or part.is_contiguous():
        return False
    return any(not step and size > 1 for size, step in zip(part.shape, part.stride(), strict=True))
