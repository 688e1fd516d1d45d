"""Each rule of the verifier, broken by hand on a real graph."""

from __future__ import annotations

import operator
import re
from unittest import mock

import pytest
import torch
from torch import fx, nn

import fxzero
from fxzero.backend import Compilation
from fxzero.errors import VerificationError
from fxzero.graph import Lane, Phase, Role, Stamp, StepGraph
from fxzero.graph.stamps import set_stamp, stamp_of
from fxzero.graph.verify import check_updates, collectives_digest, verify
from fxzero.passes import Fact
from tests.parity.harness import Pools
from tests.passes.test_recompute import with_dropout
from tests.stepping import chain_of, step_graph
from tests.tracing import Chain, chain, clone, find, of, of_role, scheduled

_WAIT = torch.ops._c10d_functional.wait_tensor.default
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
    (node,) = find(graph, _aten.native_dropout.default)
    with graph.graph.inserting_after(node):
        again = graph.graph.node_copy(node)
    set_stamp(again, Stamp(Phase.BACKWARD, again=node.name))
    rule = f"random node {again.name} repeats {node.name}"
    assert_refused(graph, rule, again, "Save its result instead")


def test_a_collective_without_wait(graph: StepGraph) -> None:
    wait = wait_of(graph)
    (part,) = wait.all_input_nodes
    launch = part.all_input_nodes[0]
    wait.replace_all_uses_with(launch.args[0][0])  # type: ignore[index, arg-type]
    graph.graph.erase_node(wait)
    rule = f"collective {launch.name} carries 1 tensors and is waited for 0 times"
    assert_refused(graph, rule, launch, "exactly one wait_tensor")


def test_a_collective_whose_tensor_is_forgotten(graph: StepGraph) -> None:
    wait = wait_of(graph)
    (part,) = wait.all_input_nodes
    launch = part.all_input_nodes[0]
    wait.replace_all_uses_with(launch.args[0][0])  # type: ignore[index, arg-type]
    graph.graph.erase_node(wait)
    graph.graph.erase_node(part)
    assert_refused(graph, "is waited for 0 times", launch, "exactly one wait_tensor")


def test_a_collective_waited_for_twice(graph: StepGraph) -> None:
    wait = wait_of(graph, Lane.REDUCE)
    (part,) = wait.all_input_nodes
    with graph.graph.inserting_after(wait):
        graph.call(_WAIT, (part,), stamp=stamp_of(wait))
    launch = part.all_input_nodes[0]
    assert_refused(graph, "is waited for 2 times", launch, "exactly one wait_tensor")


def test_a_read_in_flight(graph: StepGraph) -> None:
    wait = wait_of(graph)
    (part,) = wait.all_input_nodes
    reader = next(iter(wait.users))
    reader.replace_input_with(wait, part)
    rule = f"{reader.name} reads {part.name}, which is still in flight"
    assert_refused(graph, rule, reader, "Read the result of its wait_tensor")


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
    (launch,) = [t.launch for t in graph.transfers(name="reduce") if node in t.waits]
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
    (launch,) = [t.launch for t in graph.transfers(name="reduce") if node in t.waits]
    with graph.graph.inserting_before(graph.output):
        again = graph.call(
            torch.ops._c10d_functional.all_reduce_coalesced.default,
            ([node], "avg", launch.args[-1]),
            stamp=Stamp(Phase.BACKWARD, Lane.REDUCE, Role.LAUNCH, params=stamp.params),
        )
        part_stamp = Stamp(Phase.BACKWARD, Lane.REDUCE, Role.PART)
        part = graph.call(operator.getitem, (again, 0), stamp=part_stamp)
        values[position] = graph.call(_WAIT, (part,), stamp=stamp)
    graph.set_output_values(values)
    assert_refused(
        graph, "is reduced over groups", values[position], "reduced once over each group"
    )


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
    assert collectives_digest(clone(graph)) == before
    (first, second, *_) = [t.launch for t in graph.transfers()]
    second.append(first)
    assert collectives_digest(graph) != before


def test_the_digest_does_not_depend_on_the_rank() -> None:
    """Also where the last rank's shard has fewer rows: that one is padded, as are all."""
    build = of(lambda: nn.Linear(8, 13), 4, 8)
    graphs = [scheduled(build, "prefetch", world_size=2, rank=rank) for rank in (0, 1)]
    prints = [[(t.launch.target, t.launch.args[1:-1]) for t in g.transfers()] for g in graphs]
    assert prints[0] == prints[1]


class Odd(Chain):
    """Applies its layers in another order on rank 1."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, 8) → scalar."""
        layers = list(self.layers)
        if torch.distributed.get_rank() == 1:
            layers.reverse()
        for layer in layers:
            x = layer(x).relu()
        return x.sum()


def compile_differently(difference: str) -> str:
    """Job: compile, where rank 1's model may differ; return what was raised."""
    model = Odd(2) if difference == "order" else Chain(2)
    fxzero.shard(model, zero=3)
    if difference == "frozen" and torch.distributed.get_rank() == 1:
        next(model.parameters()).requires_grad_(False)
    options = {"lower_regions": {"backend": "eager"}}
    compiled = torch.compile(model, backend="fxzero", options=options)
    # Ranks that nobody told would hang, so compiling ends before anything runs.
    with mock.patch.object(Compilation, "cut", side_effect=NotImplementedError):
        try:
            compiled(torch.randn(4, 8))
        except VerificationError as error:
            return str(error)
        except torch._dynamo.exc.BackendCompilerFailed as error:
            if not isinstance(error.inner_exception, NotImplementedError):
                raise
    return ""


@pytest.mark.parametrize("world", [2])
@pytest.mark.parametrize("difference", ["order", "frozen"])
def test_ranks_that_differ_get_an_error(ranks: Pools, world: int, difference: str) -> None:
    """The second rank to arrive is told, before anything could hang."""
    messages = ranks(world).run(compile_differently, difference)
    told = [m for m in messages if m]
    assert len(told) == 1, "one of two ranks arrives second"
    assert "would run different sequences of collectives" in told[0]
    assert "forward _c10d_functional.all_gather_into_tensor_coalesced" in told[0]
    assert "Build the model and call it alike on all ranks" in told[0]


@pytest.mark.parametrize("world", [2])
def test_ranks_that_agree_get_none(ranks: Pools, world: int) -> None:
    """The same code on all ranks."""
    assert ranks(world).run(compile_differently, "nothing") == ["", ""]


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
