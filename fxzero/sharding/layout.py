"""How a parameter lies on a mesh: a role for each axis, from which its transfers follow.

    axis role    a rank holds     before a use    gradient
    shard        a part of dim 0  all-gather      reduce-scatter
    replicate    the same as all  nothing         all-reduce

ZeRO on one axis is ``(shard,)``, HSDP ``(replicate, shard)``; stage 0 replicates along every
axis. Stages of a pipeline that hold one parameter together are tied: each computes a part of its
gradient, and they add up (`fxzero.passes.join_stages`). Another role is a line of the
table: a tensor-parallel axis, whose ranks compute with parts, would gather nothing and reduce
nothing. What is not a line here is what cuts dim 0 twice: `ParamSpec.local_rows` knows one
shard axis.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard

from fxzero._compat import ranks_of_mesh
from fxzero.ranks.groups import Group, axes_of
from fxzero.transfer import TransferKind


class AxisRole(StrEnum):
    """What the ranks along an axis of a mesh are to a parameter."""

    REPLICATE = "replicate"
    SHARD = "shard"
    TIED = "tied"
    """Stages of a pipeline that hold it together."""
    PIPELINE = "pipeline"
    """What stages speak of that has to do with no one parameter: the loss, the norm."""


BETWEEN_STAGES = (AxisRole.PIPELINE.value, AxisRole.TIED.value)
"""The axes along which ranks run other graphs, and have some of their transfers in common."""
BEFORE_USE = {AxisRole.SHARD: TransferKind.ALL_GATHER}
"""What makes the full parameter, where a role needs something."""
OF_GRADIENT = {
    AxisRole.SHARD: TransferKind.REDUCE_SCATTER,
    AxisRole.REPLICATE: TransferKind.ALL_REDUCE,
}
"""What makes this rank's reduced gradient of a full one."""


@dataclass(frozen=True)
class Axis:
    """One axis of a mesh as a parameter sees it."""

    role: AxisRole
    group: Group
    gather_group: Group | None = None
    """The same ranks as a process group of its own for what is gathered; None gathers in
    `group`."""


@dataclass(frozen=True)
class Layout:
    """Where a parameter's parts are."""

    axes: tuple[Axis, ...] = ()
    """Those along which something travels, which one rank has no use for; outermost first."""
    mesh: DeviceMesh | None = None
    placements: tuple[Placement, ...] = ()
    """What a DTensor on the mesh says of it, for every axis."""
    ranks: frozenset[int] = field(default=frozenset(), repr=False)
    """The mesh's, by their places in the world."""
    tied: Group | None = None
    """Of stages of a pipeline that hold it together, the ranks that hold the same part of it."""
    absent: bool = False
    """Whether it is of a stage that this rank has no part in: the mesh is that stage's."""

    @staticmethod
    def on(
        mesh: DeviceMesh,
        roles: Sequence[AxisRole],
        gather_groups: Mapping[AxisRole, Group] | None = None,
    ) -> Layout:
        """A layout with a role for each axis of a mesh.

        Args:
            gather_groups: by role, the group in which its axis is gathered, if not the mesh's own.
        """
        apart = gather_groups or {}
        pairs = zip(roles, axes_of(mesh), strict=True)
        axes = [Axis(role, group, apart.get(role)) for role, group in pairs]
        return Layout(
            tuple(axis for axis in axes if axis.group.size > 1),
            mesh,
            tuple(Shard(0) if role is AxisRole.SHARD else Replicate() for role in roles),
            frozenset(ranks_of_mesh(mesh)),
        )

    @staticmethod
    def replicated(*groups: Group) -> Layout:
        """The same on all ranks of some groups, outermost first."""
        return Layout(tuple(Axis(AxisRole.REPLICATE, group) for group in groups))

    @cached_property
    def gathers(self) -> tuple[tuple[TransferKind, Axis], ...]:
        """What makes a full parameter of this rank's part, in order."""
        return tuple(
            (BEFORE_USE[a.role], replace(a, group=a.gather_group or a.group))
            for a in self.axes[::-1]
            if a.role in BEFORE_USE
        )

    @cached_property
    def reductions(self) -> tuple[tuple[TransferKind, Axis], ...]:
        """What makes this rank's reduced gradient of a full one, in order: the innermost axis
        first, which joins the nearest ranks and leaves least for the others."""
        return tuple((OF_GRADIENT[a.role], a) for a in self.axes[::-1] if a.role in OF_GRADIENT)

    def groups_of(self, role: AxisRole) -> tuple[Group, ...]:
        """The groups of the axes of a role, innermost first."""
        return tuple(axis.group for axis in self.axes[::-1] if axis.role is role)


WHOLE = Layout()
"""Of a parameter that one rank has to itself."""
