"""Loading: the newest checkpoint that is whole, into whatever layout the run has now.

    DIR/step-300   __1_0.distcp is shorter than it was     skipped, and said
    DIR/step-200   whole                                   ──► copies ──► model, optimizer, parts

All ranks read, check and copy first; if one of them meets a byte that was changed, all go on to the
checkpoint before. Only when everything has been read is anything changed.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor

from fxzero._compat import dtensor_like
from fxzero.checkpoint import by_name
from fxzero.checkpoint.folder import PUBLISHED, published, read_manifest
from fxzero.checkpoint.manifest import NAME, VALUES, Manifest
from fxzero.checkpoint.ranks import Ranks, all_ranks
from fxzero.checkpoint.reader import CheckedReader, IntoCopies, is_of_others
from fxzero.checkpoint.saving import names_of_ranks, wait_for_running
from fxzero.checkpoint.staging import local_part
from fxzero.checkpoint.state import GROUPS, MODEL_VALUES, STATE_VALUES, TrainState
from fxzero.checkpoint.values import decode
from fxzero.errors import CheckpointError, nearest

log = logging.getLogger("fxzero")

_NARROWER = "{count} tensors were saved in more bits than they have here, and are rounded: {names}"


class NotWholeError(CheckpointError):
    """A checkpoint of which something is missing or was changed: the one before may be whole."""


@dataclass(frozen=True)
class Loaded:
    """What a run goes on from."""

    step: int
    """How many steps were trained."""
    path: Path
    skipped: tuple[str, ...]
    """Newer checkpoints that were not whole, each with what is wrong."""
    left: tuple[str, ...]
    """Parts of the run that stay as they were, each with the reason."""


def load(
    state: TrainState,
    folder: str | os.PathLike[str],
    *,
    step: int | None = None,
    leave: Collection[str] = (),
    prefix: str | None = None,
) -> Loaded | None:
    """Load a run. All ranks call it.

        loaded = fxzero.checkpoint.load(state, "checkpoints")
        first = loaded.step if loaded is not None else 0

    World size, ZeRO stage, mesh, door and dtypes may be others than those that saved it; the
    generators of ranks that did not exist then are left as they are.

    Args:
        state: what to load into. Nothing of it is changed unless everything could be read.
        folder: where `save` has put checkpoints; or one checkpoint, of ours or of
            `torch.distributed.checkpoint.save`.
        step: load the one that was saved under this number, and no other.
        leave: parts of the run to leave as they are: ``"optimizer"``, ``"scheduler"``,
            ``"loader"``, ``"rng"``, …
        prefix: in a checkpoint of others, what is before the model's names (``"app.model."``),
            where that is not clear.

    Returns:
        What was loaded; None if the folder has no checkpoint at all.

    Raises:
        CheckpointError: no checkpoint is whole; it is of another model; a part of the run is not
            in it.
    """
    wait_for_running()
    ranks = all_ranks()
    unknown = set(leave) - {"optimizer", *state.parts}
    if unknown:
        name = sorted(unknown)[0]
        raise CheckpointError(f"leave={name!r}: {nearest(name, {'optimizer', *state.parts})}")
    folder = Path(folder)
    paths = ranks.from_first(_candidates(folder, step) if ranks.rank == 0 else None)
    assert paths is not None
    skipped: list[str] = []
    for path in paths:
        error: Exception | None = None
        found: _Found | None = None
        try:
            found = _Found(path, state, ranks, leave, prefix)
            found.read()
        except NotWholeError as met:
            error = met
        except Exception as met:
            error = met
        said = ranks.gather(None if error is None else (type(error) is NotWholeError, str(error)))
        if not any(said):
            assert found is not None
            left = found.apply()
            if skipped:
                log.warning("checkpoints were skipped: %s", "; ".join(skipped))
            log.info("going on from %s", path)
            return Loaded(found.step, path, tuple(skipped), tuple(left))
        worst = [text for text in said if text is not None]
        if not all(not_whole for not_whole, _ in worst):
            ranks.agree(error if not isinstance(error, NotWholeError) else None)
            raise error or CheckpointError(worst[0][1])
        skipped.append(worst[0][1])
    if skipped:
        raise CheckpointError(
            f"{folder} has no checkpoint that is whole:\n  " + "\n  ".join(skipped) + "\nNothing "
            "was loaded. Bring one of them back from a copy, or begin anew in another folder."
        )
    if step is not None:
        steps = ranks.from_first([found.step for found in published(folder)])
        raise CheckpointError(f"{folder} has no checkpoint {step}. It has {steps or 'none'}.")
    return None


def _candidates(folder: Path, step: int | None) -> list[Path]:
    """Checkpoints to try, the best first."""
    if is_of_others(folder):
        return [folder]
    found = [item for item in published(folder) if step in (None, item.step)]
    return [item.path for item in reversed(found)]


class _Found:
    """One checkpoint, and what this rank reads of it."""

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
        self.manifest = _manifest_of(path)
        self.reader = CheckedReader(path, self.manifest)
        self.metadata = _whole(self.reader.read_metadata)
        self.values = self._read_values()
        self.step = 0 if self.manifest is None else self.manifest.step
        self.prefix = "model." if prefix is None else prefix
        self.optimizer_prefix = "optimizer.state."
        if self.manifest is None:
            self._find_prefixes(prefix)
        self.of_ranks = names_of_ranks(self.metadata.state_dict_metadata)
        self.model: dict[str, Tensor] = {}
        """Templates of the model's tensors, by plain names."""
        self.optimizer: dict[str, dict[str, Tensor]] = {}
        """Templates of the optimizer's, by parameter and key."""
        self.copies: dict[str, Tensor] = {}
        """What is read, by names in files."""
        self.left: list[str] = [f"{name}: as was asked for" for name in sorted(self.leave)]

    def read(self) -> None:
        """Read and check all that this rank needs, into memory of its own.

        Raises:
            NotWholeError: something was changed, or is not there.
            CheckpointError: it is of another model, or lacks a part of the run.
        """
        self.parts = self._parts()
        wanted = {**self._find_model(), **self._find_optimizer()}
        self._warn_of_rounding(wanted)
        for name, template in wanted.items():
            about = self.metadata.state_dict_metadata[name]
            part = local_part(template)
            self.copies[name] = torch.empty(part.shape, dtype=about.properties.dtype)
        self.groups = self._groups()

        # Each rank reads for itself, and what it meets is compared once: as `dcp.load` does, which
        # would gather every rank's plan at rank 0 first.
        planner = IntoCopies(self.copies)
        planner.set_up_planner(wanted, self.metadata, is_coordinator=True)
        self.reader.set_up_storage_reader(self.metadata, is_coordinator=True)
        plan = self.reader.prepare_local_plan(planner.create_local_plan())
        _whole(self.reader.read_data, plan, planner)

    def apply(self) -> list[str]:
        """Let the run go on from it.

        Returns:
            What stays as it was.
        """
        model: dict[str, Any] = {
            name: _like(self.copies[self._name(self.prefix + name)], template)
            for name, template in self.model.items()
        }
        own = by_name.model_state(self.state.model)
        for name, first in by_name.shared_names(self.state.model).items():
            if name in own and first in model:
                model[name] = model[first]
        model.update(self.values.get(MODEL_VALUES, {}))
        optimizer = None
        if self.groups is not None:
            states: dict[str, dict[str, Any]] = {
                name: {
                    key: _like(self.copies[self._name(f"{self.optimizer_prefix}{name}.{key}")], t)
                    for key, t in keys.items()
                }
                for name, keys in self.optimizer.items()
            }
            for name, rest in self.values.get(STATE_VALUES, {}).items():
                states.setdefault(name, {}).update(rest)
            assert self.state.optimizer is not None
            optimizer = by_name.counted_state(
                self.state.model,
                self.state.optimizer,
                {"state": states, "param_groups": self.groups},
            )
        self.state.apply(model, optimizer, self.parts)
        return self.left

    # -- values

    def _read_values(self) -> dict[str, Any]:
        """What is no tensor, by part: that of this rank."""
        if self.manifest is None:
            return {}
        content = json.loads(_whole(self.reader.read_file, VALUES))
        self.raw_values: dict[str, Any] = content
        found = {}
        for name, value in content.items():
            if "all" in value:
                found[name] = decode(value["all"])
            elif self.ranks.size == len(value["ranks"]):
                found[name] = decode(value["ranks"][self.ranks.rank])
        return found

    def _parts(self) -> dict[str, Any]:
        """States of the run's parts."""
        parts: dict[str, Any] = {}
        for name in self.state.parts:
            if name in self.leave:
                continue
            if name in self.values:
                parts[name] = self.values[name]
            elif self.manifest is None:
                self.left.append(f"{name}: {self.path} has tensors alone")
            elif name not in self.raw_values:
                raise CheckpointError(
                    f"{self.path} has no {name}: it was saved with "
                    f"{', '.join(sorted(self.raw_values))}. Leave it as it is by leave=({name!r},)."
                )
            elif name == "rng":
                parts.update(self._generators())
            else:
                count = len(self.raw_values[name]["ranks"])
                raise CheckpointError(
                    f"{name} was another on each of {count} ranks, and there are {self.ranks.size} "
                    f"now: {self.path} does not say what each should have. Give it a state that is "
                    f"equal on all ranks, or leave it as it is by leave=({name!r},)."
                )
        return parts

    def _generators(self) -> dict[str, Any]:
        """Generators of a rank that existed then; another one keeps its own."""
        saved = self.raw_values["rng"]["ranks"]
        if self.ranks.rank < len(saved):
            return {"rng": decode(saved[self.ranks.rank])}
        self.left.append(f"rng: {self.path} is of {len(saved)} ranks")
        return {}

    def _groups(self) -> list[dict[str, Any]] | None:
        """The optimizer's groups, by names."""
        if self.state.optimizer is None or "optimizer" in self.leave:
            return None
        if self.manifest is None:  # others pickle them
            self.left.append(f"settings of the optimizer: {self.path} has them as a pickle")
            return by_name.optimizer_state(self.state.model, self.state.optimizer)["param_groups"]
        if GROUPS not in self.values:
            raise CheckpointError(
                f"{self.path} was saved without an optimizer. Leave it as it is by "
                "leave=('optimizer',)."
            )
        groups: list[dict[str, Any]] = self.values[GROUPS]
        # Whether they fit is seen before anything is changed.
        empty = {"state": {}, "param_groups": groups}
        by_name.counted_state(self.state.model, self.state.optimizer, empty)
        return groups

    # -- tensors

    def _name(self, name: str) -> str:
        """The name in files of a tensor: this rank's own, where each has one."""
        own = self.of_ranks.get(name)
        return name if own is None else own.get(self.ranks.rank, next(iter(own.values())))

    def _about(self, name: str) -> TensorStorageMetadata | None:
        about = self.metadata.state_dict_metadata.get(self._name(name))
        return about if isinstance(about, TensorStorageMetadata) else None

    def _find_model(self) -> dict[str, Tensor]:
        """Templates of the model's tensors, by names in files.

        Raises:
            CheckpointError: they are others than those that were saved.
        """
        shared = by_name.shared_names(self.state.model)
        here = by_name.model_state(self.state.model)
        tensors = {n: t for n, t in here.items() if isinstance(t, Tensor)}
        saved = {
            name.removeprefix(self.prefix)
            for name in [*self.metadata.state_dict_metadata, *self.of_ranks]
            if name.startswith(self.prefix) and not name.startswith(self.optimizer_prefix)
        }
        missing = [name for name in tensors if name not in saved]
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
        self.model = {name: tensor for name, tensor in tensors.items() if name not in shared}
        self._refuse_own_of_others(self.model)
        return {self._name(self.prefix + name): tensor for name, tensor in self.model.items()}

    def _refuse_own_of_others(self, tensors: Mapping[str, Tensor]) -> None:
        """See that each rank finds what it has for itself."""
        names = {id(p): n for n, p in self.state.model.named_parameters()}
        parameters = set(names.values())
        for name in tensors:
            own = self.of_ranks.get(self.prefix + name, {})
            if own and len(own) != self.ranks.size:
                if name in parameters:
                    raise CheckpointError(
                        f"{name} is no shard: each of {len(own)} ranks had its own, and there are "
                        f"{self.ranks.size} now. Start as many ranks as saved it."
                    )
                self.left.append(f"{name}: each of {len(own)} ranks had its own; one was taken")

    def _find_optimizer(self) -> dict[str, Tensor]:
        """Templates of the optimizer's tensors, by names in files."""
        if self.state.optimizer is None or "optimizer" in self.leave:
            return {}
        parameters = {by_name.plain_name(n): p for n, p in self.state.model.named_parameters()}
        names = by_name.parameter_names(self.state.model, self.state.optimizer)
        wanted: dict[str, Tensor] = {}
        keys = self._keys_of_states(set(names))
        for name in names:
            for key, about in keys.get(name, {}).items():
                template = _template(parameters[name], about, f"{name}.{key}")
                self.optimizer.setdefault(name, {})[key] = template
                wanted[self._name(f"{self.optimizer_prefix}{name}.{key}")] = template
        return wanted

    def _keys_of_states(self, names: set[str]) -> dict[str, dict[str, TensorStorageMetadata]]:
        """What was saved of each parameter's state."""
        found: dict[str, dict[str, TensorStorageMetadata]] = {}
        for full in [*self.metadata.state_dict_metadata, *self.of_ranks]:
            if full.startswith(self.optimizer_prefix):
                name, _, key = full.removeprefix(self.optimizer_prefix).rpartition(".")
                about = self._about(full)
                if name in names and about is not None:
                    found.setdefault(name, {})[key] = about
        return found

    def _warn_of_rounding(self, wanted: Mapping[str, Tensor]) -> None:
        narrower = [
            name
            for name, tensor in wanted.items()
            if name.startswith(self.prefix)
            and _is_narrower(tensor.dtype, self.metadata.state_dict_metadata[name].properties.dtype)
        ]
        if narrower:
            names = ", ".join(narrower[:4])
            log.warning(_NARROWER.format(count=len(narrower), names=names))

    def _find_prefixes(self, prefix: str | None) -> None:
        """Under which names others have saved the model and the optimizer."""
        own = [n for n, v in by_name.model_state(self.state.model).items() if isinstance(v, Tensor)]
        saved = self.metadata.state_dict_metadata
        if prefix is None:
            found = [
                name.removesuffix(own[0])
                for name in saved
                if name.endswith(own[0]) and name.removesuffix(own[0])[-1:] in ("", ".")
            ]
            found = [p for p in found if all(p + name in saved for name in own)]
            if len(found) != 1:
                raise CheckpointError(
                    f"{self.path} has "
                    + (f"this model under several names, {found}" if found else "not this model")
                    + f": looked for {own[0]} and {len(own) - 1} others among {len(saved)} names, "
                    f"such as {', '.join(itertools.islice(saved, 3))}. Say prefix='app.model.', or "
                    "whatever is before the names."
                )
            self.prefix = found[0]
        if self.state.optimizer is None or "optimizer" in self.leave:
            return
        names = by_name.parameter_names(self.state.model, self.state.optimizer)
        middle = f".{names[0]}."
        found = sorted({n.partition(middle)[0] + "." for n in saved if f"state{middle}" in n})
        if len(found) != 1:
            raise CheckpointError(
                f"{self.path} has "
                + (
                    f"several states of {names[0]}, under {found}"
                    if found
                    else "no optimizer state"
                )
                + ". Leave the optimizer as it is by leave=('optimizer',)."
            )
        self.optimizer_prefix = found[0]


def _manifest_of(path: Path) -> Manifest | None:
    """A checkpoint's manifest; None for one of others."""
    if not (path / NAME).exists() and not PUBLISHED.fullmatch(path.name):
        return None
    return _whole(read_manifest, path)


def _whole(function: Any, *args: Any) -> Any:
    """Call what reads and checks; what it meets means that a checkpoint is not whole."""
    try:
        return function(*args)
    except NotWholeError:
        raise
    except CheckpointError as error:
        raise NotWholeError(str(error)) from error


def _template(parameter: Tensor, about: TensorStorageMetadata, name: str) -> Tensor:
    """What a tensor of a parameter's state lies like: as the parameter, or whole on every rank."""
    if about.size == parameter.shape:
        return parameter
    if about.size.numel() > 1 and isinstance(parameter, DTensor):
        raise CheckpointError(
            f"{name} has {list(about.size)} and its parameter {list(parameter.shape)}: how it lies "
            "over the ranks only its optimizer knows. Train one step first, so that it makes its "
            "state, or leave it by leave=('optimizer',)."
        )
    return torch.empty(about.size, dtype=about.properties.dtype)


def _like(copy: Tensor, template: Tensor) -> Tensor:
    """What was read, laid out as what it is read for."""
    return dtensor_like(copy, template) if isinstance(template, DTensor) else copy


def _is_narrower(here: torch.dtype, there: torch.dtype) -> bool:
    """Whether values of one dtype cannot all be kept in another."""
    if here == there or not (here.is_floating_point and there.is_floating_point):
        return here != there
    a, b = torch.finfo(here), torch.finfo(there)
    return a.eps > b.eps or a.max < b.max


def checkpoints(folder: Path) -> Iterator[tuple[Path, Manifest | str]]:
    """Every checkpoint of a folder, oldest first, with its manifest or what is wrong with it."""
    for found in published(folder):
        try:
            yield found.path, read_manifest(found.path)
        except CheckpointError as error:
            yield found.path, str(error)


def metadata_of(path: Path, manifest: Manifest) -> Metadata:
    """Which tensors a checkpoint has."""
    return CheckedReader(path, manifest).read_metadata()
