"""What a compiled graph takes in place of DTensor parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.distributed.tensor import DTensor, Shard

import fxzero
from fxzero._compat import init_fake_process_group, local_tensor
from fxzero.capture.shard_inputs import take_local_tensors, with_parameters


@pytest.fixture
def two_ranks() -> Iterator[None]:
    """Rank 0 of two, whose collectives move nothing."""
    init_fake_process_group(2)
    yield
    dist.destroy_process_group()


class Taken:
    """A Dynamo backend that runs the graph as it is, behind the inputs under test."""

    positions: tuple[int, ...] = ()
    kinds: Sequence[type] = ()

    def __call__(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Note what the graph takes."""
        taken, self.positions = take_local_tensors(module, inputs)

        def check(*values: Any) -> Any:
            self.kinds = [type(value) for value in values]
            assert [v.shape for v in values] == [t.shape for t in taken]
            return module(*values)

        return with_parameters(check, self.positions)


def linear(*, frozen: bool = False) -> nn.Module:
    """A sharded layer of weight [4, 3] and bias [4]."""
    layer = nn.Linear(3, 4)
    layer.weight.requires_grad_(not frozen)
    return fxzero.shard(layer, zero=3)


@pytest.mark.usefixtures("two_ranks")
@pytest.mark.parametrize("frozen", [False, True])
def test_the_graph_takes_local_tensors(frozen: bool) -> None:
    """And gradients come back as DTensors of the parameters' layout."""
    layer, taken = linear(frozen=frozen), Taken()
    output = torch.compile(layer, backend=taken)(torch.ones(2, 3))
    output.sum().backward()
    assert len(taken.positions) == 2
    assert not any(issubclass(kind, DTensor) for kind in taken.kinds)
    for name, parameter in layer.named_parameters():
        grad = parameter.grad
        if not parameter.requires_grad:
            assert grad is None
            continue
        assert isinstance(grad, DTensor), name
        assert grad.placements == (Shard(0),)
        assert grad.shape == parameter.shape
        assert local_tensor(grad).shape == local_tensor(parameter).shape


@pytest.mark.usefixtures("two_ranks")
def test_without_gradients() -> None:
    """Nothing is recorded under no_grad."""
    layer, taken = linear(), Taken()
    with torch.no_grad():
        assert torch.compile(layer, backend=taken)(torch.ones(2, 3)).grad_fn is None
    assert len(taken.positions) == 2


@pytest.mark.usefixtures("two_ranks")
def test_a_dtensor_that_is_read_otherwise_stays() -> None:
    """Only parameters that the graph reads by ``to_local()`` alone are replaced."""

    class AlsoRaw(nn.Linear):
        other: nn.Parameter

        def forward(self, x: Tensor) -> Tensor:
            raw = self.other
            return super().forward(x) * raw.size(0) + (raw * 2).to_local().sum()  # type: ignore[operator]

    layer, taken = fxzero.shard(AlsoRaw(3, 4), zero=3), Taken()
    weight = layer._parameters["weight"]
    assert isinstance(weight, DTensor)
    mine = weight.to_local().detach().clone()
    other = DTensor.from_local(mine, weight.device_mesh, weight.placements)
    layer.other = nn.Parameter(other)  # a DTensor that shard has not seen
    torch.compile(layer, backend=taken)(torch.ones(2, 3)).sum().backward()
    assert len(taken.positions) == 2, "weight and bias"
    assert isinstance(layer.other.grad, DTensor)


@pytest.mark.usefixtures("two_ranks")
@pytest.mark.parametrize("kernels", ["none", "copies", "fused", "foreach", "for-loop"])
@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD])
def test_a_parameter_that_changed_since_forward(optimizer: Any, kernels: str) -> None:
    """Backward would gather the new one: an error, as eager PyTorch has it, whatever wrote."""
    torch._dynamo.reset()
    layer = linear()
    output = torch.compile(layer, backend=Taken())(torch.ones(2, 3))
    parameters = list(layer.parameters())
    if kernels == "none":
        with torch.no_grad():
            parameters[0].mul_(2)
    elif kernels == "copies":
        with torch.no_grad():
            torch._foreach_copy_(parameters, [parameter + 1 for parameter in parameters])
    else:
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        before = [parameter.to_local().clone() for parameter in parameters]
        optimizer(parameters, lr=0.5, fused=kernels == "fused", foreach=kernels == "foreach").step()
        for parameter, old in zip(parameters, before, strict=True):
            assert not torch.equal(parameter.to_local(), old)
            parameter.grad = None
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()
    assert all(parameter.grad is None for parameter in layer.parameters())
