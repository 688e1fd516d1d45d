"""How ranks are laid out, as a person writes it down: the axes of `fxzero.shard`'s mesh by name.

    replicate=2,shard=4              HSDP: two copies of the states, each over four ranks
    pipeline=4,shard=2               four ranks along a pipeline, each place's stages over two
    pipeline=2,replicate=2,shard=2   both

Outermost axis first, as in the mesh: ranks that follow each other in the world, and sit in one
node, are along the innermost one.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace

from fxzero.errors import ConfigError, nearest
from fxzero.sharding.layout import AxisRole
from fxzero.sharding.pipeline import PIPELINE

REPLICATE, SHARD = AxisRole.REPLICATE.value, AxisRole.SHARD.value
AXES = (PIPELINE, REPLICATE, SHARD)
"""As `fxzero.shard` names them, outermost first."""
_AXIS = re.compile(r"(\w+)=([1-9]\d{0,6})")
_EXAMPLES = "replicate=2,shard=4 or pipeline=4,shard=2"


@dataclass(frozen=True)
class MeshShape:
    """A mesh of ranks that exist only in name."""

    axes: tuple[tuple[str, int], ...]
    """Names and sizes, outermost first."""

    @staticmethod
    def parse(text: str) -> MeshShape:
        """Read ``replicate=2,shard=4``.

        Raises:
            ConfigError: it is no such text, or names axes that no mesh of `fxzero.shard` has.
        """
        axes = []
        for part in text.split(","):
            match = _AXIS.fullmatch(part.strip())
            if match is None:
                raise ConfigError(
                    f"--mesh {text}: write the axes and how many ranks are along each, outermost "
                    f"first, as in {_EXAMPLES}"
                )
            if match[1] not in AXES:
                raise ConfigError(f"--mesh {text}: no axis {match[1]!r}: {nearest(match[1], AXES)}")
            axes.append((match[1], int(match[2])))
        names = [name for name, _ in axes]
        if names != [name for name in AXES if name in names]:
            raise ConfigError(
                f"--mesh {text}: axes stand there once, outermost first: pipeline, replicate, shard"
            )
        if PIPELINE not in names and SHARD not in names:
            raise ConfigError(
                f"--mesh {text} has no axis that states are sharded over. Write {text},shard=1 "
                "for whole copies, or take --zero 0 without --mesh: both replicate."
            )
        return MeshShape(tuple(axes))

    def __str__(self) -> str:
        return ",".join(f"{name}={size}" for name, size in self.axes)

    def __len__(self) -> int:
        return math.prod(size for _, size in self.axes)

    def along(self, axis: str) -> int:
        """How many ranks are along an axis; one where there is none of that name."""
        return dict(self.axes).get(axis, 1)

    @property
    def is_pipeline(self) -> bool:
        """Whether it has an axis of stages."""
        return any(name == PIPELINE for name, _ in self.axes)

    @property
    def of_a_stage(self) -> MeshShape:
        """The ranks that share a stage; the mesh itself where there are none."""
        return replace(self, axes=tuple(axis for axis in self.axes if axis[0] != PIPELINE))

    @property
    def sizes(self) -> tuple[int, ...]:
        """Of the axes that parameters lie on: (replicate, shard), or (shard,)."""
        inner = self.of_a_stage
        if any(name == REPLICATE for name, _ in inner.axes):
            return (inner.along(REPLICATE), inner.along(SHARD))
        return (inner.along(SHARD),)

    def check(self, world_size: int) -> None:
        """See that it is a mesh of all ranks.

        Raises:
            ConfigError: it has more, or fewer.
        """
        if len(self) != world_size:
            product = " x ".join(str(size) for _, size in self.axes)
            raise ConfigError(
                f"--mesh {self} has {product}{f' = {len(self)}' if len(self.axes) > 1 else ''} "
                f"ranks, and --world-size is {world_size}. Make their product {world_size}."
            )
