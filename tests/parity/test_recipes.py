"""Recipes that people write around a model: penalties, clipping, optimizers of their own."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrizations, prune

import fxzero
from tests.parity.harness import Pools
from tests.parity.sharded import TIGHT, on_two_ranks
from tests.parity.test_refusals import OPTIONS, rows, small
from tests.parity.training import assert_same, full_parameters
from tests.tiers import exhaustive

Recipe = Callable[[nn.Module, Any, Tensor], None]
"""Trains a model a little: the model, what is called for its forward, and a batch."""

RECIPES: dict[str, Recipe] = {}
REFUSED: dict[str, str] = {}
"""What is said of recipes that are refused, by name, or by name, door and stage."""


def recipe(refused: str = "", **where: str) -> Callable[[Recipe], Recipe]:
    """Register one."""

    def register(function: Recipe) -> Recipe:
        name = function.__name__
        RECIPES[name] = function
        if refused:
            REFUSED[name] = refused
        REFUSED.update({f"{name} {place.replace('_', ' ')}": s for place, s in where.items() if s})
        return function

    return register


def step(model: nn.Module) -> None:
    """One step of gradient descent."""
    optim.SGD(model.parameters(), 0.1).step()
    model.zero_grad()


@recipe()
def keep_near_old_weights(model: nn.Module, forward: Any, x: Tensor) -> None:
    """Elastic weight consolidation, FedProx."""
    old = {name: p.clone().detach() for name, p in model.named_parameters()}
    for _ in range(2):
        penalty = sum(((p - old[name]) ** 2).sum() for name, p in model.named_parameters())
        (forward(x).square().mean() + penalty).backward()
        step(model)


@recipe()
def keep_orthogonal(model: nn.Module, forward: Any, x: Tensor) -> None:
    """A penalty on the products of a weight's rows."""
    weight = model[0].weight  # type: ignore[index]
    products = weight @ weight.t() - torch.eye(6, dtype=x.dtype)
    (forward(x).square().mean() + products.square().sum()).backward()
    step(model)


@recipe()
def keep_sparse(model: nn.Module, forward: Any, x: Tensor) -> None:
    """The sum of all weights' sizes."""
    everything = torch.cat([p.view(-1) for p in model.parameters()])
    (forward(x).square().mean() + 1e-2 * everything.abs().sum()).backward()
    step(model)


@recipe(compile="does not currently support double backward|differentiate twice")
def penalise_gradients_of_inputs(model: nn.Module, forward: Any, x: Tensor) -> None:
    """WGAN-GP."""
    x = x.clone().requires_grad_()
    out = forward(x).square().sum(1)
    (gradient,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    (out.mean() + (gradient.norm(dim=1) - 1).square().mean()).backward()
    step(model)


@recipe(compile="does not currently support double backward|differentiate twice")
def penalise_gradients_of_weights(model: nn.Module, forward: Any, x: Tensor) -> None:
    """A second derivative by the parameters."""
    loss = forward(x).square().mean()
    gradients = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    (loss + sum((g * g).sum() for g in gradients)).backward()
    step(model)


@recipe(compile="does not currently support double backward|differentiate twice")
def learn_to_learn(model: nn.Module, forward: Any, x: Tensor) -> None:
    """MAML: each rank computes a loss of its own with weights after a step that all have taken."""
    parameters = list(model.parameters())
    gradients = torch.autograd.grad(forward(x).square().mean(), parameters, create_graph=True)
    fast = [p - 0.5 * g for p, g in zip(parameters, gradients, strict=True)]
    hidden = torch.tanh(x.cos() @ fast[0].t() + fast[1])
    (hidden @ fast[2].t() + fast[3]).square().mean().backward()
    step(model)


@recipe()
def update_by_autograd(model: nn.Module, forward: Any, x: Tensor) -> None:
    """No ``.grad`` at all."""
    gradients = torch.autograd.grad(forward(x).square().mean(), list(model.parameters()))
    with torch.no_grad():
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.sub_(gradient, alpha=0.1)


@recipe()
def trust_each_layer(model: nn.Module, forward: Any, x: Tensor) -> None:
    """LARS."""
    forward(x).square().mean().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            assert parameter.grad is not None
            ratio = parameter.norm() / (parameter.grad.norm() + 1e-9)
            parameter.add_(parameter.grad, alpha=-0.01 * float(ratio))
    model.zero_grad()


@recipe()
def trust_all_layers_at_once(model: nn.Module, forward: Any, x: Tensor) -> None:
    """LAMB over foreach functions, whose norms come in a list."""
    forward(x).square().mean().backward()
    with torch.no_grad():
        parameters = list(model.parameters())
        gradients = [p.grad for p in parameters if p.grad is not None]
        norms, others = torch._foreach_norm(parameters), torch._foreach_norm(gradients)
        updates = torch._foreach_mul(gradients, torch._foreach_div(norms, others))
        torch._foreach_add_(parameters, updates, alpha=-0.01)
    model.zero_grad()


@recipe()
def climb_first(model: nn.Module, forward: Any, x: Tensor) -> None:
    """Sharpness-aware minimisation."""
    forward(x).square().mean().backward()
    with torch.no_grad():
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        norm = torch.norm(torch.stack([g.norm() for g in gradients]))
        climbs = [g * (0.05 / (norm + 1e-12)) for g in gradients]
        torch._foreach_add_(list(model.parameters()), climbs)
    model.zero_grad()
    forward(x).square().mean().backward()
    with torch.no_grad():
        torch._foreach_sub_(list(model.parameters()), climbs)
    step(model)


@recipe()
def clip_by_weights(model: nn.Module, forward: Any, x: Tensor) -> None:
    """Adaptive gradient clipping (NFNet), row by row."""
    forward(x).square().mean().backward()

    def norm(value: Tensor) -> Tensor:
        return value.norm() if value.dim() <= 1 else value.norm(dim=1, keepdim=True)

    for parameter in model.parameters():
        assert parameter.grad is not None
        largest = norm(parameter.detach()).clamp(min=1e-3) * 1e-3
        found = norm(parameter.grad.detach())
        clipped = parameter.grad * (largest / found.clamp(min=1e-6))
        parameter.grad.detach().copy_(torch.where(found > largest, clipped, parameter.grad))
    step(model)


@recipe()
def clip_flattened(model: nn.Module, forward: Any, x: Tensor) -> None:
    """All gradients in one vector, and back."""
    forward(x).square().mean().backward()
    vector = torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])
    vector = vector / vector.norm()
    start = 0
    for parameter in model.parameters():
        assert parameter.grad is not None
        part = vector[start : start + parameter.numel()]
        parameter.grad.copy_(part.view_as(parameter))
        start += parameter.numel()
    step(model)


@recipe()
def freeze_rows(model: nn.Module, forward: Any, x: Tensor) -> None:
    """Gradients of some rows are put to zero."""
    forward(x).square().mean().backward()
    model[0].weight.grad[:2] = 0  # type: ignore[index]
    model[2].weight.grad[1].mul_(0)  # type: ignore[index]
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad[parameter.grad.abs() < 1e-3] = 0
    step(model)


@recipe()
def average_weights(model: nn.Module, forward: Any, x: Tensor) -> None:
    """An exponential average, evaluated in the weights' place."""
    average = [p.detach().clone() for p in model.parameters()]
    forward(x).square().mean().backward()
    step(model)
    with torch.no_grad():
        for kept, parameter in zip(average, model.parameters(), strict=True):
            kept.lerp_(parameter.detach(), 0.1)
            parameter.copy_(kept)


@recipe()
def search_by_lbfgs(model: nn.Module, forward: Any, x: Tensor) -> None:
    """An optimizer that evaluates several times."""
    optimizer = optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = forward(x).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)


@recipe()
def save_activations_on_cpu(model: nn.Module, forward: Any, x: Tensor) -> None:
    """Hooks on what is saved."""
    with torch.autograd.graph.save_on_cpu():
        loss = forward(x).square().mean()
    loss.backward()
    step(model)


HOOKS_ARE_COMPILED = torch.__version__ >= "2.13"
"""Whether Dynamo makes graphs of a backward's hooks where a compiled function calls it: torch 2.11
runs them as they are."""


@recipe(compile_0="the compiled function calls backward" if HOOKS_ARE_COMPILED else "")
def compile_everything(model: nn.Module, forward: Any, x: Tensor) -> None:
    """The whole step in one function."""
    optimizer = optim.SGD(model.parameters(), 0.1)

    def train(x: Tensor) -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    call = train
    if forward is not model:
        call = torch.compile(train, backend="fxzero", options=OPTIONS)
    call(x)
    call(x)


@recipe("is parametrized after fxzero.shard|a new nn.Parameter is made of the shard")
def normalise_late(model: nn.Module, forward: Any, x: Tensor) -> None:
    """A weight that becomes a computed one."""
    parametrizations.weight_norm(model[0])  # type: ignore[index]
    forward(x).mean().backward()


@recipe("something took it away after")
def prune_late(model: nn.Module, forward: Any, x: Tensor) -> None:
    """The same, by a mask."""
    prune.l1_unstructured(model[0], "weight", amount=0.3)  # type: ignore[index]
    forward(x).mean().backward()


@recipe("cannot be copied")
def copy_late(model: nn.Module, forward: Any, x: Tensor) -> None:
    """A teacher, say."""
    copy.deepcopy(model)


@recipe(eager_3="given to DistributedDataParallel", compile_3="given to DistributedDataParallel")
def wrap_in_ddp(model: nn.Module, forward: Any, x: Tensor) -> None:
    """Who reduces?"""
    wrapped = DistributedDataParallel(model) if hasattr(model, "_fxzero_state") else model
    wrapped(x).square().mean().backward()
    step(model)


@on_two_ranks
@pytest.mark.parametrize(
    ("door", "zero"), [("eager", 0), ("compile", 3), *exhaustive(("eager", 3), ("compile", 0))]
)
def test_recipes(ranks: Pools, world: int, zero: int, door: str) -> None:
    """Each gives eager's numbers, or says why not."""
    for complaints in ranks(world).run(try_recipes, zero, door):
        assert not complaints, "\n".join(complaints)


def try_recipes(zero: int, door: str) -> list[str]:
    """Job: what is wrong."""
    found = {name: complaint(name, zero, door) for name in RECIPES}
    return [f"{name}: {text}" for name, text in found.items() if text]


def complaint(name: str, zero: int, door: str) -> str:
    """What is wrong with one recipe; empty if nothing is."""
    places = (name, f"{name} {door}", f"{name} {door} {zero}")
    refused = "|".join(REFUSED[place] for place in places if place in REFUSED)
    torch._dynamo.reset()
    batch, mine = rows()
    model, reference = fxzero.shard(small(), zero=zero), small()
    compiled = torch.compile(model, backend="fxzero", options=OPTIONS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        try:
            RECIPES[name](model, compiled if door == "compile" else model, mine)
        except (fxzero.FxZeroError, RuntimeError) as error:
            said = refused and re.search(refused, str(error))
            return "" if said else f"{type(error).__name__}: {error}"
    if refused:
        return "not refused"
    RECIPES[name](reference, reference, batch)
    try:
        assert_same(full_parameters(model), full_parameters(reference), TIGHT)
    except AssertionError as error:
        return str(error)
    return ""
