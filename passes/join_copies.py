"""Wait for copies as late as can be, and let no more of the device's memory wait for them.

    up_0; join(up_0); up_1; join(up_1); A; B     →  up_0; up_1; join(up_0); A; join(up_1); B
    …; down_0; C; down_1; D; down_2              →  …; down_0; C; down_1; D; landed(down_0); down_2
    …; u_1; E                                       …; u_1; ahead(up_1); E

A copy to the device is waited for where the first run of compute reads it. A gradient is held
until its copy has landed on the host: two copies may be on their way, so that a slow link holds
back backward, and not more memory than was simulated. Updates on the host are waited for at the
end of the step; what they leave is copied to the device behind each, and the next step waits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from fxzero.graph import Lane, Phase, Role, StepGraph
from fxzero.graph.aliases import readers
from fxzero.graph.stamps import stamp_of
from fxzero.graph.step_graph import TransferNodes
from fxzero.passes.base import Context, Door, Fact, Notes, Pass
from fxzero.regions.cutout import end_of_run, runs
from fxzero.runtime import copies
from fxzero.runtime.ahead import Launch, Take

IN_FLIGHT = 2
"""Copies at a time: from the device, and to it where each gather has its own."""


def join_late(graph: StepGraph, uploads: list[TransferNodes]) -> None:
    """Wait for copies where they are first read; no run of compute is taken apart."""
    begin = {node: run[0] for run in runs(graph.nodes()) for node in run}
    for copy in uploads:
        users = [user for part in copy.parts for user in part.users]
        first = min(begin.get(user, user) for user in users)
        for node in (copy.wait, *copy.parts):
            first.prepend(node)


def drop_unread(graph: StepGraph, uploads: list[TransferNodes]) -> list[TransferNodes]:
    """Make no copy for a gather that does not happen: backward may read what forward gathered.

    Returns:
        The others.
    """
    found = []
    for copy in uploads:
        if any(part.users for part in copy.parts):
            found.append(copy)
            continue
        for node in (*copy.parts, copy.wait, copy.launch):
            graph.graph.erase_node(node)
    return found


def launch_late(uploads: list[TransferNodes]) -> None:
    """Let a copy begin when the one but one before it is there: no more of the device's memory
    waits to be read."""
    ordered = sorted(uploads, key=lambda copy: copy.wait)
    for before, copy in zip(ordered, ordered[IN_FLIGHT:], strict=False):
        before.wait.append(copy.launch)


def upload_ahead(graph: StepGraph, copy: TransferNodes) -> None:
    """Copy parameters to the device for the next step, once they are updated and nothing of this
    one reads the copies of before."""
    assert isinstance(copy.launch.target, Take)
    updates = {
        user for param in copy.tensors for user in param.users if stamp_of(user).role is Role.UPDATE
    }
    (update,) = updates
    after = max(update, *(end_of_run(reader) for reader in readers(*copy.parts)))
    stamp = copy.stamp.but(phase=Phase.OPTIMIZER, role=Role.AHEAD, made_by="join_copies")
    params, dtype, bytes_per_s = copy.launch.args
    with graph.graph.inserting_after(after), graph.made_for(copy.launch):
        graph.call(
            Launch(copy.launch.target.ahead),
            (params, update, dtype, bytes_per_s),
            stamp=stamp,
            name=f"ahead_{copy.launch.name}",
            value=(),
        )


def bound_downloads(graph: StepGraph, downloads: list[TransferNodes]) -> None:
    """Let a copy begin when the one but one before it has landed, and all before the end."""
    later = [copy.launch for copy in downloads[IN_FLIGHT:]]
    ends = [*later, *([_join(graph)] * IN_FLIGHT)]
    for copy, end in zip(downloads, ends, strict=False):
        stamp = copy.stamp.but(role=Role.RELEASE, transfer=None, made_by="join_copies")
        with graph.graph.inserting_before(end), graph.made_for(copy.launch):
            graph.call(
                copies.landed,
                (copy.launch,),
                stamp=stamp,
                name=f"{copy.launch.name}_landed",
                value=(),
            )


def _join(graph: StepGraph) -> fx.Node:
    """The end of the updates on the host."""
    return next(graph.nodes(role=Role.JOIN))


@dataclass(frozen=True)
class JoinCopies(Pass):
    """Place what waits for copies between pools."""

    name: ClassVar[str] = "join_copies"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.SCHEDULED})
    doors: ClassVar[frozenset[Door]] = frozenset({Door.STEP})

    def run(self, graph: StepGraph, ctx: Context) -> Notes:
        """See the module's docstring."""
        uploads = graph.transfers(name=Lane.H2D.value)
        downloads = graph.transfers(name=Lane.D2H.value)
        if not downloads:
            return Notes()
        graph.output.prepend(_join(graph))
        uploads = drop_unread(graph, uploads)
        join_late(graph, uploads)
        launch_late([copy for copy in uploads if copy.stamp.made_by == "offload_params"])
        ahead = [copy for copy in uploads if isinstance(copy.launch.target, Take)]
        for copy in ahead:
            upload_ahead(graph, copy)
        bound_downloads(graph, downloads)
        return Notes(uploads=len(uploads), ahead=len(ahead), downloads=len(downloads))
