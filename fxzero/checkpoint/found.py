"""One checkpoint: whether it is whole and of this run, and what this rank reads of it.

of the manifest   files, their lengths and hashes
.metadata         which tensors there are           ──► compared with the model's, and the
values.json       groups, scheduler, generators, …      optimizer's
read()            copies of all that this rank needs, checked
apply_…()         the parts, the model and the optimizer go on from them
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata
from torch.distributed.tensor import DTensor

from fxzero._compat import dtensor_like, without_torch_function
from fxzero.checkpoint import by_name, large_pages
from fxzero.checkpoint.coverage import fault_of_chunks
from fxzero.checkpoint.foreign import prefix_of_model, prefix_of_optimizer
from fxzero.checkpoint.manifest import VALUES, file_of_rank
from fxzero.checkpoint.ranks import Ranks
from fxzero.checkpoint.reader import CheckedReader, IntoCopies, names_of_ranks
from fxzero.checkpoint.saved_values import SavedValues
from fxzero.checkpoint.staging import local_part
from fxzero.checkpoint.state import GROUPS, KINDS, MODEL_VALUES, RNG, TrainState
from fxzero.checkpoint.values import encode
from fxzero.checkpoint.wholeness import NotWholeError, manifest_of, whole
from fxzero.errors import CheckpointError, nearest
from fxzero.runtime.optimizers import state_as_made

log = logging.getLogger("fxzero")

_MOSTLY = 0.9
"""Of a rank's bytes, those that no other rank has, where nothing large is on several of them."""


class Found:
    """See the module.

    Args:
        path: its folder.
        state: what it is read for.
        ranks: all ranks of the job; each makes its own.
        leave: parts of the run to leave as they are.
        prefix: what is before the model's names; None finds it.

    Raises:
        NotWholeError: something is missing, or was changed.
        CheckpointError: it is of something else.
    """

    def __init__(
        self,
        path: Path,
        state: TrainState,
        ranks: Ranks,
        leave: Collection[str],
        prefix: str | None,
    ) -> None:
        self.path = path
        self.state = state
        self.ranks = ranks
        self.leave = set(leave)
        self.manifest = whole(manifest_of, path)
        self.step = 0 if self.manifest is None else self.manifest.step
        self.reader = CheckedReader(path, self.manifest)
        self.metadata = whole(self.reader.read_metadata)
        self.saved = self.metadata.state_dict_metadata
        data = b"" if self.manifest is None else whole(self.reader.read_file, VALUES)
        self.values = whole(SavedValues, path / VALUES, data, ranks.rank, ranks.size)
        self.of_ranks = names_of_ranks(self.saved)
        self.left = [f"{name}: as was asked for" for name in sorted(self.leave)]
        """What stays as it was, each with the reason."""
        self.has_optimizer = state.optimizer is not None and "optimizer" not in self.leave
        self.prefix = "model." if prefix is None else prefix
        self.optimizer_prefix = "optimizer.state."
        if self.manifest is None:
            own = by_name.model_state(state.model).items()
            if prefix is None:
                names = [name for name, value in own if isinstance(value, Tensor)]
                self.prefix = prefix_of_model(path, self.saved, names)
            if self.has_optimizer:
                assert state.optimizer is not None
                names = by_name.parameter_names(state.model, state.optimizer)
                self.optimizer_prefix = prefix_of_optimizer(path, self.saved, names)
        self.model: dict[str, Tensor] = {}
        """Templates of the model's tensors, by plain names."""
        self.optimizer: dict[str, dict[str, Tensor]] = {}
        """Templates of the optimizer's, by parameter and key."""
        self.copies: dict[str, Tensor] = {}
        """What is read, by names in files."""
        self.parts: dict[str, Any] = {}
        """States of the run's parts."""
        self._kept: dict[str, Tensor] = {}
        """Templates of large tensors in them, by place."""
        self._before: dict[str, Any] = {}
        self.groups: list[dict[str, Any]] | None = None
        """The optimizer's groups, by names."""
        self.state_values: dict[str, dict[str, Any]] = {}
        """What is no tensor of its state, by parameter."""

    def read(self, meanwhile: Callable[[], None] | None = None) -> None:
        """Read and check all that this rank needs, into memory of its own.

        Args:
            meanwhile: begins with what else is to be done, once it is known what is read.

        Raises:
            NotWholeError: something was changed, or is not there.
            CheckpointError: it is of another model or optimizer, or lacks a part of the run.
        """
        self._compare_kinds()
        with without_torch_function():  # a hundred layers have thousands of tensors
            tied_apart = self._tied_apart()
            of_model = {**self._find_model(), **tied_apart}
        self.parts = self._find_parts()
        self.groups = self._find_groups()
        self._refuse_own_of_others()
        kept = self._find_kept()
        of_optimizer = self._find_optimizer()
        wanted = {**of_model, **of_optimizer, **kept}
        self._tell_of_rounding()
        forms: dict[str, tuple[torch.Size, torch.dtype]] = {}
        for name, template in wanted.items():
            about = self.saved[name]
            assert isinstance(about, TensorStorageMetadata)
            fault = fault_of_chunks(about)
            if fault:
                raise NotWholeError(f"{self.path}: {name} is not whole: {fault}")
            forms[name] = local_part(template).shape, about.properties.dtype
        # The optimizer keeps what it is given, the model copies it, and of parts nobody knows.
        for together in (of_model, of_optimizer, *([name] for name in kept)):
            self.copies |= large_pages.empty({name: forms[name] for name in together})
        # Each rank reads for itself, and what it meets is compared once: `dcp.load` would gather
        # every rank's plan at rank 0 first.
        planner = IntoCopies(self.copies)
        planner.set_up_planner(wanted, self.metadata, is_coordinator=True)
        self.reader.set_up_storage_reader(self.metadata, is_coordinator=True)
        plan = self.reader.prepare_local_plan(planner.create_local_plan())
        is_same_world = self.manifest is not None and self.manifest.world_size == self.ranks.size
        if is_same_world and (self.ranks.size == 1 or self._lie_apart(wanted)):
            self.reader.own = file_of_rank(self.ranks.rank)
        if meanwhile is not None:
            meanwhile()
        whole(self.reader.read_data, plan, planner)
        by_place = {
            name: _like(self.copies[self._name(f"parts.{name}")], template)
            for name, template in self._kept.items()
        }
        for name in self.parts:
            if name != RNG:
                self.parts[name] = self.values.get(name, by_place)
        for name in tied_apart:
            first = by_name.shared_names(self.state.model)[name.removeprefix(self.prefix)]
            if not torch.equal(self.copies[name], self.copies[self._name(self.prefix + first)]):
                raise CheckpointError(
                    f"{name.removeprefix(self.prefix)} and {first} are one tensor here, and two of "
                    f"other values in {self.path}. Build the model that was saved."
                )

    def apply_parts(self) -> None:
        """Let all but the model and the optimizer go on; `take_back` undoes it.

        Raises:
            CheckpointError: a part does not take its state: which one, and what it says.
        """
        for name, state in self.parts.items():
            part = self.state.parts[name]
            self._before[name] = copy.deepcopy(part.state_dict())
            try:
                part.load_state_dict(state)
            except Exception as error:
                raise CheckpointError(
                    f"{name} ({type(part).__name__}) does not take the state that {self.path} has "
                    f"of it: {type(error).__name__}: {error}. Leave it as it is by "
                    f"leave=({name!r},)."
                ) from error

    def take_back(self) -> None:
        """Let the parts be as they were."""
        for name, state in self._before.items():
            self.state.parts[name].load_state_dict(state)

    def apply_optimizer(self) -> None:
        """Let the optimizer go on."""
        if self.groups is None:
            return
        states: dict[str, dict[str, Any]] = {
            name: {
                key: _like(self.copies[self._name(f"{self.optimizer_prefix}{name}.{key}")], t)
                for key, t in keys.items()
            }
            for name, keys in self.optimizer.items()
        }
        for name, rest in self.state_values.items():
            states.setdefault(name, {}).update(rest)
        assert self.state.optimizer is not None
        optimizer = by_name.counted_state(
            self.state.model,
            self.state.optimizer,
            {"state": states, "param_groups": self.groups},
        )
        self.state.apply(None, optimizer, {})

    def apply_model(self) -> None:
        """Let the model go on."""
        model: dict[str, Any] = {
            name: _like(self.copies[self._name(self.prefix + name)], template)
            for name, template in self.model.items()
        }
        for name, first in by_name.shared_names(self.state.model).items():
            if first in model:
                model[name] = model[first]
        own = by_name.model_state(self.state.model)
        model = {name: value for name, value in model.items() if name in own}
        model.update(self._extra_state())
        self.state.apply(model, None, {})

    # -- values

    def _compare_kinds(self) -> None:
        """See that the optimizer and the scheduler are what was saved."""
        saved = self.values.get(KINDS) if self.values.is_for_this_rank(KINDS) else {}
        for name, kind in self.state.kinds().items():
            wanted = name not in self.leave
            if wanted and saved.get(name, kind) != kind and name in ("optimizer", "scheduler"):
                raise CheckpointError(
                    f"the {name} is a {kind} here, and was a {saved[name]} in {self.path}, whose "
                    f"state means something else. Make the one that was saved, or leave it as it "
                    f"is by leave=({name!r},)."
                )

    def _find_parts(self) -> dict[str, Any]:
        parts: dict[str, Any] = {}
        for name in self.state.parts:
            if name in self.leave:
                continue
            if name != RNG and self.values.is_for_this_rank(name):
                parts[name] = self.values.get(name)
            elif self.manifest is None:
                self.left.append(f"{name}: {self.path} has tensors alone")
            elif name not in self.values:
                known = ", ".join(self.values.names()) or "none"
                raise CheckpointError(
                    f"{self.path} has no {name}: it was saved with {known}. "
                    f"Leave it as it is by leave=({name!r},)."
                )
            elif name == RNG:
                parts.update(self._generators())
            else:
                count = self.values.num_ranks(name)
                raise CheckpointError(
                    f"{name} was another on each of {count} ranks, and there are {self.ranks.size} "
                    f"now: {self.path} does not say what each should have. Give it a state that is "
                    f"equal on all ranks, or leave it as it is by leave=({name!r},)."
                )
        return parts

    def _find_kept(self) -> dict[str, Tensor]:
        """Templates of large tensors in the states of parts, by names in files."""
        for part in self.parts:
            places = [] if part == RNG else self.values.places_of_kept(part)
            here: dict[str, Tensor] = {}
            if places:
                encode(self.state.parts[part].state_dict(), part, here)
            for place in places:
                about = self._about(f"parts.{place}")
                if about is None:
                    raise NotWholeError(f"{self.path} has no tensor {place}, which is part of it")
                known = here.get(place)
                if known is None or known.shape != about.size:
                    known = torch.empty(about.size, dtype=about.properties.dtype)
                self._kept[place] = known
        return {self._name(f"parts.{place}"): template for place, template in self._kept.items()}

    def _generators(self) -> dict[str, Any]:
        """Generators of a rank that existed then; another one keeps its own."""
        count = self.values.num_ranks(RNG)
        if self.ranks.rank < count:
            return {RNG: self.values.had_by(RNG, self.ranks.rank)}
        self.left.append(f"{RNG}: {self.path} is of {count} ranks")
        return {}

    def _find_groups(self) -> list[dict[str, Any]] | None:
        if not self.has_optimizer:
            return None
        assert self.state.optimizer is not None
        if self.manifest is None:  # others pickle them
            self.left.append(f"settings of the optimizer: {self.path} has them as a pickle")
            own = by_name.optimizer_state(self.state.model, self.state.optimizer)
            groups: list[dict[str, Any]] = own["param_groups"]
            return groups
        if GROUPS in self.values and not self.values.is_for_this_rank(GROUPS):
            raise CheckpointError(
                f"{GROUPS} were others on each rank in {self.path}, and there is another number of "
                "ranks now. Start as many, or leave them as they are by leave=('optimizer',)."
            )
        if GROUPS not in self.values:
            raise CheckpointError(
                f"{self.path} was saved without an optimizer. Leave it as it is by "
                "leave=('optimizer',)."
            )
        groups = self.values.get(GROUPS)
        self.state_values = self.values.of_states()
        # Whether they fit is seen before anything is changed.
        empty = {"state": {}, "param_groups": groups}
        by_name.counted_state(self.state.model, self.state.optimizer, empty)
        return groups

    def _extra_state(self) -> dict[str, Any]:
        """What a model's modules keep that is no tensor."""
        is_here = self.values.is_for_this_rank(MODEL_VALUES)
        return self.values.get(MODEL_VALUES) if is_here else {}

    # -- tensors

    def _name(self, name: str) -> str:
        """The name in files of a tensor: this rank's own, where each has one."""
        own = self.of_ranks.get(name)
        return name if own is None else own.get(self.ranks.rank, next(iter(own.values())))

    def _about(self, name: str) -> TensorStorageMetadata | None:
        about = self.saved.get(self._name(name))
        return about if isinstance(about, TensorStorageMetadata) else None

    def _find_model(self) -> dict[str, Tensor]:
        """Templates of the model's tensors, by names in files.

        Raises:
            CheckpointError: they are others than those that were saved.
        """
        here = by_name.model_state(self.state.model)
        tensors = {n: t for n, t in here.items() if isinstance(t, Tensor)}
        saved = {
            name.removeprefix(self.prefix)
            for name in [*self.saved, *self.of_ranks]
            if name.startswith(self.prefix) and not name.startswith(self.optimizer_prefix)
        }
        if self.manifest is not None:
            saved |= set(self._extra_state())
        wanted = list(here) if self.manifest is not None else list(tensors)
        missing = [name for name in wanted if name not in saved]
        unknown = sorted(saved - set(here)) if self.prefix else []
        wrong = [
            f"{name} is {list(tensor.shape)} here and {list(about.size)} there"
            for name, tensor in tensors.items()
            if (about := self._about(self.prefix + name)) is not None and about.size != tensor.shape
        ]
        if missing or unknown or wrong:
            raise CheckpointError(
                f"{self.path} is of another model. "
                + "; ".join(
                    [
                        *wrong[:4],
                        *(f"{n} is not in it ({nearest(n, saved)})" for n in missing[:4]),
                        *(f"{n} is not in the model" for n in unknown[:4]),
                    ]
                )
                + f": {len(wrong) + len(missing) + len(unknown)} differences. Build the model that "
                "was saved, or give another folder."
            )
        shared = by_name.shared_names(self.state.model)
        self.model = {name: tensor for name, tensor in tensors.items() if name not in shared}
        return {self._name(self.prefix + name): tensor for name, tensor in self.model.items()}

    def _tied_apart(self) -> dict[str, Tensor]:
        """What is one tensor here and was written as two, by the second's name in files."""
        here = by_name.model_state(self.state.model)
        return {
            self.prefix + name: here[name]
            for name, first in by_name.shared_names(self.state.model).items()
            if name in here and self._places(name) != self._places(first)
        }

    def _places(self, name: str) -> list[Any]:
        """Where the parts of one of the model's tensors are."""
        full = self.prefix + name
        about = self._about(full)
        if about is None:
            return []
        indices = [MetadataIndex(full, chunk.offsets) for chunk in about.chunks]
        found = [self.metadata.storage_data.get(index) for index in indices]
        return [(place.relative_path, place.offset) for place in found if place is not None]

    def _refuse_own_of_others(self) -> None:
        """See that each rank finds what it has for itself."""
        parameters = {by_name.plain_name(n) for n, _ in self.state.model.named_parameters()}
        for name in self.model:
            own = self.of_ranks.get(self.prefix + name, {})
            if not own or len(own) == self.ranks.size:
                continue
            if name in parameters:
                raise CheckpointError(
                    f"{name} is no shard: each of {len(own)} ranks had its own, and there are "
                    f"{self.ranks.size} now. Start as many ranks as saved it."
                )
            self.left.append(f"{name}: each of {len(own)} ranks had its own; one was taken")

    def _find_optimizer(self) -> dict[str, Tensor]:
        """Templates of the optimizer's tensors, by names in files."""
        if not self.has_optimizer:
            return {}
        assert self.state.optimizer is not None
        parameters = {by_name.plain_name(n): p for n, p in self.state.model.named_parameters()}
        names = set(by_name.parameter_names(self.state.model, self.state.optimizer))
        wanted: dict[str, Tensor] = {}
        for full in [*self.saved, *self.of_ranks]:
            if not full.startswith(self.optimizer_prefix):
                continue
            name, _, key = full.removeprefix(self.optimizer_prefix).rpartition(".")
            about = self._about(full)
            if name in names and about is not None:
                known = self.state.optimizer.state.get(parameters[name], {}).get(key)
                if known is None and _lies_otherwise(parameters[name], about, key):
                    known = state_as_made(self.state.optimizer, parameters[name]).get(key)
                template = _template(parameters[name], known, about, f"{name}.{key}")
                self.optimizer.setdefault(name, {})[key] = template
                wanted[self._name(full)] = template
        return wanted

    def _lie_apart(self, wanted: Mapping[str, Tensor]) -> bool:
        """Whether of some tensors, by names in files, each rank has a part by itself, and had that
        same part when they were saved; but for next to nothing of them."""
        apart = total = 0
        for name, tensor in wanted.items():
            part, about = local_part(tensor), self.saved[name]
            total += part.nbytes
            if isinstance(tensor, DTensor) and isinstance(about, TensorStorageMetadata):
                is_shared = any(placement.is_replicate() for placement in tensor.placements)
                had = len(about.chunks) > 1 and part.shape in [c.sizes for c in about.chunks]
                apart += part.nbytes if had and not is_shared else 0
        return apart > _MOSTLY * total

    def _tell_of_rounding(self) -> None:
        narrower = [
            name
            for name, tensor in self.model.items()
            if (about := self._about(self.prefix + name)) is not None
            and _is_narrower(tensor.dtype, about.properties.dtype)
        ]
        if narrower:
            log.warning(
                "%d tensors were saved in more bits than they have here, and are rounded: %s",
                len(narrower),
                ", ".join(narrower[:4]),
            )


def _lies_otherwise(parameter: Tensor, about: TensorStorageMetadata, key: str) -> bool:
    """Whether a tensor of a sharded parameter's state is neither a number nor like the parameter:
    a row, say, of which only the optimizer knows how it lies."""
    alike = about.size == parameter.shape and not key.endswith("step")
    return isinstance(parameter, DTensor) and about.size.numel() > 1 and not alike


def _template(parameter: Tensor, known: Any, about: TensorStorageMetadata, name: str) -> Tensor:
    """What a tensor of a parameter's state lies like: as what there is, as the parameter, or whole
    on every rank."""
    if isinstance(known, Tensor) and known.shape == about.size:
        return known
    if about.size == parameter.shape and not name.endswith(".step"):
        return parameter
    if _lies_otherwise(parameter, about, name):
        raise CheckpointError(
            f"{name} has {list(about.size)} and its parameter {list(parameter.shape)}: how it lies "
            "over the ranks only its optimizer knows. Train a step first, so that it makes its "
            "state, or leave it as it is by leave=('optimizer',)."
        )
    return torch.empty(about.size, dtype=about.properties.dtype)


def _like(copied: Tensor, template: Tensor) -> Tensor:
    """What was read, laid out as what it is read for."""
    return dtensor_like(copied, template) if isinstance(template, DTensor) else copied


def _is_narrower(here: torch.dtype, there: torch.dtype) -> bool:
    """Whether values of one dtype cannot all be kept in another."""
    if here == there or not (here.is_floating_point and there.is_floating_point):
        return here != there
    a, b = torch.finfo(here), torch.finfo(there)
    return a.eps > b.eps or a.max < b.max
