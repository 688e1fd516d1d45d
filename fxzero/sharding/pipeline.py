"""How the stages of a pipeline lie on a mesh: who holds which parameters, and who speaks with whom.

    mesh (pipeline 2, shard 2)       h.0.weight   stage 0    ranks 0 and 1, each a half of it
                                     h.1.weight   stage 1    ranks 2 and 3
                                     wte.weight   both       all four; gradients are summed up

A rank's place is where it stands along the axis ``pipeline``; the ranks of one place share stages,
over the other axes of the mesh. With several stages a rank the schedule says which are whose. A
parameter of other stages is a DTensor on a mesh that this rank is not in, and empty here, so that
names, optimizers and checkpoints know of it. One that several stages read is held by each of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard

from fxzero._compat import mesh_without_groups
from fxzero.errors import ConfigError, ShardingError
from fxzero.pipeline.schedules import places_of_stages
from fxzero.ranks.agree import channel_of
from fxzero.ranks.groups import Group, backend_of
from fxzero.sharding.layout import AxisRole, Layout

PIPELINE = "pipeline"
"""The name of the mesh axis along which stages lie."""

Holders = Mapping[str, tuple[int, ...]]
"""By a parameter's name, the stages that hold it, first one first."""
StagesByModule = Mapping[str, int | Sequence[int]]
"""By the path of a module, its stage, or the stages that each hold its parameters."""


@dataclass(frozen=True)
class StagesWanted:
    """What stages are to be found for."""

    schedule: str
    num_ranks: int
    """Along the axis ``pipeline``."""
    zero: int
    num_shards: int
    """Ranks over which a stage's parameters are sharded."""
    memory_budget: str | None
    """What a rank may hold, if that is bounded."""
    ranks_per_stage: int = 1
    """How far apart in the world neighbours along the pipeline are."""


find_holders: Callable[[nn.Module, Any, StagesWanted], dict[str, tuple[int, ...]]] | None = None
"""What finds them from example inputs: it captures a step, by rooms above this one, which `fxzero`
has put here."""


@dataclass(frozen=True, eq=False)
class Pipeline:
    """The pipeline of which this rank is a part."""

    schedule: str
    """What says where stages lie: see `fxzero.pipeline.schedules`."""
    place_of: tuple[int, ...]
    """By stage, the place along the axis."""
    group: Group
    """The ranks of this pipeline, by place."""
    links: Mapping[tuple[int, int], Group]
    """By the places of sender and receiver, the two of them: those that this rank has a part in."""
    mesh: DeviceMesh = field(repr=False)
    seeds: tuple[int, ...] = ()
    """By place, what its generator was seeded with when the model was sharded."""
    tied: dict[tuple[int, ...], Group] = field(default_factory=dict, repr=False)
    """By places, this rank's fellows there that hold the same parts of a parameter."""

    @property
    def num_stages(self) -> int:
        """Over all ranks."""
        return len(self.place_of)

    @property
    def place(self) -> int:
        """This rank's."""
        return self.group.rank

    @cached_property
    def stages(self) -> tuple[int, ...]:
        """This rank's, first one first."""
        return tuple(s for s, place in enumerate(self.place_of) if place == self.place)

    def places(self, stages: Iterable[int]) -> tuple[int, ...]:
        """Where some stages lie."""
        return tuple(sorted({self.place_of[stage] for stage in stages}))


def has_pipeline(mesh: DeviceMesh | None) -> bool:
    """Whether a mesh has an axis of stages."""
    return mesh is not None and PIPELINE in (mesh.mesh_dim_names or ())


def check_axes(mesh: DeviceMesh) -> None:
    """See that the other axes are such as parameters lie on.

    Raises:
        ShardingError: the mesh has another order, or other names.
    """
    names = mesh.mesh_dim_names or ()
    allowed = [("shard",), ("replicate",), ("replicate", "shard"), ()]
    if names[0] != PIPELINE or names[1:] not in allowed:
        raise ShardingError(
            f"the mesh has the axes {names}: behind 'pipeline', which comes first, there may be "
            "'replicate' and 'shard', in this order."
        )


def stages_mesh(mesh: DeviceMesh, place: int) -> DeviceMesh:
    """The ranks of one place, over the other axes; of this rank's with their process groups."""
    inner = tuple((mesh.mesh_dim_names or ())[1:])
    if mesh.get_local_rank(PIPELINE) == place and inner:
        return mesh[inner]
    ranks = mesh.mesh[place]
    names = inner or ("shard",)
    return mesh_without_groups(mesh.device_type, ranks if inner else ranks.reshape(1), names)


def make_pipeline(mesh: DeviceMesh, schedule: str, holders: Holders) -> Pipeline:
    """Make what a pipeline speaks over. All ranks call this."""
    place_of = places_of_stages(schedule, mesh.size(0))
    group = Group.of(mesh.get_group(PIPELINE))
    pairs = {(a, b) for a, b in pairwise(place_of) if a != b}
    pairs |= {(b, a) for a, b in pairs}
    links = _links(mesh, group, pairs)
    pipeline = Pipeline(schedule, place_of, group, links, mesh, _seeds(group))
    for places in sorted({pipeline.places(stages) for stages in holders.values()}):
        if len(places) > 1:
            tied = _group_of(mesh, places)
            if tied is not None:
                pipeline.tied[places] = tied
    return pipeline


def _links(
    mesh: DeviceMesh, group: Group, pairs: set[tuple[int, int]]
) -> dict[tuple[int, int], Group]:
    """By sender and receiver, the groups of those of which this rank is one.

    One a direction, as NCCL has what goes through a group wait in line. Gloo's messages do not, and
    each of its groups has a thread that looks about a hundred times a second, for a thousandth of a
    core: there both directions share one, and two places speak over the pipeline's own.
    """
    shares = backend_of(group.name, mesh.device_type) == "gloo"
    if shares and group.size == 2:
        return dict.fromkeys(pairs, group)
    links: dict[tuple[int, int], Group | None] = {}
    for a, b in sorted(pairs):
        links[a, b] = links[b, a] if shares and (b, a) in links else _group_of(mesh, (a, b))
    return {pair: link for pair, link in links.items() if link is not None}


def _seeds(group: Group) -> tuple[int, ...]:
    """By place, the seed of its generator; nothing where no rank is there."""
    channel = channel_of(group.name)
    if channel is None:
        return ()
    mine = torch.tensor([torch.initial_seed() % (1 << 62)])
    every = [torch.empty_like(mine) for _ in range(group.size)]
    dist.all_gather(every, mine, group=channel)
    return tuple(int(seed) for seed in every)


def _group_of(mesh: DeviceMesh, places: Sequence[int]) -> Group | None:
    """A process group of some places of this rank's pipeline; None if it is at none of them.

    All ranks call this, and make the groups of all pipelines: torch counts them.
    """
    found = None
    for ranks in mesh.mesh.reshape(mesh.size(0), -1).T.tolist():
        made = dist.new_group([ranks[place] for place in places])
        if dist.get_rank() in (ranks[place] for place in places):
            found = Group.of(made)
    return found


class Layouts:
    """The layouts of a model's parameters, over the stages of a pipeline."""

    def __init__(self, pipeline: Pipeline, zero: int) -> None:
        self._pipeline = pipeline
        self._meshes = {
            place: stages_mesh(pipeline.mesh, place) for place in range(pipeline.group.size)
        }
        own = self._meshes[pipeline.place]
        axes = len((pipeline.mesh.mesh_dim_names or ())[1:])
        roles = [
            AxisRole.REPLICATE if name != "shard" or not zero else AxisRole.SHARD
            for name in own.mesh_dim_names or ()
        ]
        self._roles = roles if axes else [AxisRole.REPLICATE]
        self._has_groups = bool(axes)

    def of(self, stages: tuple[int, ...], *, is_scalar: bool) -> Layout:
        """Of a parameter that some stages hold."""
        pipeline = self._pipeline
        places = pipeline.places(stages)
        here = pipeline.place in places
        mesh = self._meshes[pipeline.place if here else places[0]]
        roles = [AxisRole.REPLICATE] * len(self._roles) if is_scalar else self._roles
        if not here:
            placements = tuple(Shard(0) if r is AxisRole.SHARD else Replicate() for r in roles)
            return Layout((), mesh, placements, absent=True)
        layout = Layout.on(mesh, roles) if self._has_groups else Layout((), mesh, (Replicate(),))
        return replace(layout, tied=pipeline.tied.get(places))


def holders_by_name(
    model: nn.Module, stages: StagesByModule, place_of: Sequence[int], schedule: str
) -> dict[str, tuple[int, ...]]:
    """The stages that hold each parameter, from those of modules.

    Args:
        stages: by the path of a module, or the beginning of some, its stage, or several that hold
            its parameters; the longest path that fits decides.
        place_of: by stage, where it lies.
        schedule: what says so.

    Raises:
        ConfigError: a path of no module, a stage that is no number, one that is left out, or a
            parameter that is in none.
    """
    if not isinstance(stages, Mapping):
        raise ConfigError(
            f"stages={stages!r} must be a mapping: by the path of a module, its stage"
        )
    held_by = {path: _numbers(held) for path, held in stages.items()}
    numbers = {stage for held in held_by.values() for stage in held}
    if not all(held_by.values()) or numbers != set(range(len(numbers))):
        raise ConfigError(
            f"stages={dict(stages)!r}: every stage is a number, or a tuple of some, and they are "
            "numbered from 0 without a gap."
        )
    if len(numbers) != len(place_of):
        raise ConfigError(
            f"stages= names {len(numbers)} stages, and schedule={schedule!r} has {len(place_of)} "
            f"on {len(set(place_of))} ranks along 'pipeline'. Number the stages from 0 to "
            f"{len(place_of) - 1}, or take another schedule: two stages on each rank have "
            "interleaved, breadth_first and zbv."
        )
    known = {path for path, _ in model.named_modules(remove_duplicate=False)}
    strange = [path for path in stages if path not in known]
    if strange:
        raise ConfigError(
            f"stages= names {', '.join(map(repr, strange[:6]))}, and the model has no such module. "
            f"It has {', '.join(sorted(known - {''})[:12])}, …"
        )
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    found: dict[str, tuple[int, ...]] = {}
    lost = []
    for name, parameter in model.named_parameters():
        parts = [_stages_of(other, held_by) for other in names[id(parameter)]]
        if not all(parts):
            lost.append(name)
        found[name] = tuple(sorted({stage for part in parts for stage in part}))
    if lost:
        raise ConfigError(
            f"stages= says nothing of {', '.join(lost[:6])}{' …' if len(lost) > 6 else ''}. Name "
            "their modules, or modules around them."
        )
    return found


def _numbers(held: object) -> tuple[int, ...]:
    """One stage, or several, as a tuple; an empty one if that is no number."""
    several = tuple(held) if isinstance(held, (tuple, list, set, frozenset)) else (held,)
    return several if all(type(stage) is int for stage in several) else ()


def _stages_of(name: str, held_by: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
    """The stages of the longest path that a parameter's name begins with; none if none fits."""
    path = name.rpartition(".")[0]
    while path not in held_by:
        if not path:
            return ()
        path = path.rpartition(".")[0]
    return held_by[path]
