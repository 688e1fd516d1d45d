"""What a node is, written on it once, so that nobody matches patterns to find out."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

from torch import fx

from fxzero.errors import VerificationError
from fxzero.transfer import Pool, Transfer

STAMP = "fxzero"
"""Where it stands in a node's ``meta``."""


class Phase(StrEnum):
    """Which part of the training step a node belongs to."""

    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"
    """In a whole step: from the gradients' norm to the update."""


class Segment(NamedTuple):
    """A stretch of the step that runs from end to end: one phase of one micro-step, of one
    stage, or a half of it."""

    phase: Phase
    micro_step: int = 0
    stage: int = 0
    half: int = 0


class Lane(StrEnum):
    """Where a node runs."""

    COMPUTE = "compute"
    GATHER = "gather"
    REDUCE = "reduce"
    ALL_TO_ALL = "all_to_all"
    SEND = "send"
    """What a stage of a pipeline gives to the next one, or back to the one before."""
    RECEIVE = "receive"
    H2D = "h2d"
    """Copies from the host's memory to the device."""
    D2H = "d2h"
    """Copies from the device to the host's memory."""
    HOST = "host"
    """What the host computes beside the device: updates of what is in its memory."""
    READ = "read"
    """What comes from the disk."""
    WRITE = "write"
    """What goes there."""


BESIDE_COMPUTE = frozenset({Lane.H2D, Lane.D2H, Lane.HOST, Lane.READ, Lane.WRITE})
"""Lanes that no other rank has a part in, and that take no time of the device."""


class Role(StrEnum):
    """What a node is for."""

    INPUT = "input"
    OUTPUT = "output"
    COMPUTE = "compute"
    ROWS = "rows"
    """Takes one micro-batch's rows of the batch."""
    UNSHARD = "unshard"
    RESHARD = "reshard"
    PREPARE = "prepare"
    """Runs before a launch, on its inputs: a cast, padding."""
    SLAB = "slab"
    """Makes the memory in which transfers have their places."""
    LAUNCH = "launch"
    """Starts an asynchronous collective."""
    WAIT = "wait"
    """Joins the collective: what it returns may be read from here on."""
    PART = "part"
    """Picks one tensor of what was waited for, or of what a region returns."""
    FINISH = "finish"
    """Runs on a part of what was waited for: unpadding, a cast."""
    AHEAD = "ahead"
    """Starts a collective that the next step joins."""
    RELEASE = "release"
    """Ends the life of a full parameter, or of a saved activation."""
    KEEP = "keep"
    """Keeps a full gradient on this rank, or takes back what was kept (`no_sync`)."""
    REGION = "region"
    """Calls a lowered region."""
    ACCUMULATE = "accumulate"
    """Adds a micro-step's gradient to those of the micro-steps before."""
    UPDATE = "update"
    """Changes parameters, optimizer state or buffers in place."""
    START = "start"
    """Starts an update that the step before has left."""
    JOIN = "join"
    """Waits for the updates that run on the host."""


@dataclass(frozen=True)
class Stamp:
    """One node's place in the step."""

    phase: Phase
    lane: Lane = Lane.COMPUTE
    role: Role = Role.COMPUTE
    layer: str = ""
    """The repeated block it belongs to: see `fxzero.sharding.params.layer_of`."""
    params: tuple[str, ...] = ()
    """Keys of the parameters that it moves."""
    bucket: str = ""
    """The transfer that it is part of."""
    made_by: str = "capture"
    """The pass that made the node."""
    again: str = ""
    """For a recomputed node: the name of the node that it repeats."""
    micro_step: int = 0
    """Which of the step's micro-batches it works on."""
    stage: int = 0
    """Of a pipeline, the stage that it is part of."""
    half: int = 0
    """Of a backward that is run in two halves: 1 in the one for which no other stage waits."""
    transfer: Transfer | None = None
    """What a launch starts."""
    pool: Pool = Pool.DEVICE
    """Where its value is held."""
    alone: bool = False
    """Whether it runs as the operator that it is, and is part of no region: it works on one block
    of many, and a region would be another one for each."""

    def but(self, **changes: Any) -> Stamp:
        """The same stamp, but for some fields: what ``dataclasses.replace`` makes, for every node
        of a graph.

        Raises:
            TypeError: a stamp has no such field.
        """
        fields = self.__dict__
        if not changes.keys() <= fields.keys():
            raise TypeError(f"a stamp has no {', '.join(sorted(changes.keys() - fields.keys()))}")
        stamp = object.__new__(Stamp)
        stamp.__dict__.update(fields, **changes)
        return stamp

    @property
    def segment(self) -> Segment:
        """The stretch of the step that it belongs to."""
        return Segment(self.phase, self.micro_step, self.stage, self.half)


def stamp_of(node: fx.Node) -> Stamp:
    """Read a node's stamp.

    Raises:
        VerificationError: it has none.
    """
    try:
        stamp: Stamp = node.meta[STAMP]
    except KeyError:
        raise VerificationError(
            f"node {node.name} ({node.target}) has no stamp. A pass that makes nodes stamps them: "
            "use StepGraph.call, or set_stamp."
        ) from None
    return stamp


def has_stamp(node: fx.Node) -> bool:
    """Whether a node carries a stamp."""
    return STAMP in node.meta


def set_stamp(node: fx.Node, stamp: Stamp) -> None:
    """Write a node's stamp, over an earlier one."""
    node.meta[STAMP] = stamp
