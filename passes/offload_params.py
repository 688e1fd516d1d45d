"""Bring a parameter to the device where it is gathered or used, and not for the whole step.

    up = upload([w]); A(w'); …; A_backward(w')
→   up = upload([w]); A(w'); …; up_1 = upload([w]); A_backward(w1')

ZeRO-Infinity's way with parameters (Rajbhandari et al. 2021, "bandwidth-centric partitioning"):
they live on the host, each rank brings its own part of one over its own PCIe, and the ranks gather
it from there. What is on the device is what is in use: a copy for each forward and each backward of
a micro-step that reads one, which starts as late as it can (`join_copies`) and ends with its last
reader.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import fx

from fxzero.errors import ConfigError
from fxzero.graph import Lane, Segment, StepGraph
from fxzero.graph.stamps import stamp_of
from fxzero.graph.step_graph import TransferNodes
from fxzero.passes.base import Context, Door, Fact, Notes
from fxzero.passes.decision import DecidingPass, Decision
from fxzero.passes.parameter_copies import emit_upload
from fxzero.passes.streamed_updates import of_states
from fxzero.settings import Share, a_share, at_least, decided


@dataclass(frozen=True)
class Brought(Decision):
    """Which parameters are on the device only where they are used."""

    uploads: tuple[str, ...] = ()
    """Buckets of parameters that are copied to it together."""


def copy_by_segment(graph: StepGraph, copy: TransferNodes) -> int:
    """Make one copy for each phase of each micro-step that reads it; return how many."""
    by_segment: dict[Segment, dict[fx.Node, list[fx.Node]]] = {}
    for param, part in zip(copy.tensors, copy.parts, strict=True):
        for reader in part.users:
            segment = stamp_of(reader).segment
            by_segment.setdefault(segment, {}).setdefault(param, []).append(reader)
    part_of = dict(zip(copy.tensors, copy.parts, strict=True))
    device: Any = copy.launch.args[2]
    with graph.graph.inserting_before(copy.launch), graph.made_for(copy.launch):
        for segment, readers in by_segment.items():
            stamp = copy.stamp.but(
                phase=segment.phase,
                micro_step=segment.micro_step,
                stage=segment.stage,
                half=segment.half,
                bucket=f"{copy.stamp.bucket}.{_name(segment)}",
                made_by="offload_params",
            )
            made = emit_upload(graph, list(readers), copy.record, stamp, copy.launch.name, device)
            for (param, own), part in zip(readers.items(), made, strict=True):
                for reader in own:
                    reader.replace_input_with(part_of[param], part)
    for node in (*copy.parts, copy.wait, copy.launch):
        graph.graph.erase_node(node)
    return len(by_segment)


def _name(segment: Segment) -> str:
    """What a segment is called in the names of its copies."""
    half = f".{segment.half}" if segment.half else ""
    return f"{segment.phase.value}.{segment.micro_step}{half}"


def _copies_of_params(graph: StepGraph) -> list[TransferNodes]:
    """The copies to the device that compute reads."""
    return [copy for copy in graph.transfers(name=Lane.H2D.value) if not of_states(copy)]


@dataclass(frozen=True)
class OffloadParams(DecidingPass[Brought]):
    """Keep parameters on the host but where they are used."""

    name: ClassVar[str] = "offload_params"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.UPDATED, Fact.BUCKETED})
    doors: ClassVar[frozenset[Door]] = frozenset({Door.STEP})
    decides: ClassVar[type[Any]] = Brought

    share: Share = None
    """In whole steps: the part of the parameters' bytes that is brought to the device for each
    forward and each backward that reads it, and not once a step. Their state is on the host: it
    cannot be more than `offload_states.share`. ``auto`` decides it by cost, within a
    `memory_budget`. None, the default, is what `memory` says: 1 with ``all_host``, else 0."""
    in_flight: int | None = None
    """Most copies that are on their way, or there and not read yet. None starts as many as have to
    be to be there in time."""

    def __post_init__(self) -> None:
        """A part is between nothing and all of it."""
        super().__post_init__()
        at_least("offload_params.in_flight", self.in_flight, 1)
        a_share("offload_params.share", self.share)

    def decide(self, graph: StepGraph, ctx: Context) -> Brought:
        """Take those that are read first: what is read last would soon be brought again."""
        uploads = _copies_of_params(graph)
        every_bytes = sum(copy.record.full_bytes for copy in uploads)
        wanted_bytes = decided(self.share) * every_bytes
        chosen: list[str] = []
        taken_bytes = 0
        for copy in uploads:
            if taken_bytes + copy.record.full_bytes / 2 > wanted_bytes:
                break
            chosen.append(copy.stamp.bucket)
            taken_bytes += copy.record.full_bytes
        return Brought(tuple(chosen))

    def apply(self, graph: StepGraph, decision: Brought, ctx: Context) -> Notes:
        """See the module's docstring.

        Raises:
            ConfigError: the decision names a copy that there is not.
        """
        known = {copy.stamp.bucket: copy for copy in _copies_of_params(graph)}
        strange = [name for name in decision.uploads if name not in known]
        if strange:
            raise ConfigError(
                f"the plan splits the copy {strange[0]!r}, and could split: "
                f"{', '.join(known) or 'none'}. Where offload_states was changed, drop "
                "offload_params: it is then decided anew."
            )
        copies = [copy_by_segment(graph, known[name]) for name in decision.uploads]
        return Notes(params=len(copies), copies=sum(copies))
