"""Each rule between lanes, broken by hand on a real graph."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from fxzero.graph import Lane, Phase, Role, Stamp, StepGraph
from fxzero.graph.operators import num_bytes
from fxzero.graph.stamps import set_stamp, stamp_of
from fxzero.graph.verify import verify
from fxzero.passes import Fact
from fxzero.runtime import copies
from fxzero.transfer import Pool
from tests.graph.test_verify import assert_refused
from tests.passes.test_offload_states import (
    HOST,
    ONE_PROCESS,
    TOGETHER,
    downloads,
    join_of,
    nodes_in,
    offloaded,
    update_of,
    uploads,
)
from tests.stepping import step_graph
from tests.tracing import of_role

_aten = torch.ops.aten
_ALL = frozenset(Fact) - {Fact.CUT}
ON_DEVICE = Stamp(Phase.OPTIMIZER, made_by="test")
"""Of a node that computes."""


@pytest.fixture
def graph() -> StepGraph:
    """Three layers in one process, each in a bucket of its own."""
    found = offloaded(**ONE_PROCESS)
    verify(found, _ALL, after="join_copies")
    return found


def on_many_ranks(**settings: Any) -> StepGraph:
    """The same at stage 3."""
    found = offloaded(zero=3, **settings)
    verify(found, _ALL, after="join_copies")
    return found


def in_one_bucket() -> StepGraph:
    """On two ranks, where a bucket of gradients travels."""
    found = offloaded(options=TOGETHER, zero=2, world_size=2)
    verify(found, _ALL, after="join_copies")
    return found


def read_by(graph: StepGraph, source: fx.Node, stamp: Stamp = ON_DEVICE) -> fx.Node:
    """A node that reads another one, at the insertion point."""
    value = source.meta["val"]
    return graph.call(_aten.sin.default, (source,), stamp=stamp, value=value)


def input_called(graph: StepGraph, name: str) -> fx.Node:
    """An input of the graph."""
    (found,) = (n for n in graph.graph.find_nodes(op="placeholder") if n.name == name)
    return found


# -- the device reads no memory of the host


def test_compute_that_reads_a_parameter_of_the_host(graph: StepGraph) -> None:
    """And not its copy."""
    copy = uploads(graph)[-1]
    reader = min(copy.parts[0].users)
    reader.replace_input_with(copy.parts[0], copy.tensors[0])
    rule = f"{reader.name} reads {copy.tensors[0].name}, which is in the host's memory"
    assert_refused(graph, rule, reader, "Read a copy of it, behind its wait")


def test_a_gather_that_sends_what_is_on_the_host() -> None:
    """A collective reads it too."""
    graph = on_many_ranks()
    copy = uploads(graph)[0]
    gather = min(copy.parts[0].users)
    assert stamp_of(gather).lane is Lane.GATHER
    gather.replace_input_with(copy.parts[0], copy.tensors[0])
    rule = f"{gather.name} reads {copy.tensors[0].name}, which is in the host's memory"
    assert_refused(graph, rule, gather, "Read a copy of it, behind its wait")


def test_compute_that_reads_a_gradient_on_the_host(graph: StepGraph) -> None:
    """Only the host's lane waits for it."""
    (part,) = downloads(graph)[0].parts
    with graph.graph.inserting_before(graph.output):
        node = read_by(graph, part)
    assert_refused(graph, f"{node.name} reads {part.name}", node, "Read a copy of it")


@pytest.mark.parametrize("lane", [Lane.H2D, Lane.D2H])
def test_another_lane_that_reads_a_gradient_on_the_host(graph: StepGraph, lane: Lane) -> None:
    """It does not wait for it either."""
    (part,) = downloads(graph)[0].parts
    with graph.graph.inserting_before(graph.output):
        node = read_by(graph, part, ON_DEVICE.but(lane=lane))
    assert_refused(graph, f"{node.name} reads {part.name}", node, "Read a copy of it")


@pytest.mark.parametrize("name", ["exp_avg_layers_0_weight", "staging"])
def test_compute_that_reads_state_or_the_staging_area(graph: StepGraph, name: str) -> None:
    """Whatever it is that the host holds."""
    source = input_called(graph, name)
    with graph.graph.inserting_before(graph.output):
        node = read_by(graph, source)
    assert_refused(graph, f"{node.name} reads {name}", node, "Read a copy of it")


def test_an_update_of_what_is_on_the_host_in_computes_own_lane(graph: StepGraph) -> None:
    """It would run before its gradient is there."""
    update = of_role(graph, Role.UPDATE)[0]
    set_stamp(update, stamp_of(update).but(lane=Lane.COMPUTE))
    assert_refused(graph, f"{update.name} reads", update, "Read a copy of it")


def test_a_wait_in_computes_own_lane(graph: StepGraph) -> None:
    """What has arrived is for the host's."""
    wait = downloads(graph)[0].wait
    set_stamp(wait, stamp_of(wait).but(lane=Lane.COMPUTE))
    assert_refused(graph, f"{wait.name} reads", wait, "Read a copy of it")


def test_a_step_that_returns_what_is_on_the_host(graph: StepGraph) -> None:
    """Who calls it does not wait either."""
    state = input_called(graph, "exp_avg_layers_0_weight")
    values = list(graph.output_values)
    values[-1] = state
    graph.set_output_values(values)
    assert_refused(graph, f"output reads {state.name}", graph.output, "Read a copy of it")


# -- copies


def change(launch: fx.Node, **fields: Any) -> None:
    """Let the record of a launch say something else."""
    stamp = stamp_of(launch)
    assert stamp.transfer is not None
    set_stamp(launch, stamp.but(transfer=replace(stamp.transfer, **fields)))


@pytest.mark.parametrize("lane", ["h2d", "d2h"])
@pytest.mark.parametrize(
    "fields",
    [{"full_bytes": 1}, {"num_tensors": 2}, {"source": Pool.HOST, "target": Pool.HOST}],
    ids=lambda fields: next(iter(fields)),
)
def test_a_record_of_something_else(graph: StepGraph, lane: str, fields: dict[str, Any]) -> None:
    """Costs and bytes are counted by it."""
    launch = graph.transfers(name=lane)[0].launch
    change(launch, **fields)
    rule = rf"{launch.name} copies 1 tensors, 1024 bytes, from .* and its record says"
    assert_refused(graph, rule, launch, "Write the record when the tensors are known")


def test_a_copy_that_nothing_waits_for(graph: StepGraph) -> None:
    """Of a gradient."""
    copy = downloads(graph)[0]
    update = update_of(graph, copy.stamp.params)
    update.update_arg(1, list(copy.tensors))
    graph.graph.erase_node(copy.parts[0])
    graph.graph.erase_node(copy.wait)
    rule = f"the transfer {copy.launch.name} is waited for 0 times"
    assert_refused(graph, rule, copy.launch, "exactly one wait")


def test_an_update_that_reads_what_is_on_its_way(graph: StepGraph) -> None:
    """Past the wait."""
    copy = downloads(graph)[0]
    (part,) = copy.parts
    part.replace_input_with(copy.wait, copy.launch)
    rule = f"{part.name} reads {copy.launch.name}, which is still in flight"
    assert_refused(graph, rule, part, "Read a part of its wait")


def test_a_copy_of_another_parameter(graph: StepGraph) -> None:
    """Every shape fits."""
    first, second, *_ = uploads(graph)
    first.launch.update_arg(0, list(second.tensors))
    rule = rf"{first.parts[0].name} is taken for layers.0.weight, but {first.launch.name} sent"
    assert_refused(graph, rule, first.parts[0], "Keep the order of tensors and parts")


@pytest.mark.parametrize("lane", ["h2d", "d2h"])
def test_two_tensors_of_a_copy_that_are_swapped(lane: str) -> None:
    """Each is there, for the other one."""
    graph = in_one_bucket()
    copy = graph.transfers(name=lane)[0]
    first, second, *_ = copy.parts
    first.args, second.args = second.args, first.args
    rule = rf"{second.name} is taken for layers.\d.weight, but {copy.launch.name} sent layers.\d"
    assert_refused(graph, rule, second, "Keep the order of tensors and parts")


def test_a_gradient_of_another_parameter(graph: StepGraph) -> None:
    """In one process too, where nothing was reduced that would say whose it is."""
    for found in (on_many_ranks(), graph):
        first, second, *_ = downloads(found)
        update = update_of(found, second.stamp.params)
        update.update_arg(1, list(first.parts))
        rule = f"{update.name} takes {first.parts[0].name} for the gradient of layers.1.weight"
        assert_refused(found, rule, update, "Keep parameters and gradients in one order")


def test_a_gradient_that_was_not_reduced() -> None:
    """Looked for behind the copy."""
    graph = on_many_ranks()
    copy = downloads(graph)[0]
    (reduce,) = (t for t in graph.transfers(name="reduce") if copy.tensors[0] in t.parts)
    copy.launch.update_arg(0, list(reduce.tensors))
    change(copy.launch, full_bytes=sum(map(num_bytes, reduce.tensors)))
    copy.launch.meta["val"] = copy.wait.meta["val"] = [n.meta["val"] for n in reduce.tensors]
    input_called(graph, "staging").meta["val"] = torch.empty(1 << 20)
    for i, other in enumerate(downloads(graph)):
        other.launch.update_arg(3, [i << 12])
    rule = r"the gradient of layers.2.weight is reduced over groups \[\], expected"
    assert_refused(graph, rule, copy.parts[0], "reduced once over each group")


# -- updates on the host


class Summed(nn.Module):
    """The gradient of its weight needs nothing that was made of the weight."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(B, 8) → scalar."""
        return self.layer(x).sum()


def test_an_update_of_what_is_being_copied() -> None:
    """Forward would read half of the old values and half of the new ones."""
    graph = step_graph(lambda: (Summed(), (torch.randn(4, 8),)), options=HOST, **ONE_PROCESS)
    (copy,), (update,) = uploads(graph), of_role(graph, Role.UPDATE)
    late = {copy.wait}
    for node in list(graph.nodes()):
        late |= {node} if not late.isdisjoint(node.all_input_nodes) else set()
    assert update not in late
    behind = update
    for node in sorted(late):
        behind.append(node)
        behind = node
    (param,) = copy.tensors
    rule = (
        f"{update.name} changes {param.name} while {copy.launch.name} copies it, which is waited "
        f"for by {copy.wait.name}"
    )
    assert_refused(graph, rule, update, "Wait for the copy first")


def test_a_copy_of_what_was_updated(graph: StepGraph) -> None:
    """It would be the next step's."""
    update = of_role(graph, Role.UPDATE)[0]
    (param,) = nodes_in(update.args[0])
    stamp = Stamp(Phase.OPTIMIZER, lane=Lane.H2D, made_by="test")
    arguments = ([param], torch.float32, None, 0.0)
    with graph.graph.inserting_after(update):
        late = graph.call(copies.upload, arguments, stamp=stamp, value=[param.meta["val"]])
    rule = f"{late.name} reads {param.name} after {update.name} has changed it"
    assert_refused(graph, rule, late, "Move the update behind the last reader")


def test_a_step_without_join(graph: StepGraph) -> None:
    """It would return while its updates go on."""
    graph.graph.erase_node(join_of(graph))
    update = of_role(graph, Role.UPDATE)[0]
    rule = f"{update.name}, which runs on the host, is joined 0 times"
    assert_refused(graph, rule, update, "joined once")


def test_an_update_that_the_join_leaves_out(graph: StepGraph) -> None:
    """One of three."""
    first, second, last = of_role(graph, Role.UPDATE)
    join_of(graph).args = ([first, last],)
    rule = f"{second.name}, which runs on the host, is joined 0 times and read 1 times"
    assert_refused(graph, rule, second, "joined once")


def test_an_update_that_is_joined_twice(graph: StepGraph) -> None:
    """The second one waits for nothing."""
    update, *_ = of_role(graph, Role.UPDATE)
    with graph.graph.inserting_before(graph.output):
        stamp = ON_DEVICE.but(role=Role.JOIN)
        graph.call(copies.join_updates, ([update],), stamp=stamp, value=())
    rule = f"{update.name}, which runs on the host, is joined 2 times"
    assert_refused(graph, rule, update, "joined once")


def test_an_update_that_something_else_reads(graph: StepGraph) -> None:
    """What it returns says when it will be done, and is no value."""
    update, *_ = of_role(graph, Role.UPDATE)
    with graph.graph.inserting_before(graph.output):
        graph.call(_aten.sin.default, (update,), stamp=ON_DEVICE, value=())
    rule = f"{update.name}, which runs on the host, is joined 1 times and read 3 times"
    assert_refused(graph, rule, update, "nothing else reads it")


def test_state_that_is_read_before_its_update_is_joined(graph: StepGraph) -> None:
    """By another lane, or by this one: nothing says that it comes behind."""
    update, *_ = of_role(graph, Role.UPDATE)
    state = input_called(graph, "exp_avg_layers_2_weight")
    with graph.graph.inserting_after(update):
        node = read_by(graph, state, ON_DEVICE.but(lane=Lane.D2H))
    rule = (
        f"{node.name} reads {state.name}, which {update.name} changes until {join_of(graph).name}"
    )
    assert_refused(graph, rule, node, "once it is joined")


def test_an_update_with_another_parameters_state(graph: StepGraph) -> None:
    """Two would change it."""
    first, second, *_ = of_role(graph, Role.UPDATE)
    second.update_arg(2, first.args[2])
    rule = f"{second.name} takes exp_avg_layers_2_weight for the state of layers.1.weight"
    assert_refused(graph, rule, second, "in one order")


# -- the staging area


def test_two_gradients_at_one_place(graph: StepGraph) -> None:
    """The second one arrives before the first was read."""
    first, second, *_ = downloads(graph)
    second.launch.update_arg(3, list(first.launch.args[3]))  # type: ignore[arg-type]
    rule = f"{second.launch.name} copies to byte 0, where {first.launch.name} has copied what is"
    assert_refused(graph, rule, second.launch, "a place of its own")


def test_a_gradient_without_elements_needs_no_place(graph: StepGraph) -> None:
    """It may be where another one is: a rank may have no rows of a parameter."""
    first, empty, _ = downloads(graph)
    (param,) = nodes_in(empty.launch.args[1])
    small = torch.empty(0)
    for node in (*empty.tensors, param):
        node.meta["val"] = small
    for node in (empty.launch, empty.wait):
        node.meta["val"] = [small]
    up = next(copy for copy in uploads(graph) if copy.stamp.params == empty.stamp.params)
    up.launch.meta["val"] = up.wait.meta["val"] = [small]
    for launch in (empty.launch, up.launch):
        change(launch, full_bytes=0)
    for place in (0, 1024):
        empty.launch.update_arg(3, [place])
        verify(graph, _ALL, after="my_pass")
    assert first.launch.args[3] == [0]


@pytest.mark.parametrize("offset", [960, 512])
def test_two_gradients_that_overlap(graph: StepGraph, offset: int) -> None:
    """By a little, or by half."""
    first, second, *_ = downloads(graph)
    second.launch.update_arg(3, [offset])
    rule = f"{second.launch.name} copies to byte {offset}, where {first.launch.name} has copied"
    assert_refused(graph, rule, second.launch, "a place of its own")


def test_two_gradients_of_one_copy_at_one_place() -> None:
    """Of one bucket."""
    graph = in_one_bucket()
    (copy,) = downloads(graph)
    copy.launch.update_arg(3, [0, 0, *copy.launch.args[3][2:]])  # type: ignore[index, misc]
    rule = f"{copy.launch.name} copies to byte 0, where {copy.launch.name} has copied"
    assert_refused(graph, rule, copy.launch, "a place of its own")


def test_a_staging_area_that_is_too_small(graph: StepGraph) -> None:
    """The last gradient has no room."""
    staging = input_called(graph, "staging")
    staging.meta["val"] = staging.meta["val"][:-1]
    last = downloads(graph)[-1]
    rule = f"{last.launch.name} copies {last.tensors[0].name} to bytes 2048 to 3072 of 3071"
    assert_refused(graph, rule, last.launch, "in an area that has room for all")


# -- copies for the next step


def test_a_copy_for_the_next_step_before_the_last_reader(graph: StepGraph) -> None:
    """It would read the next step's parameter."""
    ahead, *_ = of_role(graph, Role.AHEAD)
    copy = next(c for c in uploads(graph) if c.stamp.params == stamp_of(ahead).params)
    with graph.graph.inserting_after(ahead):
        late = read_by(graph, copy.parts[0])
    rule = f"{late.name} reads what {copy.launch.name} has brought, which {ahead.name} has begun"
    assert_refused(graph, rule, late, "behind the last reader")


def test_a_copy_for_the_next_step_before_a_reader_of_a_view(graph: StepGraph) -> None:
    """A transposed weight is the copy's memory."""
    ahead, *_ = of_role(graph, Role.AHEAD)
    copy = next(c for c in uploads(graph) if c.stamp.params == stamp_of(ahead).params)
    view = next(n for n in copy.parts[0].users if n.target is _aten.t.default)
    with graph.graph.inserting_after(ahead):
        late = read_by(graph, view)
    rule = f"{late.name} reads what {copy.launch.name} has brought, which {ahead.name} has begun"
    assert_refused(graph, rule, late, "behind the last reader")


def test_a_copy_for_the_next_step_while_ranks_gather() -> None:
    """A collective reads what it sends until its wait."""
    graph = on_many_ranks()
    gather = graph.transfers(name="gather")[-1]
    copy = next(c for c in uploads(graph) if gather.tensors[0] in c.parts)
    ahead = next(n for n in of_role(graph, Role.AHEAD) if stamp_of(n).params == copy.stamp.params)
    again: dict[fx.Node, fx.Node] = {}
    for node, before in (
        (gather.launch, ahead),
        (gather.wait, graph.output),
        (gather.parts[0], graph.output),
    ):
        with graph.graph.inserting_before(before):
            again[node] = graph.graph.node_copy(node, lambda source: again.get(source, source))
    wait = again[gather.wait]
    rule = f"{wait.name} reads what {copy.launch.name} has brought, which {ahead.name} has begun"
    assert_refused(graph, rule, wait, "behind the last reader")


def test_a_copy_for_the_next_step_behind_another_update(graph: StepGraph) -> None:
    """It would not wait for its own."""
    first, second, *_ = of_role(graph, Role.AHEAD)
    update = second.args[1]
    assert isinstance(update, fx.Node)
    second.update_arg(1, first.args[1])
    (param,) = nodes_in(second.args[0])
    rule = f"{second.name} reads {param.name}, which {update.name} changes until"
    assert_refused(graph, rule, second, "once it is joined")


def test_a_copy_for_the_next_step_of_what_is_updated_later(graph: StepGraph) -> None:
    """Or of anything else than what this step has taken."""
    first, second, *_ = of_role(graph, Role.AHEAD)
    first.update_arg(0, second.args[0])
    rule = f"{first.name} copies for the next step what no copy of this one takes alike"
    assert_refused(graph, rule, first, "by one Resident")


def test_a_gradient_that_is_written_to_on_its_way(graph: StepGraph) -> None:
    """The copy may have read it by then, or not."""
    copy = downloads(graph)[0]
    value = copy.tensors[0].meta["val"]
    with graph.graph.inserting_after(copy.launch):
        node = graph.call(_aten.mul_.Tensor, (copy.tensors[0], 2.0), stamp=ON_DEVICE, value=value)
    rule = f"{node.name} changes {copy.tensors[0].name} while {copy.launch.name} copies it"
    assert_refused(graph, rule, node, "Wait for the copy first")


def test_an_update_that_only_says_that_it_runs_on_the_host(graph: StepGraph) -> None:
    """It would run at once, beside the copy of its gradient."""
    update = of_role(graph, Role.UPDATE)[0]
    update.target = update.target.kernel  # type: ignore[union-attr]
    rule = f"{update.name} is stamped for lane host and calls"
    assert_refused(graph, rule, update, "is a HostUpdate")


def test_a_graph_without_lanes_has_nothing_to_say() -> None:
    """And every rule holds in one with them, whatever is offloaded."""
    for settings in (
        {"options": {**HOST, "memory": "none"}},
        {"options": {**HOST, "offload_states": {"share": 0.5}}},
        {"options": {**HOST, "offload_states": {"ahead": False}}},
        {"micro_batches": 4, "clip_grad_norm": 1.0},
    ):
        verify(offloaded(**settings), _ALL, after="join_copies")
