"""fxzero's operators: eager, fake and autograd kernels, in a world of one."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from fxzero import CaptureError
from fxzero.ranks.groups import Group
from fxzero.sharding.layout import Axis, AxisRole, Layout
from fxzero.sharding.ops import pad_rows
from fxzero.sharding.params import GradSync, ModelState, ParamSpec, register

_ops = torch.ops.fxzero
_REDUCE = GradSync.REDUCE.value


@pytest.fixture(scope="module")
def world() -> Iterator[Group]:
    """A gloo group of this process alone, whose collectives are real."""
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield Group.of(dist.group.WORLD)
    dist.destroy_process_group()


def spec_of(world: Group, *shape: int, sharded: bool = True) -> ParamSpec:
    """A float64 parameter that is computed with and reduced in float32."""
    return register(
        ParamSpec(
            name="weight",
            key=f"test/{shape}/{sharded}",
            state=ModelState(zero=3 if sharded else 0, number=0),
            shape=shape,
            dtype=torch.float64,
            compute_dtype=torch.float32,
            reduce_dtype=torch.float32,
            layout=Layout((Axis(AxisRole.SHARD if sharded else AxisRole.REPLICATE, world),)),
        )
    )


@pytest.fixture(params=[True, False], ids=["sharded", "replicated"])
def spec(world: Group, request: pytest.FixtureRequest) -> ParamSpec:
    """Both layouts."""
    return spec_of(world, 4, 3, sharded=request.param)


def test_unshard(spec: ParamSpec) -> None:
    """The full parameter in its compute dtype, in memory of its own."""
    shard = torch.randn(4, 3, dtype=torch.float64)
    full = _ops.unshard(shard, spec.key, _REDUCE)
    assert torch.equal(full, shard.float())
    same = replace(spec, compute_dtype=torch.float64, key=spec.key + "/64")
    register(same)
    full = _ops.unshard(shard, same.key, _REDUCE)
    assert torch.equal(full, shard)
    assert full.data_ptr() != shard.data_ptr(), "an operator's output may not be its input"


def test_reshard_grad(spec: ParamSpec) -> None:
    """The mean over the ranks, in the masters' dtype, and the gradient itself stays."""
    grad = torch.randn(4, 3)
    before = grad.clone()
    part = _ops.reshard_grad(grad, spec.key, _REDUCE)
    assert part.dtype is torch.float64
    assert torch.equal(part, grad.double())
    assert torch.equal(grad, before)


def test_autograd(spec: ParamSpec) -> None:
    """The backward of unshard is reshard_grad."""
    shard = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    factor = torch.randn(4, 3)
    (_ops.unshard(shard, spec.key, _REDUCE) * factor).sum().backward()
    assert shard.grad is not None
    assert torch.equal(shard.grad, factor.double())


@pytest.mark.parametrize("name", ["unshard", "reshard_grad", "keep_grad", "add_kept_grad"])
def test_fake_kernels_agree(spec: ParamSpec, name: str) -> None:
    """Shapes, dtypes and strides, as the eager kernel gives them."""
    is_unshard = name == "unshard"
    real = torch.randn(4, 3, dtype=torch.float64 if is_unshard else torch.float32)
    extra = (_REDUCE,) if "shard" in name else ()
    op = getattr(_ops, name)
    expected = op(real, spec.key, *extra)
    spec.state.kept.clear()
    with FakeTensorMode() as mode:
        actual = op(mode.from_tensor(real), spec.key, *extra)
    assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype)
    assert actual.stride() == expected.stride()


@pytest.mark.parametrize(
    "tests", [("test_schema", "test_faketensor", "test_autograd_registration")]
)
def test_opcheck(spec: ParamSpec, tests: tuple[str, ...]) -> None:
    """torch's own checks of an operator: its schema tells the truth, its fake kernel too."""
    shard = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    arguments = (shard, spec.key, _REDUCE)
    torch.library.opcheck(_ops.unshard.default, arguments, test_utils=tests)
    grad = (torch.randn(4, 3), spec.key, _REDUCE)
    torch.library.opcheck(_ops.reshard_grad.default, grad, test_utils=tests[:2])


def test_no_sync_keeps_and_gives_back(spec: ParamSpec) -> None:
    """Two kept gradients and a third are reduced as one."""
    first, second, third = (torch.randn(4, 3) for _ in range(3))
    spec.state.sync = GradSync.ACCUMULATE.value
    for grad in (first, second):
        zero = _ops.reshard_grad(grad, spec.key, GradSync.ACCUMULATE.value)
        assert torch.equal(zero, torch.zeros(4, 3, dtype=torch.float64))
    kept = spec.state.kept[spec.key]
    assert kept.grad.dtype is torch.float64
    assert torch.equal(kept.grad, first.double() + second.double())
    spec.state.sync = GradSync.REDUCE_ACCUMULATED.value
    total = _ops.add_kept_grad(third, spec.key)
    assert torch.allclose(total.double(), (first + second + third).double())
    assert spec.state.kept == {}
    assert spec.state.sync == _REDUCE, "what was kept is reduced: back to normal"


@pytest.mark.parametrize("forget", [False, True])
def test_zero_grad_forgets(spec: ParamSpec, forget: bool) -> None:
    """A gradient of None says that the user dropped what was kept."""
    parameter = torch.nn.Parameter(torch.zeros(4, 3, dtype=torch.float64))
    watched = register(replace(spec, key=spec.key + "/watched", parameter=weakref.ref(parameter)))
    first, second = torch.randn(4, 3), torch.randn(4, 3)

    def backward(factor: torch.Tensor, sync: GradSync) -> None:
        full = _ops.unshard(parameter, watched.key, sync.value)
        (full * factor).sum().backward()

    backward(first, GradSync.ACCUMULATE)
    assert parameter.grad is not None
    assert not parameter.grad.any()
    if forget:
        parameter.grad = None
    backward(second, GradSync.REDUCE_ACCUMULATED)
    expected = second.double() if forget else first.double() + second.double()
    torch.testing.assert_close(parameter.grad, expected, rtol=0, atol=1e-6)
    assert watched.state.kept == {}


def test_keeping_copies(spec: ParamSpec) -> None:
    """Autograd may use the gradient's memory again."""
    same = register(replace(spec, key=spec.key + "/copy", dtype=torch.float32))
    grad = torch.ones(4, 3)
    _ops.keep_grad(grad, same.key)
    grad.zero_()
    assert torch.equal(same.state.kept.pop(same.key).grad, torch.ones(4, 3))


def test_release_frees() -> None:
    """Memory ends; shape and strides stay."""
    tensors = [torch.ones(4), torch.ones(5)]
    _ops.release(tensors)
    assert [t.untyped_storage().nbytes() for t in tensors] == [0, 0]


@pytest.mark.parametrize("retain", [False, True])
def test_release_saved_obeys_retain_graph(retain: bool) -> None:
    """Who asked for the graph again needs what it saved."""

    class Releasing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor, saved: torch.Tensor) -> torch.Tensor:
            ctx.saved = saved  # type: ignore[attr-defined]
            return x * 2

        @staticmethod
        def backward(ctx: object, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
            _ops.release_saved([ctx.saved])  # type: ignore[attr-defined]
            return grad * 2, None

    saved = torch.ones(4)
    x = torch.ones(4, requires_grad=True)
    Releasing.apply(x, saved).sum().backward(retain_graph=retain)
    is_there = saved.untyped_storage().nbytes() > 0  # pytest would print freed memory
    assert is_there is retain


@pytest.mark.parametrize(("rows", "expected"), [(3, 3), (5, 5)])
def test_pad_rows(rows: int, expected: int) -> None:
    """Zeros, and no copy where there is nothing to add."""
    tensor = torch.ones(3, 2)
    padded = pad_rows(tensor, rows)
    assert padded.shape == (expected, 2)
    assert torch.equal(padded[:3], tensor)
    assert not padded[3:].any()
    assert (padded is tensor) == (rows == 3)


def test_a_parameter_that_is_gone() -> None:
    """The message says why it may be."""
    with pytest.raises(CaptureError, match="no sharded parameter has the key 'nobody/w'"):
        _ops.unshard(torch.ones(2), "nobody/w", _REDUCE)
