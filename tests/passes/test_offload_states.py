"""Which updates run on the host, what they are given there, and what the device is left with."""

from __future__ import annotations

import operator
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, fx, nn

import fxzero
from fxzero.compiler.compilation import Compilation
from fxzero.graph import Lane, Phase, Role, StepGraph
from fxzero.graph.lanes import ALIGNMENT, aligned
from fxzero.graph.operators import num_bytes
from fxzero.graph.stamps import stamp_of
from fxzero.graph.step_graph import TransferNodes
from fxzero.passes.offload_states import Offloaded, OffloadStates
from fxzero.runtime import copies, updates
from fxzero.runtime.ahead import Launch, Take
from fxzero.transfer import PCIE_DOWN, PCIE_UP, Pool
from tests.stepping import EAGER, chain_of, compiled_step
from tests.tiers import in_two_tiers
from tests.tracing import of_role, params_of

HOST: dict[str, Any] = {**EAGER, "memory": "states_host"}
TOGETHER: dict[str, Any] = {**HOST, "bucket": {}}
"""All layers in one bucket."""
ONE_PROCESS: dict[str, Any] = {"zero": 0, "world_size": 1}


_compiled: dict[str, Compilation] = {}


def compiled(depth: int = 3, options: dict[str, Any] = HOST, **settings: Any) -> Compilation:
    """A step of some linear layers, compiled once."""
    key = repr((depth, options, settings))
    if key not in _compiled:
        _compiled[key] = compiled_step(chain_of(depth, 16, 8), options=options, **settings)
    return _compiled[key]


def offloaded(depth: int = 3, options: dict[str, Any] = HOST, **settings: Any) -> StepGraph:
    """A copy of its scheduled graph."""
    joint = compiled(depth, options, **settings).joint
    assert joint is not None
    return joint.clone()


def uploads(graph: StepGraph) -> list[TransferNodes]:
    """Copies to the device, in launch order."""
    return graph.transfers(name=Lane.H2D.value)


def downloads(graph: StepGraph) -> list[TransferNodes]:
    """Copies from the device, in launch order."""
    return graph.transfers(name=Lane.D2H.value)


def nodes_in(argument: object) -> list[fx.Node]:
    """A node's argument that is a list of nodes."""
    assert isinstance(argument, (list, tuple))
    return [node for node in argument if isinstance(node, fx.Node)]


def update_of(graph: StepGraph, params: tuple[str, ...]) -> fx.Node:
    """The update of some parameters."""
    (found,) = (n for n in of_role(graph, Role.UPDATE) if stamp_of(n).params == params)
    return found


def join_of(graph: StepGraph) -> fx.Node:
    """What waits for all updates."""
    (found,) = of_role(graph, Role.JOIN)
    return found


# -- which nodes there are


@pytest.mark.parametrize("settings", [ONE_PROCESS, {}], ids=["one process", "stage 3 on 8 ranks"])
def test_a_parameter_is_copied_waited_for_and_read(settings: dict[str, Any]) -> None:
    """What reads a parameter reads its copy, behind the wait."""
    graph = offloaded(**settings)
    assert len(uploads(graph)) == 3
    for copy in uploads(graph):
        (param,) = copy.tensors
        (part,) = copy.parts
        assert isinstance(copy.launch.target, Take)
        assert copy.wait.target is copies.join_upload
        assert part.target is operator.getitem
        assert copy.launch < copy.wait < part < min(part.users)
        assert stamp_of(part).params == stamp_of(param).params
        readers = {user for user in param.users if stamp_of(user).lane is Lane.COMPUTE}
        assert not readers
        assert (copy.record.source, copy.record.target) == (Pool.HOST, Pool.DEVICE)
        assert copy.record.resource == PCIE_UP
        assert copy.record.full_bytes == num_bytes(param)


@pytest.mark.parametrize("settings", [ONE_PROCESS, {}], ids=["one process", "stage 3 on 8 ranks"])
def test_a_gradient_goes_down_and_is_what_the_host_updates_by(settings: dict[str, Any]) -> None:
    """Down, arrived, updated, joined: in this order."""
    graph = offloaded(**settings)
    assert len(downloads(graph)) == 3
    for copy in downloads(graph):
        update = update_of(graph, copy.stamp.params)
        assert copy.launch.target is copies.download
        assert copy.wait.target is copies.arrived
        assert isinstance(update.target, copies.HostUpdate)
        assert update.target.kernel is updates.adamw
        assert nodes_in(update.args[1]) == list(copy.parts)
        assert copy.launch < copy.wait < copy.parts[0] < update < join_of(graph)
        lanes = [stamp_of(n).lane for n in (copy.launch, copy.wait, copy.parts[0], update)]
        assert lanes == [Lane.D2H, Lane.HOST, Lane.HOST, Lane.HOST]
        assert (copy.record.source, copy.record.target) == (Pool.DEVICE, Pool.HOST)
        assert copy.record.resource == PCIE_DOWN
    assert nodes_in(join_of(graph).args[0]) == of_role(graph, Role.UPDATE)


@pytest.mark.parametrize(
    ("options", "micro_batches", "zero"),
    in_two_tiers([*product([HOST, TOGETHER], [1, 4], [0, 1, 2, 3])]),
)
def test_one_upload_and_one_download_for_each_update(
    options: dict[str, Any], micro_batches: int, zero: int
) -> None:
    """However many micro-batches read a parameter, and add to its gradient."""
    graph = offloaded(options=options, zero=zero, micro_batches=micro_batches)
    found = sorted(params_of(of_role(graph, Role.UPDATE)))
    for copied in (uploads(graph), downloads(graph)):
        assert sorted(params_of([copy.launch for copy in copied])) == found
    assert len(found) == (3 if options is HOST else 1)


def test_what_lives_on_the_host() -> None:
    """Parameters, their state, and where gradients arrive; not the batch, nor groups."""
    graph = offloaded()
    on_host: list[str] = []
    on_device: list[str] = []
    for node in graph.graph.find_nodes(op="placeholder"):
        source = node.meta.get("fxzero_source", ("",))[0]
        kind = "parameter" if node in graph.inputs else source or node.name.rstrip("_0123456789")
        (on_host if stamp_of(node).pool is Pool.HOST else on_device).append(kind)
    assert set(on_host) == {"parameter", "state", "staging"}
    assert len(on_host) == 3 + 3 * 3 + 1
    assert set(on_device) == {"primals", "tangents", "group"}


def test_every_gradient_has_a_place_in_the_staging_area() -> None:
    """One behind the other, each on a cache line, and no more room than that."""
    graph = offloaded(options=TOGETHER)
    (copy,) = downloads(graph)
    like, staging, offsets = copy.launch.args[1:4]
    sizes = [aligned(num_bytes(grad)) for grad in copy.tensors]
    assert offsets == [sum(sizes[:i]) for i in range(len(sizes))]
    assert all(size % ALIGNMENT == 0 for size in sizes)
    assert isinstance(staging, fx.Node)
    assert num_bytes(staging) == sum(sizes)
    keys = [stamp_of(param).params for param in nodes_in(like)]
    assert keys == [(key,) for key in copy.stamp.params]


def test_without_ahead_copies_are_new_in_each_step() -> None:
    """Nothing is started for the next one."""
    graph = offloaded(options={**HOST, "offload_states": {"ahead": False}})
    assert of_role(graph, Role.AHEAD) == []
    assert {copy.launch.target for copy in uploads(graph)} == {copies.upload}
    ahead = of_role(offloaded(), Role.AHEAD)
    assert {type(node.target) for node in ahead} == {Launch}
    assert sorted(params_of(ahead)) == sorted(params_of([c.launch for c in uploads(graph)]))


def test_what_it_says_of_itself() -> None:
    """As many bytes as are held on the host, and copied each way."""
    (notes,) = [r.notes for r in compiled().records if r.name == "offload_states"]
    own = 3 * 16 * 16 * 4 // 8
    assert notes["updates"] == 3
    assert notes["up_bytes"] == notes["down_bytes"] == own
    assert notes["host_bytes"] == 3 * own + 3 * 4 + own  # and three counts of steps, and staging
    decided = compiled().context.decisions.made["offload_states"]
    assert isinstance(decided, Offloaded)
    assert decided.host_bytes == 3 * own + 3 * 4


# -- dtypes


@pytest.mark.parametrize("zero", [0, 3])
def test_what_is_computed_in_16_bits_is_copied_in_16_bits(zero: int) -> None:
    """The host casts its fp32 masters, and the device no more: half of the bytes travel."""
    graph = offloaded(zero=zero, precision="bf16")
    whole = offloaded(zero=zero)
    for copy, fp32 in zip(uploads(graph), uploads(whole), strict=True):
        assert copy.record.dtype is copy.launch.args[1] is torch.bfloat16
        assert copy.parts[0].meta["val"].dtype is torch.bfloat16
        assert copy.record.full_bytes * 2 == fp32.record.full_bytes
        assert fp32.record.dtype is torch.float32
        assert copy.tensors[0].meta["val"].dtype is torch.float32
    casts = [n for n in graph.nodes() if n.target is torch.ops.aten._to_copy.default]
    of_params = [n for n in casts if any(p in n.all_input_nodes for p in graph.inputs)]
    of_copies = [n for c in uploads(graph) for n in c.parts[0].users if n in casts]
    assert of_params == of_copies == []


def test_gathers_send_what_was_copied() -> None:
    """Nothing is made of it on the way."""
    graph = offloaded(precision="bf16")
    parts = {part for copy in uploads(graph) for part in copy.parts}
    gathers = graph.transfers(name=Lane.GATHER.value)
    assert gathers
    for gather in gathers:
        assert set(gather.tensors) <= parts
        assert gather.record.dtype is torch.bfloat16


def test_a_parameter_that_is_read_in_both_dtypes_is_copied_as_it_is() -> None:
    """One copy, and the device casts it where it did."""

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(16))

        def forward(self, x: Tensor) -> Tensor:
            low = x.bfloat16() * self.weight.bfloat16()
            return low.float().sum() + (x * self.weight).sum()

    joint = compiled_step(lambda: (Both(), (torch.ones(4, 16),)), options=HOST, **ONE_PROCESS).joint
    assert joint is not None
    (copy,) = uploads(joint)
    assert copy.record.dtype is torch.float32
    readers = {user.target for user in copy.parts[0].users}
    assert torch.ops.aten._to_copy.default in readers
    assert torch.ops.aten.mul.Tensor in readers


# -- a share


def test_half_of_it_are_the_buckets_whose_gradients_come_first() -> None:
    """The last layers' copies hide behind the backward of the first ones."""
    graph = offloaded(4, {**HOST, "offload_states": {"share": 0.5}})
    on_host = [n for n in of_role(graph, Role.UPDATE) if stamp_of(n).lane is Lane.HOST]
    assert params_of(on_host) == [("layers.3.weight",), ("layers.2.weight",)]
    others = set(of_role(graph, Role.UPDATE)) - set(on_host)
    assert {node.target for node in others} == {updates.adamw}
    homes = [n for n in graph.inputs if stamp_of(n).pool is Pool.HOST]
    assert sorted(params_of(homes)) == [("layers.2.weight",), ("layers.3.weight",)]
    assert sorted(params_of([c.launch for c in uploads(graph)])) == sorted(params_of(homes))


@pytest.mark.parametrize(("share", "count"), [(0.2, 1), (0.3, 1), (0.9, 4), (1.0, 4)])
def test_a_share_is_rounded_to_whole_buckets(share: float, count: int) -> None:
    """To the nearest number of them."""
    graph = offloaded(4, {**HOST, "offload_states": {"share": share}})
    assert len(downloads(graph)) == count


def test_a_share_of_no_bucket_warns() -> None:
    """Nothing of it would be seen."""
    with pytest.raises(Exception, match=r"share=0.1 moves nothing: .* has 128 of 512 bytes"):
        offloaded(4, {**HOST, "offload_states": {"share": 0.1}})


@pytest.mark.parametrize("share", [0.0, 0])
def test_no_share_leaves_the_graph_as_it_is(share: float) -> None:
    """A share that is given counts, and not what `memory` fills in."""
    without = compiled(options=EAGER)
    given = compiled(options={**HOST, "offload_states": {"share": share}})
    assert [r.name for r in given.records] == [r.name for r in without.records]
    assert given.joint is not None
    assert without.joint is not None
    mine, theirs = ([n.name for n in c.joint.graph.nodes] for c in (given, without) if c.joint)
    assert mine == theirs


def test_a_share_is_enough() -> None:
    """`memory` only fills it in."""
    graph = offloaded(options={**EAGER, "offload_states": {"share": 1.0}})
    assert [n.name for n in graph.graph.nodes] == [n.name for n in offloaded().graph.nodes]


# -- beside other settings


def test_clipping_makes_updates_wait_for_the_norm_and_copies_not() -> None:
    """The norm is of the device's gradients, which are on their way down meanwhile."""
    graph = offloaded(clip_grad_norm=1.0)
    norm = graph.output_values[1]
    assert isinstance(norm, fx.Node)
    for copy in downloads(graph):
        update = update_of(graph, copy.stamp.params)
        assert copy.launch < norm < update
        assert copy.wait < norm
        assert any(user.target is updates.norms for user in copy.tensors[0].users)
        assert update.args[4] is not None  # what gradients are clipped by
    for node in of_role(graph, Role.AHEAD):
        assert norm < node


def test_a_loss_scale_does_so_too() -> None:
    """An update knows by the norm whether it must not happen."""
    graph = offloaded(precision="fp16")
    assert all(node.args[5] is not None for node in of_role(graph, Role.UPDATE))
    skip = update_of(graph, downloads(graph)[0].stamp.params).args[5]
    assert isinstance(skip, fx.Node)
    assert all(copy.launch < skip for copy in downloads(graph))


def test_several_micro_batches_send_down_the_sum() -> None:
    """Of the last micro-step's backward, and no earlier one."""
    graph = offloaded(micro_batches=4)
    sums = of_role(graph, Role.ACCUMULATE)
    for copy in downloads(graph):
        assert copy.tensors[0] in sums
        assert stamp_of(copy.tensors[0]).micro_step == 3
        assert stamp_of(copy.launch).phase is Phase.OPTIMIZER


@pytest.mark.parametrize("lane", ["h2d", "d2h"])
def test_a_throttle_is_in_the_copies_and_in_their_records(lane: str) -> None:
    """What is simulated is what is done."""
    graph = offloaded(options={**HOST, "throttle": {lane: "1GB/s"}})
    for copy in (*uploads(graph), *downloads(graph)):
        rate = 1e9 if copy.stamp.lane.value == lane else 0.0
        assert copy.record.bytes_per_s == copy.launch.args[-1] == rate


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam, torch.optim.Adagrad])
def test_every_fused_optimizer(optimizer: Any) -> None:
    """Each by its own kernel."""
    kernel = updates.KERNELS[optimizer.__name__.lower()]
    graph = offloaded(optimizer=optimizer)
    assert [node.target.kernel for node in of_role(graph, Role.UPDATE)] == [kernel] * 3  # type: ignore[union-attr]


def test_what_our_own_kernel_updates_stays() -> None:
    """It runs on the device. It is said where all should go, and an error under strict."""
    options = {**HOST, "lower_kernels": {"force": "adamw"}}
    with pytest.warns(fxzero.FxZeroWarning, match=r"leaves update_layers_0, .* on the device"):
        joint = compiled_step(chain_of(2), options=options).joint
    assert joint is not None
    assert not [*downloads(joint), *uploads(joint), *of_role(joint, Role.JOIN)]
    assert not [n for n in joint.graph.nodes if stamp_of(n).pool is Pool.HOST]
    with pytest.raises(fxzero.ConfigError, match="on the device"):
        compiled_step(chain_of(2), options={**options, "strict": True})


# -- refusals


@pytest.mark.parametrize(
    "optimizer",
    [
        torch.optim.RMSprop,
        lambda p: torch.optim.AdamW(p, foreach=True),
        lambda p: torch.optim.AdamW(p, fused=False),
    ],
    ids=["RMSprop", "foreach", "not fused"],
)
def test_an_optimizer_that_runs_its_own_step_is_refused(optimizer: Any) -> None:
    """It would update at the end, in its own way."""
    with pytest.raises(fxzero.ConfigError, match=r"runs its own step.* which offload cannot take"):
        compiled_step(chain_of(2), optimizer=optimizer, options=HOST)


def test_the_ordinary_loop_is_refused() -> None:
    """Its update is none of the graph's."""
    model = torch.compile(nn.Linear(4, 4), backend="fxzero", options=HOST)
    with pytest.raises(Exception, match=r"(?s)states_host.*Train with fxzero.compile_step"):
        model(torch.ones(2, 4)).sum().backward()
    torch._dynamo.reset()


@pytest.mark.parametrize("share", [-0.1, 1.5, float("nan"), "half", True])
def test_a_share_is_a_number_from_nothing_to_all(share: Any) -> None:
    """Of another type, or out of range."""
    with pytest.raises(fxzero.ConfigError, match=r"offload_states.share=.* must be"):
        fxzero.Config.from_options({"offload_states": {"share": share}})


@pytest.mark.parametrize("memory", ["host", "", None, True])
def test_an_unknown_preset(memory: Any) -> None:
    """It says which there are."""
    with pytest.raises(fxzero.ConfigError, match=r"memory=.*states_host"):
        fxzero.Config.from_options({"memory": memory})


def test_a_plan_that_names_an_update_that_there_is_not() -> None:
    """As somebody may have written it."""
    decided = mock.patch.object(OffloadStates, "decide", return_value=Offloaded(("update_x",)))
    rule = "offloads 'update_x', and could offload: update_layers_1, update_layers_0"
    with decided, pytest.raises(fxzero.ConfigError, match=rule):
        compiled_step(chain_of(2), options=HOST)


def test_a_plan_may_name_any_of_them() -> None:
    """The first layer's alone, say, which no share would choose."""
    chosen = Offloaded(("update_layers_0",))
    with mock.patch.object(OffloadStates, "decide", return_value=chosen):
        joint = compiled_step(chain_of(2), options=HOST).joint
    assert joint is not None
    assert params_of([copy.launch for copy in downloads(joint)]) == [("layers.0.weight",)]


def test_a_throttle_of_nothing_is_said() -> None:
    """An error under strict."""
    options = {**EAGER, "throttle": {"h2d": "1GB/s"}}
    with pytest.warns(fxzero.FxZeroWarning, match=r"h2d='1GB/s'.* has no effect"):
        compiled_step(chain_of(2), options=options)
    with pytest.raises(fxzero.ConfigError, match=r"h2d='1GB/s'.* has no effect"):
        compiled_step(chain_of(2), options={**options, "strict": True})
