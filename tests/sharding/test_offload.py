"""`fxzero.shard(model, offload=True)`: where things are, and what is refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxzero
from fxzero import CaptureError, ConfigError, FxZeroError, FxZeroWarning, ShardingError
from fxzero.compiler.fitting import gradients_before
from fxzero.sharding import host, materialize
from fxzero.sharding.params import GradSync
from fxzero.sharding.shard import param_specs, replace_specs
from tests.tracing import chain, trace

EAGER = {"lower_regions": {"backend": "eager"}}
CPU = torch.device("cpu")


def model_of(**settings: Any) -> nn.Module:
    """A small model whose parameters are the host's."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    return fxzero.shard(model, offload=True, **settings)


def on_gpu(model: nn.Module) -> nn.Module:
    """The same, as if it computed on a GPU."""
    specs = param_specs(model).items()
    gpu = torch.device("cuda", 0)
    replace_specs(model, {n: dataclasses.replace(spec, device=gpu) for n, spec in specs})
    return model


def test_a_spec_says_where_it_is_computed_with() -> None:
    """None is a parameter that lives there."""
    assert {spec.device for spec in param_specs(model_of()).values()} == {CPU}
    plain = fxzero.shard(nn.Linear(2, 2), param_dtype=torch.bfloat16)
    assert {spec.device for spec in param_specs(plain).values()} == {None}


def test_a_parameter_keeps_its_memory_where_that_is_the_hosts() -> None:
    """An optimizer, a closure or a view that holds one goes on holding it."""
    model = nn.Linear(4, 2)
    parameter, address = model.weight, model.weight.data_ptr()
    fxzero.shard(model, offload=True)
    assert model._parameters["weight"] is parameter
    assert parameter.data_ptr() == address


def test_an_uncompiled_forward_computes_with_a_copy() -> None:
    """What it reads is no view of the parameter; what is read outside is the parameter."""
    seen: list[Tensor] = []

    class Looks(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(self.weight)
            return super().forward(x)

    model = fxzero.shard(Looks(4, 2), offload=True)
    model(torch.ones(1, 4)).sum().backward()
    assert seen[0].data_ptr() != model.weight.data_ptr()
    assert torch.equal(model.weight.grad, torch.ones(2, 4))


def test_meta_parameters_are_filled_in_the_hosts_memory() -> None:
    """They never are on the device; buffers are nowhere else."""

    class Filled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(3, device="meta"))
            self.register_buffer("table", torch.empty(3, dtype=torch.int64, device="meta"))

        def reset_parameters(self) -> None:
            self.weight.fill_(1.0)

    model = Filled()
    # A device that holds nothing stands for one with memory of its own.
    materialize.module(model, "", model, torch.device("meta"), {}, host.HOST)
    assert model.weight.tolist() == [1.0] * 3
    assert model.table.is_meta


def test_a_meta_model_trains() -> None:
    """What is ignored is filled too, where the model computes."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8))
    ignored = model[1].weight
    fxzero.shard(model, 3, offload=True, ignored=[ignored])
    compiled = torch.compile(model, backend="fxzero", options=EAGER)
    compiled(torch.randn(6, 4)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    assert sorted(param_specs(model)) == ["0.bias", "0.weight", "1.bias"]


def test_pinned_memory_that_is_refused_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies go on from pages that the system may move."""

    def refuse(tensor: Tensor) -> Tensor:
        raise RuntimeError("cannot allocate\nbacktrace")

    monkeypatch.setattr(Tensor, "pin_memory", refuse)
    host._warn_of_pages.cache_clear()
    tensor = torch.ones(3)
    with pytest.warns(FxZeroWarning, match=r"no pinned memory .*\(cannot allocate\).*ulimit -l"):
        assert host.at_home(tensor, torch.device("cuda", 0)) is tensor
    assert host.at_home(tensor, torch.device("cuda", 0)) is tensor
    host._warn_of_pages.cache_clear()


@pytest.mark.skipif(torch.cuda.is_available(), reason="here the system gives such memory")
def test_memory_for_a_copy_is_there_whether_it_can_be_pinned_or_not() -> None:
    """Copies to and from it are slower, and right: CUDA waits for them."""
    tensor = torch.ones(2, 3).t()
    host._warn_of_pages.cache_clear()
    with pytest.warns(FxZeroWarning, match=r"no pinned memory .*ulimit -l"):
        made = host.pinned_like(tensor, torch.bfloat16)
    again = host.pinned_like(tensor)
    for found, dtype in ((made, torch.bfloat16), (again, torch.float32)):
        assert (found.shape, found.stride(), found.dtype) == ((3, 2), (1, 3), dtype)
    host._warn_of_pages.cache_clear()


def test_fakes_know_both_devices() -> None:
    """A shard on the host makes a full value on the device, and its gradient the way back."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    model = on_gpu(model_of(param_dtype=torch.bfloat16))
    spec = param_specs(model)["0.weight"]
    with FakeTensorMode():
        shard = torch.empty(spec.shape)
        full = torch.ops.fxzero.unshard(shard, spec.key, GradSync.REDUCE.value)
        grad = torch.ops.fxzero.reshard_grad(full, spec.key, GradSync.REDUCE.value)
    assert (full.device, full.dtype) == (torch.device("cuda", 0), torch.bfloat16)
    assert (grad.device, grad.dtype) == (CPU, torch.float32)


def test_what_was_copied_is_reported() -> None:
    """By bytes that went each way, beside what was communicated."""
    model = model_of()
    num_bytes = sum(p.nbytes for p in model.parameters())
    compiled = torch.compile(model, backend="fxzero", options=EAGER)
    compiled(torch.ones(3, 4)).sum().backward()
    traffic = fxzero.report(model)
    assert traffic.downloaded_bytes == num_bytes
    assert num_bytes <= traffic.uploaded_bytes <= 2 * num_bytes
    assert traffic.num_gathers == 0


def test_lanes_can_be_held_back() -> None:
    """`throttle` has an effect, and without offload it says that it has none."""
    options = {**EAGER, "throttle": {"h2d": "1GB/s"}}
    torch.compile(model_of(), backend="fxzero", options=options)(torch.ones(3, 4))
    plain = fxzero.shard(nn.Linear(4, 2))
    with pytest.warns(FxZeroWarning, match="nothing is copied to or from the host"):
        torch.compile(plain, backend="fxzero", options=options)(torch.ones(3, 4))


def test_gradients_of_before_are_not_in_a_budget() -> None:
    """They wait on the host for those to come."""
    graphs = (trace(chain(2), zero=3, offload=offload) for offload in (True, False))
    assert [gradients_before(graph) for graph in graphs] == [0, 2 * 8 * 4]


def step_of(model: nn.Module, **options: Any) -> Any:
    """A whole step of it."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return fxzero.compile_step(model, optimizer, nn.functional.mse_loss, options=options)


def test_a_whole_step_holds_all_on_the_host() -> None:
    """Presets that hold more there stay."""
    assert step_of(model_of())._config.memory == "all_host"
    assert step_of(model_of(), memory="l2l")._config.memory == "l2l"
    assert step_of(model_of(), memory="states_host")._config.memory == "states_host"
    assert step_of(on_gpu(model_of()))._config.memory == "all_host"


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"memory": "states_host"},
        {"memory": "states_host", "offload_states": {"update": "device"}},
    ],
    ids=str,
)
def test_whole_steps_have_the_bits_of_a_model_that_is_on_the_device(
    options: dict[str, Any], frozen: bool
) -> None:
    """Parameters that nobody updates are copied, too."""
    left = []
    for offload in (True, False):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        model[0].requires_grad_(not frozen)
        fxzero.shard(model, offload=offload)
        optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=0.1)
        own = {**EAGER, **(options if offload else {})}
        step = fxzero.compile_step(model, optimizer, nn.functional.mse_loss, options=own)
        losses = []
        for i in range(3):
            torch.manual_seed(i)
            losses.append(step(torch.randn(6, 4), torch.randn(6, 2)).loss)
        state = [v for one in optimizer.state.values() for v in one.values()]
        left.append([t.detach().clone() for t in (*losses, *model.parameters(), *state)])
    assert all(map(torch.equal, *left))


class Writes(nn.Linear):
    """Changes a parameter in its forward."""

    def forward(self, x: Tensor) -> Tensor:
        """(B, 4) → (B, 2)."""
        with torch.no_grad():
            self.weight.mul_(0.5)
        return super().forward(x)


def forward(model: nn.Module, *, compiled: bool) -> None:
    """Run a forward that writes, at stage 0."""
    fxzero.shard(model, offload=True)
    if compiled:
        model = torch.compile(model, backend="fxzero", options=EAGER)  # type: ignore[assignment]
    model(torch.ones(1, 4))


class WritesAround(nn.Linear):
    """Changes it around the property that reads it."""

    def forward(self, x: Tensor) -> Tensor:
        """(B, 4) → (B, 2)."""
        with torch.no_grad():
            self._parameters["weight"].mul_(0.5)
        return super().forward(x)


def without_a_group_for_the_host() -> None:
    """A mesh whose group carries the device's tensors alone."""

    class Mesh:
        ndim = 1
        device_type = "cuda"

        def get_group(self, axis: int) -> Any:
            return type("Group", (), {"group_name": "7"})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host, "backend_of", lambda name, device: "nccl")
        host.refuse_without_host_group(Mesh())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("use", "error", "words"),
    [
        (lambda: fxzero.shard(nn.Linear(2, 2), offload="cpu"), ShardingError, "neither True nor"),  # type: ignore[arg-type]
        (lambda: model_of().double(), ShardingError, "offload=True.*leave the model where it is"),
        (
            lambda: forward(Writes(4, 2), compiled=False),
            ShardingError,
            "changes weight inside of a forward",
        ),
        (lambda: forward(Writes(4, 2), compiled=True), FxZeroError, "changes? .*weight"),
        (
            lambda: forward(WritesAround(4, 2), compiled=True),
            CaptureError,
            r"changes the parameter weight at .* shard\(offload=True\) keeps in the host's memory",
        ),
        (
            lambda: step_of(model_of(), offload_params={"share": 0.0}),
            ConfigError,
            "offload_params.share=0 holds parameters on the device",
        ),
        (
            lambda: step_of(model_of(), offload_states={"share": 0.5}),
            ConfigError,
            "offload_states.share=0.5 holds parameters on the device",
        ),
        (without_a_group_for_the_host, ShardingError, "cpu:gloo,cuda:nccl"),
    ],
)
def test_refuses(use: Callable[[], Any], error: type[Exception], words: str) -> None:
    """Each with a sentence that says what to do."""
    torch._dynamo.reset()
    with pytest.raises(error, match=words):
        use()


def test_the_loops_refusal_of_presets_names_it() -> None:
    """`memory` is of whole steps; the loop has its own way."""
    compiled = torch.compile(nn.Linear(2, 2), backend="fxzero", options={"memory": "all_host"})
    with pytest.raises(Exception, match=r"fxzero.shard\(model, offload=True\)"):
        compiled(torch.ones(1, 2))
