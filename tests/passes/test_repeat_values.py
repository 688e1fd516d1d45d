"""What backward draws again, and what it gathers again from parts."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import fxzero
from fxzero.errors import ConfigError, RanksDisagreeError, VerificationError
from fxzero.graph import Lane, Phase, StepGraph
from fxzero.graph.cut import cut
from fxzero.graph.stamps import set_stamp, stamp_of
from fxzero.graph.verify import verify
from fxzero.passes import Context, Fact, Prefetch, Recompute
from fxzero.passes.release_saved import last_reader
from fxzero.passes.repeat_values import Partitioned, Repetitions
from fxzero.runtime.account import collectives_digest
from fxzero.runtime.parts import own_part
from fxzero.runtime.random import DrawAgain, dropout_mask, generator_state
from fxzero.schedule.inventory import Inventory
from tests.parity.harness import Pools
from tests.tracing import Build, find, of, run, scheduled, sides, trace, up_to

_aten = torch.ops.aten
_ALL = frozenset(Fact) - {Fact.CUT}


class Dropped(nn.Module):
    """A mask of 96 KiB, another one, and noise."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(1536, 64) → scalar."""
        x = F.dropout(self.layer(x), 0.25)
        x = F.dropout(x.sin(), 0.5)
        return (x * torch.randn_like(x)).sum()


class Expanded(nn.Module):
    """A dear function of a parameter that both factors' gradients read."""

    def __init__(self, twice: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(70))
        self.twice = twice

    def forward(self, x: Tensor) -> Tensor:
        """(B, 70) → scalar."""
        return (x @ (self.weight @ (self.weight * (2.0 if self.twice else 1.0)))).sin().sum()


dropped = of(Dropped, 1536, 64)
expanded = of(Expanded, 4, 70)
AGAIN = Recompute(repeat=("dropout_mask", "aten.randn_like"))
PARTS = Recompute(partition=("aten.mm",))


def stamped(build: Build) -> tuple[StepGraph, Context]:
    """A graph before `recompute`, of a model whose input has a gradient."""
    graph, context = trace(build, zero=3), Context()
    run(graph, up_to("draw_masks"), context)
    return graph, context


def partitioned(build: Build = expanded, last: str = "prefetch", **setup: object) -> StepGraph:
    """The graph with its product of parameters in parts."""
    return scheduled(build, last, PARTS, Prefetch(distance=1), **setup)


def test_a_mask_is_drawn_again_from_the_state_before_it() -> None:
    """Each state stands right before what draws from it, and backward keeps that."""
    graph = scheduled(dropped, "prefetch", AGAIN, zero=0)
    states = find(graph, generator_state)
    again = [n for n in graph.nodes() if isinstance(n.target, DrawAgain)]
    assert len(states) == len(again) == 3
    assert [n.target.target for n in again if n.target.target is dropout_mask]  # type: ignore[union-attr]
    for node in again:
        state = node.args[0]
        assert state in states
        assert isinstance(state, torch.fx.Node)
        assert state.next.name == stamp_of(node).again
        assert state.next.args == node.args[1:]
        assert stamp_of(node).phase is Phase.BACKWARD
    saved = {node.name for node in sides(dropped, AGAIN, zero=0).saved}
    assert {state.name for state in states} <= saved
    assert not any("mask" in name and "state" not in name for name in saved)


def test_what_is_small_is_saved() -> None:
    """A generator's state is larger."""
    small = of(Dropped, 16, 64)
    graph = scheduled(small, "prefetch", AGAIN, zero=0)
    assert not find(graph, generator_state)


def test_a_cuda_graph_saves_what_is_random() -> None:
    """It cannot ask for a generator's state."""
    graph = trace(dropped, zero=0)
    run(graph, up_to("recompute", AGAIN), Context(replays=True))
    assert not find(graph, generator_state)


def test_a_state_that_another_operator_draws_from() -> None:
    """Is refused: backward would see other numbers."""
    graph = scheduled(dropped, "prefetch", AGAIN, zero=0)
    first, second, *_ = find(graph, generator_state)
    first.prepend(second)
    with pytest.raises(VerificationError, match=r"begins with the state mask.* has drawn"):
        verify(graph, _ALL, after="my_pass")


def test_a_part_is_cut_in_forward_and_gathered_in_backward() -> None:
    """Of 4,900 elements each of eight ranks keeps 613, the last one four zeros among them."""
    graph = partitioned(zero=3)
    (cut,) = find(graph, own_part)
    assert tuple(cut.meta["val"].shape) == (613,)
    (transfer,) = [t for t in graph.transfers() if t.of_activations]
    assert transfer.tensors == [cut]
    assert transfer.record.full_bytes == 4 * 613 * 8
    (result,) = transfer.results
    assert tuple(result.meta["val"].shape) == (70, 70)
    assert {stamp_of(user).phase for user in result.users} == {Phase.BACKWARD}
    whole = cut.all_input_nodes[0]
    assert {stamp_of(user).phase for user in whole.users} == {Phase.FORWARD}
    saved = sides(expanded, PARTS, Prefetch(distance=1), zero=3).saved
    assert cut.name in {node.name for node in saved}
    assert whole.name not in {node.name for node in saved}


def test_a_part_is_freed_when_it_has_travelled() -> None:
    """Not while it is sent."""
    backward = sides(expanded, PARTS, Prefetch(distance=1), zero=3).backward
    (part,) = backward.graph.find_nodes(op="placeholder", target="mm_part")
    (launch,) = part.users
    (wait,) = launch.users
    assert last_reader(part) is wait


def test_gathers_of_parts_are_placed_like_others() -> None:
    """A task on the lane of gathers, behind what makes the part, and what it holds is counted."""
    graph = partitioned(last="bucket", zero=3)
    inventory = Inventory(graph, Context().costs, cut=True, fuses=True)
    (number,) = [i for i, t in enumerate(inventory.gathers) if t.of_activations]
    maker = inventory.kept_by[number]
    assert find(graph, own_part)[0] in inventory.units[maker].nodes
    assert all(made == -1 for i, made in enumerate(inventory.kept_by) if i != number)
    launch = inventory.gathers[number].launch
    assert any(s.begin is launch and s.of_transfer for s in inventory.storages.every)
    assert inventory.gathers[number].stamp.lane is Lane.GATHER


def test_parts_of_what_nobody_else_has() -> None:
    """Is a setting without effect, which is said."""
    context = Context()
    graph = trace(dropped, zero=3)
    run(graph, up_to("recompute", PARTS), context)
    assert not find(graph, own_part)
    (warning,) = context.warnings
    assert "recompute.partition=['aten.mm'] has no effect" in warning


def test_along_the_axis_that_pays() -> None:
    """With two axes the larger one keeps less."""
    graph = partitioned(zero=3, mesh_shape=(2, 4))
    (transfer,) = [t for t in graph.transfers() if t.of_activations]
    assert (transfer.record.axis, transfer.record.size) == ("shard", 4)


def test_a_gather_of_something_else() -> None:
    """Is refused: it would bring what no rank has cut."""
    graph = partitioned(zero=3)
    (cut,) = find(graph, own_part)
    value, size, group = cut.args
    cut.args = (value, size, "another")
    with pytest.raises(VerificationError, match="no part of a value that was cut for these ranks"):
        verify(graph, _ALL, after="my_pass")
    cut.args = (value, size, group)
    verify(graph, _ALL, after="my_pass")


class Halves(nn.Module):
    """Two dear functions of a parameter, of which some ranks' backward reads but one."""

    def __init__(self, both: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(70))
        self.scale = nn.Parameter(torch.ones(70))
        self.both = both

    def forward(self, x: Tensor) -> Tensor:
        """(70, 70) → scalar."""
        first, second = self.weight @ self.weight, self.weight.t() @ self.weight
        x = x * self.scale
        other = x * second if self.both else x + second
        return (x * first).sum() + other.sum()


def test_what_only_other_ranks_read_again() -> None:
    """Comes and goes: what one rank decides on is right for all, and they run the same."""
    both, one = (of(partial(Halves, b), 70, 70) for b in (True, False))
    decision = Recompute(partition=("aten.mm",)).decide(*stamped(both))
    assert len(decision.parts) == 2
    found = []
    for build in (both, one):
        graph, context = stamped(build)
        Recompute().apply(graph, decision, context)
        found.append(cut(graph, set()).backward)
    for backward, released in zip(found, (0, 1), strict=True):
        gathers = [t for t in backward.transfers() if t.of_activations]
        assert len(gathers) == 2
        assert all(transfer.results for transfer in gathers)
        assert len(find(backward, torch.ops.fxzero.release.default)) == released


def test_a_plan_for_what_ranks_do_not_share() -> None:
    """Names what there is."""
    graph = trace(expanded, zero=3)
    run(graph, up_to("draw_masks"))
    decision = Repetitions((), (Partitioned("mm", "pipeline", 0, "", 0.0),))
    with pytest.raises(ConfigError, match=r"'mm' in parts along 'pipeline'.*it is along shard"):
        Recompute().apply(graph, decision, Context())


def test_a_rank_that_computes_by_other_numbers() -> None:
    """Runs other collectives, which ranks compare before the first wait."""

    def alike(twice: bool) -> str:
        graph = partitioned(of(lambda: Expanded(twice), 4, 70), zero=3)
        (transfer,) = [t for t in graph.transfers() if t.of_activations]
        before, found = collectives_digest(graph), transfer.record.alike
        changed = replace(transfer.record, alike="another")
        set_stamp(transfer.launch, transfer.stamp.but(transfer=changed))
        assert collectives_digest(graph) != before
        return found

    assert alike(twice=False) == alike(twice=False) != alike(twice=True)


def other_numbers(*, differ: bool) -> str:
    """Job: two graphs of one structure, with numbers that change, or that are each rank's own."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = fxzero.shard(Expanded(), zero=3)
    options = {"recompute": {"partition": ["aten.mm"]}, "lower_regions": {"backend": "eager"}}
    compiled = torch.compile(model, backend="fxzero", options=options)
    try:
        for twice in (False, True):
            model.twice = twice != (differ and dist.get_rank() == 1)
            compiled(torch.randn(4, 70, requires_grad=True)).backward()
    except RanksDisagreeError:
        return "refused"
    return "trained"


def test_numbers_that_change_on_all_ranks(ranks: Pools) -> None:
    """Are another graph, and no disagreement; numbers of a rank's own are one."""
    for differ, expected in ((False, "trained"), (True, "refused")):
        assert ranks(2).run(other_numbers, differ=differ) == [expected] * 2
