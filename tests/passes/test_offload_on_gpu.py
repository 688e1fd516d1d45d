"""Graphs of whole steps on a device that is not the host's: where everything is.

A device that holds nothing, ``meta``, stands for a GPU: fake tensors need no more, and a build
without CUDA has no engine for its gradients.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import init_device_mesh

import fxzero
from fxzero import ConfigError, FxZeroWarning, _compat
from fxzero.graph import Lane, Role, StepGraph
from fxzero.graph.stamps import stamp_of
from fxzero.graph.verify import verify
from fxzero.inspect.capture import fake_ranks
from fxzero.passes import Fact
from fxzero.passes.parameter_copies import snapshot_bytes
from fxzero.runtime import copies
from fxzero.runtime.ahead import Take
from fxzero.sharding import materialize
from fxzero.sharding.params import ParamSpec
from fxzero.sharding.shard import param_specs, replace_specs
from fxzero.transfer import Pool
from tests.graph.test_verify import assert_refused
from tests.passes.test_offload_activations import QUICK, VALUES, costing
from tests.stepping import EAGER
from tests.tracing import observed, of_role

CPU, GPU = torch.device("cpu"), torch.device("meta")
_ALL = frozenset(Fact) - {Fact.CUT}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, momentum=0.9, fused=True),
    "adagrad": torch.optim.Adagrad,
    "slow": lambda p: torch.optim.AdamW(p),
}


@pytest.fixture(autouse=True)
def _a_gpu_for_optimizers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch asks whether fused kernels know a device; they do not know this one."""
    module = sys.modules["torch.optim.optimizer"]  # torch.optim deletes it from itself
    kinds = ["cpu", GPU.type]
    monkeypatch.setattr(module, "_get_fused_kernels_supported_devices", lambda: list(kinds))


@contextlib.contextmanager
def on_gpu(
    *,
    offload: bool,
    zero: int = 0,
    world_size: int = 1,
    frozen: bool = False,
    ignored: bool = False,
) -> Iterator[nn.Module]:
    """A small model that computes there, and whose parameters are the host's, or not."""
    torch._dynamo.reset()
    ranks = fake_ranks(world_size) if world_size > 1 else contextlib.nullcontext()
    with ranks, pytest.MonkeyPatch.context() as patch:
        mesh = init_device_mesh("cpu", (world_size,)) if world_size > 1 else None
        patch.setattr(materialize, "module", lambda *_: None)  # meta is no device to fill
        with _compat.fake_tensors(), torch.device(CPU if offload else GPU):
            model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Linear(16, 8))
            model[0].requires_grad_(not frozen)
            alone = [nn.Parameter(torch.empty(16, device=GPU))] if ignored else []
            model[0].bias = alone[0] if ignored else model[0].bias
            fxzero.shard(model, zero, mesh=mesh, offload=offload, ignored=alone)
            if offload:
                specs = param_specs(model).items()
                replace_specs(model, {n: dataclasses.replace(s, device=GPU) for n, s in specs})
            yield model
    torch._dynamo.reset()


def graph_of(
    options: dict[str, Any],
    optimizer: str = "adamw",
    *,
    offload: bool = True,
    zero: int = 0,
    world_size: int = 1,
    frozen: bool = False,
    ignored: bool = False,
    **rest: Any,
) -> tuple[StepGraph, torch.optim.Optimizer]:
    """The scheduled graph of a step, and what trains."""
    found: list[Any] = []

    def keep(compilation: Any) -> None:
        compilation.keep_graphs = True
        found.append(compilation)

    sharded = {"zero": zero, "world_size": world_size, "frozen": frozen, "ignored": ignored}
    with on_gpu(offload=offload, **sharded) as model, observed(keep):
        made = OPTIMIZERS[optimizer](model.parameters())
        mse = nn.functional.mse_loss
        step = fxzero.compile_step(model, made, mse, options={**EAGER, **options}, **rest)
        with contextlib.suppress(NotImplementedError):  # a fused kernel has no fake of its own
            step(torch.empty(8, 8, device=GPU), torch.empty(8, 8, device=GPU))
    (compilation,) = found
    joint = compilation.joint
    assert isinstance(joint, StepGraph)
    return joint, made


def values(node: fx.Node) -> list[Tensor]:
    """The tensors that a node is."""
    value = node.meta.get("val")
    every = value if isinstance(value, (list, tuple)) else [value]
    return [tensor for tensor in every if isinstance(tensor, Tensor)]


def devices(nodes: Any) -> set[torch.device]:
    """Where some nodes' tensors are."""
    return {tensor.device for node in nodes for tensor in values(node)}


def held_by(memory: str) -> dict[str, Any]:
    """Settings of a preset, with ``, device`` updated there."""
    preset, _, update = memory.partition(", ")
    return {"memory": preset, **({"offload_states": {"update": update}} if update else {})}


PRESETS = ["states_host", "states_host, device", "all_host", "all_host, device", "l2l", "infinity"]


@pytest.mark.parametrize(
    ("memory", "micro_batches", "zero"),
    [*((memory, 1, 0) for memory in PRESETS), ("all_host", 4, 3), ("states_host", 4, 2)],
)
def test_every_copy_goes_where_it_should(memory: str, micro_batches: int, zero: int) -> None:
    """Of parameters that `shard` keeps on the host. `verify` looks at each value of each pool."""
    sharded = {"zero": zero, "world_size": 2} if zero else {}
    with costing(QUICK):
        graph, _ = graph_of({**held_by(memory), **VALUES}, micro_batches=micro_batches, **sharded)
    assert graph.device == GPU
    up = [t for t in graph.transfers() if t.is_copy and t.record.target is Pool.DEVICE]
    down = [t for t in graph.transfers() if t.is_copy and t.stamp.lane is Lane.D2H]
    assert up
    assert down
    for copy in up:
        assert copy.launch.args[2] == GPU
        assert (devices(copy.tensors), devices(copy.parts)) == ({CPU}, {GPU})
    for copy in down:
        assert devices(copy.tensors) == {GPU}
        assert devices([copy.launch]) == {CPU}
    computes = [node for node in graph.nodes() if stamp_of(node).lane is Lane.COMPUTE]
    read = {source for node in computes for source in node.all_input_nodes}
    large = {s for s in read if any(v.dim() for v in values(s))}
    assert devices(large) == {GPU}
    verify(graph, _ALL, after="join_copies")


@pytest.mark.parametrize("memory", ["states_host, device", "all_host, device"])
def test_an_update_on_the_device_has_all_of_its_arguments_there(memory: str) -> None:
    """Step counts too, which torch makes where parameters are."""
    graph, made = graph_of(held_by(memory), clip_grad_norm=1.0)
    for update in of_role(graph, Role.UPDATE):
        assert devices(update.all_input_nodes) == {GPU}
    assert {own["step"].device for own in made.state.values()} == {GPU}


def test_an_optimizer_without_a_fused_kernel_there() -> None:
    """Torch has one of Adagrad on the host alone."""
    with pytest.raises(Exception, match=r"no fused Adagrad on meta.*one on the host"):
        graph_of(held_by("states_host, device"), "adagrad")


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_state_streams_where_parameters_stay_on_the_device(optimizer: str) -> None:
    """It is made on the host; step counts, a number each, are the device's."""
    graph, made = graph_of(held_by("states_host, device"), optimizer, offload=False)
    inputs = graph.graph.find_nodes(op="placeholder")
    state = [n for n in inputs if n.meta.get("fxzero_source", ("",))[0] == "state"]
    homes = [n for n in state if n.meta["fxzero_source"][2] != "step"]
    assert devices(homes) == {CPU}
    assert {stamp_of(n).pool for n in homes} == {Pool.HOST}
    assert devices(set(state) - set(homes)) <= {GPU}
    assert devices(graph.inputs) == {GPU}
    held = {(k, v.device) for own in made.state.values() for k, v in own.items()}
    assert held == {
        (name, GPU if name == "step" else CPU)
        for own in made.state.values()
        for name in own
    }  # fmt: skip
    for update in of_role(graph, Role.UPDATE):
        assert devices(update.all_input_nodes) == {GPU}
    verify(graph, _ALL, after="join_copies")


def test_a_part_of_the_state_stays_with_its_parameters() -> None:
    """What is not offloaded is the device's, wherever it was made."""
    options = {"offload_states": {"share": 0.5, "update": "device"}}
    graph, _ = graph_of(options, offload=False)
    inputs = graph.graph.find_nodes(op="placeholder")
    state = [n for n in inputs if n.meta.get("fxzero_source", ("",))[0] == "state"]
    pools = {stamp_of(n).pool for n in state if n.meta["fxzero_source"][2] != "step"}
    assert pools == {Pool.HOST, Pool.DEVICE}
    assert devices(n for n in state if stamp_of(n).pool is Pool.DEVICE) == {GPU}


@pytest.mark.parametrize("delay", [0, 1])
def test_numbers_that_an_update_reads_are_on_the_host(delay: int) -> None:
    """What gradients are scaled by is copied down, once, for all of them."""
    options = {"memory": "states_host", "offload_states": {"delay": delay}}
    graph, _ = graph_of(options, clip_grad_norm=1.0)
    found = [node for node in graph.nodes() if node.target is copies.send_home]
    (copy,) = (t for t in graph.transfers(name="d2h") if t.launch in found)
    assert not copy.of_parameters
    updates = of_role(graph, Role.UPDATE)
    assert len(updates) == 3
    for update in updates:
        assert update.args[4] is copy.parts[0]
        assert devices(update.all_input_nodes) == {CPU}
        assert copy.wait < update
    assert copy.wait.target is copies.arrived


def test_copies_stay_on_the_device_if_that_is_asked_for() -> None:
    """``states_host`` beside ``offload=True``; by default parameters are brought."""
    targets = {}
    for memory in ("states_host", None):
        graph, _ = graph_of({"memory": memory} if memory else {})
        targets[memory] = {type(copy.launch.target) for copy in graph.transfers(name="h2d")}
    assert targets["states_host"] == {Take}
    assert Take not in targets[None]


def test_what_was_sent_is_held_on_the_host_too() -> None:
    """Beside parameters, their state and their gradients: what the device's copies are compared
    with."""
    notes = {}
    for ahead in (True, False):
        graph, _ = graph_of({"memory": "states_host", "offload_states": {"ahead": ahead}})
        notes[ahead] = snapshot_bytes(graph)
    assert notes == {True: 4 * (8 * 16 + 16 + 16 * 16 + 16 + 16 * 8 + 8), False: 0}


@pytest.mark.parametrize("memory", ["states_host", "all_host"])
def test_parameters_that_nobody_updates_are_copied_too(memory: str) -> None:
    """A layer's together, and new in each step."""
    graph, _ = graph_of({"memory": memory}, frozen=True)
    keys = {key.partition("/")[2]: node for node, key in graph.inputs.items()}
    frozen = [keys["0.weight"], keys["0.bias"]]
    assert {stamp_of(node).pool for node in frozen} == {Pool.HOST}
    for node in frozen:
        (launch,) = node.users
        assert launch.target is copies.upload
        assert set(frozen) == set(launch.all_input_nodes)
    verify(graph, _ALL, after="join_copies")


def test_what_shard_ignores_is_updated_where_it_is() -> None:
    """Beside parameters of its layer, in an update of its own: no kernel takes both."""
    with pytest.warns(FxZeroWarning, match=r"leaves update_1 on the device.*ignored="):
        graph, _ = graph_of({"memory": "states_host"}, ignored=True)
    for update in of_role(graph, Role.UPDATE):
        on_host = isinstance(update.target, copies.HostUpdate)
        assert devices(update.all_input_nodes) == {CPU if on_host else GPU}
    verify(graph, _ALL, after="join_copies")


def test_masters_stay_where_parameters_are() -> None:
    """Only `shard` moves a parameter: that less is moved than was asked for is said."""
    with pytest.warns(FxZeroWarning, match=r"leaves 6 fp32 masters on meta.*offload=True"):
        graph, _ = graph_of(held_by("states_host, device"), offload=False, precision="bf16")
    assert devices(graph.inputs) == {GPU}


def test_a_value_of_the_host_that_is_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or a copy that goes nowhere: `verify` says which."""
    graph, _ = graph_of({"memory": "states_host"})
    copy = graph.transfers(name="d2h")[0]
    there = copy.launch.meta["val"]
    copy.launch.meta["val"] = [tensor.to(GPU) for tensor in there]
    rule = f"{copy.launch.name} is in pool host and a tensor of meta"
    assert_refused(graph, rule, copy.launch, "Say where a copy goes")
    copy.launch.meta["val"] = there
    up = graph.transfers(name="h2d")[0]
    up.launch.meta["val"] = [node.meta["val"] for node in up.tensors]
    rule = f"{up.launch.name} is in pool device and a tensor of cpu"
    assert_refused(graph, rule, up.launch, "Say where a copy goes")


def test_a_cast_of_what_a_node_has_made() -> None:
    """The host would cast it before it is there."""
    with costing(QUICK):
        graph, _ = graph_of({"memory": "all_host", **VALUES})
    copy = next(t for t in graph.transfers(name="h2d") if t.tensors[0].op != "placeholder")
    copy.launch.update_arg(1, torch.bfloat16)
    record = dataclasses.replace(copy.record, dtype=torch.bfloat16)
    copy.launch.meta["fxzero"] = copy.stamp.but(transfer=record)
    assert_refused(graph, "casts .* on the host", copy.launch, "Cast what lives on the host")


@pytest.mark.parametrize(
    ("options", "settings", "says"),
    [
        (
            {"memory": "states_host"},
            {"offload": False},
            r"the parameters are on meta.*fxzero.shard\(model, offload=True\)",
        ),
        (
            {"memory": "all_host", "offload_states": {"update": "device"}},
            {"offload": False},
            r"the parameters are on meta.*brought where it is used.*offload=True",
        ),
        (
            held_by("states_host, device"),
            {"offload": False, "optimizer": "slow"},
            "on a GPU with fused=True",
        ),
    ],
)
def test_refuses(options: dict[str, Any], settings: dict[str, Any], says: str) -> None:
    """With the line that takes it."""
    with pytest.raises(Exception, match=says) as told:
        graph_of(options, **settings)
    assert "ConfigError" in repr(told.value) or isinstance(told.value, ConfigError)


def test_a_gpu_is_where_specs_say() -> None:
    """Or parameters, if specs say nothing."""
    with on_gpu(offload=True) as model:
        found: list[ParamSpec] = list(param_specs(model).values())
        assert {spec.device for spec in found} == {GPU}
        assert {p.device for p in model.parameters()} == {CPU}
    with on_gpu(offload=False) as model:
        assert {spec.device for spec in param_specs(model).values()} == {None}
        assert {p.device for p in model.parameters()} == {GPU}
