"""Each rule of the verifier, broken by hand on a real graph."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from torch import fx, nn

from fxzero.errors import VerificationError
from fxzero.graph import Lane, Phase, Role, Stamp, StepGraph
from fxzero.graph.launch import call_of, emit_transfer, emit_wait
from fxzero.graph.operators import num_bytes
from fxzero.graph.stamps import set_stamp, stamp_of
from fxzero.graph.step_graph import sent_by
from fxzero.graph.verify import check_updates, verify
from fxzero.passes import Bucket, Fact
from fxzero.runtime.account import collectives_digest
from fxzero.runtime.random import dropout_mask
from fxzero.transfer import Transfer
from tests.passes.test_recompute import with_dropout
from tests.stepping import EAGER, chain_of, step_graph
from tests.tracing import chain, find, of, of_role, scheduled

_aten = torch.ops.aten
_ALL = frozenset(Fact) - {Fact.CUT}


@pytest.fixture
def graph() -> StepGraph:
    """A scheduled stage-3 graph that holds every rule."""
    found = scheduled(chain(2), "prefetch", zero=3)
    verify(found, _ALL, after="prefetch")
    return found


def assert_refused(graph: StepGraph, rule: str, at: fx.Node, advice: str) -> None:
    """The message names the rule, marks the node among its neighbours, and says what to do."""
    with pytest.raises(VerificationError) as caught:
        verify(graph, _ALL, after="my_pass")
    message = str(caught.value)
    assert message.startswith("after pass 'my_pass': ")
    assert re.search(rule, message), message
    assert advice in message
    lines = message.splitlines()
    (marked,) = [i for i, line in enumerate(lines) if line.startswith("> ")]
    if at.op != "output":
        assert lines[marked].startswith(f"> {at.name}: ")
    assert lines[marked - 1].startswith("  ")
    nodes = list(graph.graph.nodes)
    position = nodes.index(at)
    before = min(position, 10)
    after = min(len(nodes) - position - 1, 10)
    shown = [line for line in lines if line[:2] in ("> ", "  ") and line.strip()]
    assert len(shown) == before + 1 + after


def wait_of(graph: StepGraph, lane: Lane = Lane.GATHER) -> fx.Node:
    """The first wait of a lane."""
    return next(n for n in of_role(graph, Role.WAIT) if stamp_of(n).lane is lane)


def test_a_node_without_stamp(graph: StepGraph) -> None:
    (node, *_) = find(graph, _aten.mm.default)
    del node.meta["fxzero"]
    assert_refused(graph, f"node {node.name} has no stamp", node, "use StepGraph.call")


def test_a_node_before_its_input(graph: StepGraph) -> None:
    (node, *_) = find(graph, _aten.mm.default)
    next(iter(graph.nodes())).prepend(node)
    rule = rf"node {node.name} reads \w+ before it exists"
    assert_refused(graph, rule, node, "moved one of them too far")


def test_a_random_node_run_twice() -> None:
    graph = scheduled(with_dropout, "prefetch", zero=3)
    (node,) = find(graph, dropout_mask)
    with graph.graph.inserting_after(node):
        again = graph.graph.node_copy(node)
    set_stamp(again, Stamp(Phase.BACKWARD, again=node.name))
    rule = f"random node {again.name} repeats {node.name}"
    assert_refused(graph, rule, again, "Save its result instead")


def test_a_collective_without_wait(graph: StepGraph) -> None:
    wait = wait_of(graph)
    (part,) = wait.users
    (launch,) = wait.all_input_nodes
    part.replace_all_uses_with(launch.args[0][0])  # type: ignore[index, arg-type]
    graph.graph.erase_node(part)
    graph.graph.erase_node(wait)
    rule = f"the transfer {launch.name} is waited for 0 times"
    assert_refused(graph, rule, launch, "exactly one wait")


def test_a_collective_whose_tensor_is_forgotten(graph: StepGraph) -> None:
    wait = wait_of(graph)
    (part,) = wait.users
    (launch,) = wait.all_input_nodes
    part.replace_all_uses_with(launch.args[0][0])  # type: ignore[index, arg-type]
    graph.graph.erase_node(part)
    rule = rf"{wait.name} brings 1 tensors, and those at \[\] are taken"
    assert_refused(graph, rule, wait, "has one part")


def test_a_collective_waited_for_twice(graph: StepGraph) -> None:
    (launch,) = wait_of(graph, Lane.REDUCE).all_input_nodes
    with graph.graph.inserting_after(launch):
        emit_wait(graph, launch, stamp_of(launch))
    assert_refused(graph, "is waited for 2 times", launch, "exactly one wait")


def test_a_read_in_flight(graph: StepGraph) -> None:
    wait = wait_of(graph)
    (launch,) = wait.all_input_nodes
    (part,) = wait.users
    part.replace_input_with(wait, launch)
    rule = f"{part.name} reads {launch.name}, which is still in flight"
    assert_refused(graph, rule, part, "Read a part of its wait")


def test_a_read_after_release(graph: StepGraph) -> None:
    (release, *_) = of_role(graph, Role.RELEASE)
    (owner,) = release.all_input_nodes
    with graph.graph.inserting_after(release):
        late = graph.call(_aten.sin.default, (owner,), stamp=stamp_of(owner))
    rule = f"{late.name} reads {owner.name} after {release.name} released its memory"
    assert_refused(graph, rule, late, "Move the release behind the last reader")


def test_a_read_through_a_view_after_release(graph: StepGraph) -> None:
    (release, *_) = of_role(graph, Role.RELEASE)
    (owner,) = release.all_input_nodes
    view = next(u for u in owner.users if u.target is _aten.t.default)
    with graph.graph.inserting_after(release):
        late = graph.call(_aten.sin.default, (view,), stamp=stamp_of(view))
    rule = f"{late.name} reads {view.name} after {release.name} released its memory"
    assert_refused(graph, rule, late, "Move the release behind the last reader")


def gradient_of(graph: StepGraph, position: int) -> fx.Node:
    node = graph.output_values[position]
    assert isinstance(node, fx.Node)
    return node


def test_a_gradient_that_is_not_reduced(graph: StepGraph) -> None:
    position = next(iter(graph.gradients))
    values = list(graph.output_values)
    node = gradient_of(graph, position)
    (launch,) = [t.launch for t in graph.transfers(name="reduce") if node in t.parts]
    values[position] = launch.args[0][0]  # type: ignore[index]
    graph.set_output_values(values)
    expected = launch.args[-1]
    rule = (
        rf"the gradient of layers.\d.weight is reduced over groups \[\], expected \['{expected}'\]"
    )
    assert_refused(graph, rule, values[position], "reduced once over each group")


def test_a_gradient_that_is_reduced_twice(graph: StepGraph) -> None:
    position = next(iter(graph.gradients))
    values = list(graph.output_values)
    node = gradient_of(graph, position)
    stamp = stamp_of(node)
    (transfer,) = [t for t in graph.transfers(name="reduce") if node in t.parts]
    record = replace(transfer.record, full_bytes=num_bytes(node), num_tensors=1)
    with graph.graph.inserting_before(graph.output):
        values[position] = emit_transfer(graph, node, record, stamp)
    graph.set_output_values(values)
    assert_refused(
        graph, "is reduced over groups", values[position], "reduced once over each group"
    )


def of_one_bucket() -> StepGraph:
    """Two gathers, and two reduces, of tensors of one shape."""
    return scheduled(chain(2), "prefetch", Bucket(), zero=3)


def swap_parts(graph: StepGraph, lane: str) -> fx.Node:
    """Let two results of a transfer be taken for each other; the first wait that is wrong."""
    transfer = graph.transfers(name=lane)[0]
    first, second = transfer.parts
    first.args, second.args = second.args, first.args
    return second


@pytest.mark.parametrize("lane", ["gather", "reduce"])
def test_two_results_that_are_swapped(lane: str) -> None:
    """Every shape fits."""
    graph = of_one_bucket()
    verify(graph, _ALL, after="prefetch")
    part = swap_parts(graph, lane)
    rule = rf"{part.name} is taken for layers.\d.weight, but \w+ sent layers.\d.weight there"
    assert_refused(graph, rule, part, "Keep the order of tensors and parts")


def test_two_gradients_that_are_swapped() -> None:
    """Each is reduced, for the other parameter."""
    graph = of_one_bucket()
    first, second = graph.gradients
    values = list(graph.output_values)
    wait = values[second]
    values[first], values[second] = values[second], values[first]
    graph.set_output_values(values)
    rule = rf"the gradient of layers.\d.weight is {wait.name}, which is that of layers.\d.weight"
    assert_refused(graph, rule, wait, "Keep parameters and gradients in one order")


def test_a_gradient_that_is_a_sum(graph: StepGraph) -> None:
    """As large as there are ranks."""
    transfer = graph.transfers(name="reduce")[0]
    record = replace(transfer.record, op="sum")
    change(transfer.launch, record)
    rule = r"the gradient of layers.\d.weight is no mean over the ranks"
    assert_refused(graph, rule, transfer.launch, "Reduce it with 'avg'")


def change(launch: fx.Node, record: Transfer) -> None:
    """Let a launch do something else, and its record say so."""
    set_stamp(launch, replace(stamp_of(launch), transfer=record))
    launch.target, launch.args = call_of(record, sent_by(launch))


def test_a_call_that_does_not_do_what_its_record_says(graph: StepGraph) -> None:
    """The record is what everybody reads."""
    launch = graph.transfers(name="reduce")[0].launch
    tensors, _, *rest = launch.args
    launch.args = (tensors, "sum", *rest)
    rule = rf"{launch.name} calls .*'sum', .* its record means .*'avg'"
    assert_refused(graph, rule, launch, "Change a transfer's record and its call together")


def test_a_record_of_other_bytes(graph: StepGraph) -> None:
    """Costs, budgets and traffic are counted by it."""
    transfer = graph.transfers(name="gather")[0]
    stamp = replace(transfer.stamp, transfer=replace(transfer.record, full_bytes=1))
    set_stamp(transfer.launch, stamp)
    rule = f"{transfer.launch.name} moves 1 tensors, 256 bytes in full, and its record says 1 and 1"
    assert_refused(graph, rule, transfer.launch, "when the tensors are known")


def test_a_gather_over_other_ranks() -> None:
    """The replicas hold the same rows."""
    graph = scheduled(chain(1), "prefetch", zero=3, mesh_shape=(2, 4))
    transfer = graph.transfers(name="gather")[0]
    (group,) = {g.name for s in graph.specs.values() for g in s.replica_groups}
    change(transfer.launch, replace(transfer.record, group=group))
    rule = (
        rf"{transfer.launch.name} moves layers.0.weight by all_gather over {group} of 4, but its "
        r"layout asks for all_gather over \d+ of 4"
    )
    assert_refused(graph, rule, transfer.launch, "follows from ParamSpec.layout")


def test_a_micro_step_that_is_lost() -> None:
    """At the stages that add up shards, and at those that add up full gradients."""
    for zero in (0, 3):
        graph = step_graph(chain_of(2, rows=6), zero=zero, micro_batches=3)
        check_updates(graph, "prefetch")
        (add, *_) = of_role(graph, Role.ACCUMULATE)
        add.replace_all_uses_with(add.args[0])  # type: ignore[arg-type]
        with pytest.raises(VerificationError, match=r"adds up micro-steps \[0, \d\], expected"):
            check_updates(graph, "prefetch")


def test_state_of_another_parameter() -> None:
    """Two parameters of one shape in an update."""
    options = {**EAGER, "bucket": {}}
    graph = step_graph(chain_of(2), options=options)
    (update,) = of_role(graph, Role.UPDATE)
    params, grads, (moments, *others), *rest = update.args
    update.args = (params, grads, [moments[::-1], *others], *rest)  # type: ignore[index]
    rule = r"takes exp_avg_layers_\d_weight for the state of layers.\d.weight, which is that of"
    with pytest.raises(VerificationError, match=rule):
        check_updates(graph, "prefetch")


def test_a_marker_that_is_left() -> None:
    graph = scheduled(chain(1), "shard_params", zero=3)
    (marker,) = of_role(graph, Role.RESHARD)
    graph.gradients.clear()
    rule = f"the gradient marker {marker.name} was left in the graph"
    assert_refused(graph, rule, marker, "shard_grads replaces all of them")


def test_the_users_line_is_shown(graph: StepGraph) -> None:
    (node, *_) = find(graph, _aten.relu.default)
    del node.meta["fxzero"]
    with pytest.raises(
        VerificationError, match=r"from File .*tracing\.py.*x = layer\(x\)\.relu\(\)"
    ):
        verify(graph, _ALL, after="my_pass")


def test_rules_wait_for_their_facts() -> None:
    """Before the gradients are reduced nobody asks for reductions."""
    graph = scheduled(chain(1), "shard_params", zero=3)
    verify(graph, {Fact.STAMPED, Fact.GATHERED}, after="shard_params")
    with pytest.raises(VerificationError):
        verify(graph, {Fact.STAMPED, Fact.GATHERED, Fact.REDUCED}, after="shard_params")


def test_the_digest_is_of_the_collectives() -> None:
    """Another order of the same collectives is another digest."""
    graph = scheduled(chain(2), "prefetch")
    before = collectives_digest(graph)
    assert collectives_digest(graph.clone()) == before
    (first, second, *_) = [t.launch for t in graph.transfers()]
    second.append(first)
    assert collectives_digest(graph) != before


def test_the_digest_does_not_depend_on_the_rank() -> None:
    """Also where the last rank's shard has fewer rows: that one is padded, as are all."""
    build = of(lambda: nn.Linear(8, 13), 4, 8)
    graphs = [scheduled(build, "prefetch", world_size=2, rank=rank) for rank in (0, 1)]
    prints = [[(t.launch.target, t.launch.args[1:-1]) for t in g.transfers()] for g in graphs]
    assert prints[0] == prints[1]


def test_a_parameter_that_is_read_after_its_update() -> None:
    """It would be the next step's."""
    graph = step_graph(chain_of(2), zero=0, world_size=1)
    check_updates(graph, "prefetch")
    update = of_role(graph, Role.UPDATE)[0]
    parameter = update.args[0][0]  # type: ignore[index]
    with graph.graph.inserting_after(update):
        stamp = Stamp(Phase.BACKWARD, made_by="test")
        graph.call(torch.ops.aten.clone.default, (parameter,), stamp=stamp)
    with pytest.raises(VerificationError, match=r"clone.* reads .* after update_.* has changed it"):
        check_updates(graph, "prefetch")


def test_an_update_by_a_gradient_that_was_not_reduced() -> None:
    """Each rank would go its own way."""
    graph = step_graph(chain_of(2), zero=0, world_size=2)
    update = of_role(graph, Role.UPDATE)[0]
    transfer = graph.transfers(name="reduce")[0]
    update.args = (update.args[0], [transfer.tensors[0]], *update.args[2:])
    with pytest.raises(VerificationError, match=r"reduced over groups \[\], expected"):
        check_updates(graph, "prefetch")
