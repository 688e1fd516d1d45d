# ruff: noqa: E501
"""Collectives one by one, where the backend would copy a list into scratch memory."""

from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fxzero.graph import Role, StepGraph
from fxzero.graph.aliases import root
from fxzero.graph.node_text import node_line
from fxzero.graph.stamps import stamp_of
from fxzero.graph.verify import verify
from fxzero.inspect.capture import fake_ranks
from fxzero.passes import Context, LowerTransfers
from fxzero.passes.lower_transfers import lower_transfer
from fxzero.runtime import collectives
from tests import simulated_ranks
from tests.passes.test_bucket import blocks, linear
from tests.tracing import Build, chain, find, scheduled, texts, words


def odd() -> tuple[nn.Module, tuple[torch.Tensor]]:
    """Five rows do not split evenly."""
    x = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    return nn.Linear(5, 5, dtype=torch.float64), (x,)


def lower_all(graph: StepGraph, world_size: int = 8) -> StepGraph:
    """As on gloo, which a fake process group is not."""
    with fake_ranks(world_size):
        for transfer in graph.transfers():
            lower_transfer(transfer)
    verify(graph, {"stamped", "gathered", "cut"}, after="lower_transfers")
    return graph


@texts
@pytest.mark.parametrize("zero", [0, 3])
def test_before_and_after(zero: int) -> None:
    """Stage 3 gathers and exchanges rows; stage 0 reduces in place."""
    graph = scheduled(linear, "prefetch", zero=zero)
    before = transfers_of(graph)
    lower_all(graph)
    after = transfers_of(graph)
    if zero == 0:
        assert_expected_inline(
            before,
            """\
reduce__2: (f32[8], f32[8, 8]) = _c10d_functional.all_reduce_coalesced([view, t_4], avg, 0)  # backward reduce launch reduce.backward.0
reduce__2_done: (f32[8], f32[8, 8]) = wait(reduce__2)  # backward reduce wait reduce.backward.0
getitem_1: f32[8] = getitem(reduce__2_done, 0)  # backward reduce part reduce.backward.0
getitem: f32[8, 8] = getitem(reduce__2_done, 1)  # backward reduce part reduce.backward.0""",
        )
        assert_expected_inline(
            after,
            """\
reduce__2: (f32[8], f32[8, 8]) = all_reduce([view, t_4], 0, [True, True])  # backward reduce launch reduce.backward.0
reduce__2_done: (f32[8], f32[8, 8]) = join_sum(reduce__2, 8)  # backward reduce wait reduce.backward.0
getitem_1: f32[8] = getitem(reduce__2_done, 0)  # backward reduce part reduce.backward.0
getitem: f32[8, 8] = getitem(reduce__2_done, 1)  # backward reduce part reduce.backward.0""",
        )
    else:
        assert_expected_inline(
            before,
            """\
gather__3: (f32[8, 8], f32[8]) = _c10d_functional.all_gather_into_tensor_coalesced([primals_1, primals_2], 8, 0)  # forward gather launch gather.forward.0
gather__3_done: (f32[8, 8], f32[8]) = wait(gather__3)  # forward gather wait gather.forward.0
weight: f32[8, 8] = getitem(gather__3_done, 0)  # forward gather part gather.forward.0
bias: f32[8] = getitem(gather__3_done, 1)  # forward gather part gather.forward.0
gather__1: (f32[8, 8]) = _c10d_functional.all_gather_into_tensor_coalesced([primals_1], 8, 0)  # backward gather launch gather.backward.1
gather__1_done: (f32[8, 8]) = wait(gather__1)  # backward gather wait gather.backward.1
weight_1: f32[8, 8] = getitem(gather__1_done, 0)  # backward gather part gather.backward.1
reduce__2: (f32[1], f32[1, 8]) = _c10d_functional.reduce_scatter_tensor_coalesced([view, t_4], avg, 8, 0)  # backward reduce launch reduce.backward.0
reduce__2_done: (f32[1], f32[1, 8]) = wait(reduce__2)  # backward reduce wait reduce.backward.0
getitem_1: f32[1] = getitem(reduce__2_done, 0)  # backward reduce part reduce.backward.0
getitem: f32[1, 8] = getitem(reduce__2_done, 1)  # backward reduce part reduce.backward.0""",
        )
        assert_expected_inline(
            after,
            """\
gather__3: (f32[8, 8], f32[8]) = gather([primals_1, primals_2], 8, 0)  # forward gather launch gather.forward.0
gather__3_done: (f32[8, 8], f32[8]) = join(gather__3)  # forward gather wait gather.forward.0
weight: f32[8, 8] = getitem(gather__3_done, 0)  # forward gather part gather.forward.0
bias: f32[8] = getitem(gather__3_done, 1)  # forward gather part gather.forward.0
gather__1: (f32[8, 8]) = gather([primals_1], 8, 0)  # backward gather launch gather.backward.1
gather__1_done: (f32[8, 8]) = join(gather__1)  # backward gather wait gather.backward.1
weight_1: f32[8, 8] = getitem(gather__1_done, 0)  # backward gather part gather.backward.1
reduce__2: (f32[1], f32[1, 8]) = exchange([view, t_4], 8, 0, [True, True])  # backward reduce launch reduce.backward.0
reduce__2_done: (f32[1], f32[1, 8]) = join_exchange(reduce__2, 8)  # backward reduce wait reduce.backward.0
getitem_1: f32[1] = getitem(reduce__2_done, 0)  # backward reduce part reduce.backward.0
getitem: f32[1, 8] = getitem(reduce__2_done, 1)  # backward reduce part reduce.backward.0""",
        )


def transfers_of(graph: StepGraph) -> str:
    """The text of the nodes of transfers."""
    roles = {Role.LAUNCH, Role.PART, Role.WAIT, Role.FINISH}
    return words("\n".join(node_line(n) for n in graph.nodes() if stamp_of(n).role in roles))


@pytest.mark.parametrize("zero", [0, 1, 3])
@pytest.mark.parametrize("world_size", [2, 4])
def test_the_meaning_stays(world_size: int, zero: int) -> None:
    """On all ranks in lockstep, with padding and a rank without rows, on whole numbers."""
    graphs = [
        scheduled(odd, "prefetch", zero=zero, world_size=world_size, rank=rank)
        for rank in range(world_size)
    ]
    inputs = simulated_ranks.random_inputs(graphs)
    expected = simulated_ranks.run(graphs, inputs)
    rewritten = [lower_all(graph.clone(), world_size) for graph in graphs]
    for ours, theirs in zip(simulated_ranks.run(rewritten, inputs), expected, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert a is b if b is None else torch.equal(a, b)


def test_a_gradient_that_something_else_reads_is_not_reduced_in_place() -> None:
    """The user's own output must not change under their hands."""
    graph = scheduled(chain(1, relu=False), "prefetch", zero=0)
    (transfer,) = graph.transfers()
    (sent,) = transfer.tensors
    owner = root(sent)
    assert owner is not sent, "the gradient is a transpose: its memory belongs to another node"
    graph.set_output_values((*graph.output_values, owner))
    lower_all(graph)
    (launch,) = find(graph, collectives.all_reduce)
    *_, own = launch.args
    assert own == [False]


class SumOfTwo(nn.Module):
    """Two weights that are used as their sum."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.ones(8, 8))
        self.second = nn.Parameter(torch.ones(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, 8) to a scalar."""
        return (x @ (self.first + self.second)).sum()


@pytest.mark.parametrize(
    ("zero", "launched"), [(0, collectives.all_reduce), (3, collectives.exchange)]
)
def test_one_gradient_of_two_parameters_is_neithers_own(zero: int, launched: object) -> None:
    """A bucket that holds it twice would reduce it in place twice, or free it twice."""
    graph = scheduled(lambda: (SumOfTwo(), (torch.randn(2, 8),)), "prefetch", zero=zero)
    lower_all(graph)
    (launch,) = find(graph, launched)
    sent, *_, own = launch.args
    assert root(sent[0]) is root(sent[1]), "the gradients are two tensors"
    assert own == [False, False]


def test_a_gradient_that_nothing_else_reads_is_reduced_in_place() -> None:
    """No copy of what is a temporary anyway."""
    graph = scheduled(chain(1), "prefetch", zero=0, reduce_dtype=torch.float64)
    lower_all(graph)
    (launch,) = find(graph, collectives.all_reduce)
    *_, own = launch.args
    assert own == [True], "the cast before the reduction made a tensor for it alone"


@pytest.mark.parametrize("build", [blocks, linear], ids=["blocks", "linear"])
def test_other_backends_keep_their_lists(build: Build) -> None:
    """NCCL runs a list as one launch; so does the fake group here."""
    graph = scheduled(build, "prefetch")
    before = graph.text()
    with fake_ranks(8):
        init_device_mesh("cpu", (8,))
        notes = LowerTransfers().run(graph, Context())
    assert dict(notes) == {"lowered": 0}
    assert graph.text() == before
