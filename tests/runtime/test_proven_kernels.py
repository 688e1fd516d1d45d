"""Fused updates are chosen only where they do what the loop does."""

from __future__ import annotations

import itertools
import logging
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer
from torch.testing import assert_close

import fxzero
from fxzero.errors import FxZeroWarning
from fxzero.runtime import proven_kernels, updates
from fxzero.runtime.optimizers import kernels_of, proven_kernel_of
from tests.work import calls

EAGER: dict[str, Any] = {"lower_regions": {"backend": "eager"}}
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

SETTINGS: list[tuple[type[Optimizer], dict[str, Any]]] = [
    (SGD, {"momentum": m, "nesterov": n, "weight_decay": w, "maximize": x})
    for m, n, w, x in itertools.product((0.0, 0.9), (False, True), (0.0, 0.1), (False, True))
    if m or not n
]
SETTINGS += [
    (kind, {"amsgrad": a, "weight_decay": w, "maximize": x})
    for kind in (Adam, AdamW)
    for a, w, x in itertools.product((False, True), (0.0, 0.1), (False, True))
]
SETTINGS += [
    (Adagrad, {"lr_decay": d, "weight_decay": w, "maximize": x})
    for d, w, x in itertools.product((0.0, 0.1), (0.0, 0.1), (False, True))
]


def train(
    kind: type[Optimizer], dtype: torch.dtype, options: dict[str, Any], compiled: bool
) -> list[Tensor]:
    """Parameters and state after five steps, the last of another learning rate, in float64."""
    torch.manual_seed(0)
    model = nn.ParameterList(torch.randn(shape) for shape in ((67,), (16,), (3, 7), (1,)))
    targets = torch.randn(5, 67)
    model = model.to(dtype)
    optimizer = kind(model.parameters(), lr=0.05, **options)

    def loss_of(model: nn.Module, target: Tensor) -> Tensor:
        a, b, c, d = model.parameters()
        return ((a - target) ** 2).sum() + (b * c.sum()).sum() + (d * a.sum()).sum()

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, target: Tensor) -> Tensor:
            return loss_of(self.inner, target)

    whole = Whole()
    scale = fxzero.Precision(loss_scale=1.0) if dtype is torch.float16 else None
    step = (
        fxzero.compile_step(whole, optimizer, precision=scale, options=EAGER) if compiled else None
    )
    for i, target in enumerate(targets.to(dtype)):
        if i == 4:
            optimizer.param_groups[0]["lr"] = 0.01
        if step is not None:
            step(target)
        else:
            optimizer.zero_grad()
            whole(target).backward()
            optimizer.step()
    state = [optimizer.state[p] for p in model.parameters()]
    names = sorted(n for n, v in state[0].items() if isinstance(v, Tensor))
    found = [*model.parameters(), *(s[n] for n in names for s in state)]
    return [tensor.detach().double() for tensor in found]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("kind", "options"), SETTINGS, ids=str)
def test_what_is_chosen_agrees_with_the_loop(
    kind: type[Optimizer], options: dict[str, Any], dtype: torch.dtype
) -> None:
    """Five steps by what `kernels_of` chooses, beside the same in float64 by the loop."""
    torch.manual_seed(0)
    shapes = ((1,), (7,), (129,), (5, 31))
    start = [torch.randn(shape).to(dtype) for shape in shapes]
    grads = [[torch.randn(shape).to(dtype) for shape in shapes] for _ in range(5)]

    def looped(to: torch.dtype) -> list[Tensor]:
        params = [nn.Parameter(t.to(to, copy=True)) for t in start]
        optimizer = kind(params, lr=0.03, foreach=False, fused=False, **options)  # type: ignore[call-arg]
        for of_step in grads:
            for param, grad in zip(params, of_step, strict=True):
                param.grad = grad.to(to, copy=True)
            optimizer.step()
        return [p.detach().double() for p in params]

    params = [nn.Parameter(t.clone()) for t in start]
    optimizer = kind(params, lr=0.03, **options)  # type: ignore[call-arg]
    kernels = kernels_of(optimizer)
    if dtype in (torch.float32, torch.float64):
        assert kernels
    if not kernels:
        return  # its own step() is the loop
    (kernel,) = kernels
    state = [
        [torch.zeros(()) if n == "step" else torch.zeros_like(t) for t in start]
        for n in kernel.state
    ]
    with torch.no_grad():
        for of_step in grads:
            updates.KERNELS[kernel.name](
                [p.detach() for p in params],
                [g.clone() for g in of_step],
                state,
                optimizer.param_groups[0],
                None,
                None,
            )
    exact, loop = looped(torch.float64), looped(dtype)
    eps = torch.finfo(dtype).eps
    for param, near, best in zip(params, loop, exact, strict=True):
        allowed = 2 * (near - best).abs().max() + 16 * eps * best.abs().max()
        assert (param.double() - best).abs().max() <= allowed


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_low_precision_sgd_in_a_step(dtype: torch.dtype, momentum: float) -> None:
    """Bit by bit what eager SGD does, momentum included: torch's fused kernel is not used."""
    options = {"momentum": momentum}
    found, expected = (train(SGD, dtype, options, compiled) for compiled in (True, False))
    for mine, theirs in zip(found, expected, strict=True):
        assert_close(mine, theirs, rtol=torch.finfo(dtype).eps, atol=torch.finfo(dtype).eps)


@pytest.mark.parametrize("kind", [SGD, AdamW, Adagrad])
def test_double_precision_is_updated_by_fused_kernels(kind: type[Optimizer]) -> None:
    """And gives eager's numbers to 1e-12."""
    options: dict[str, Any] = {"momentum": 0.9} if kind is SGD else {}
    parameter = nn.Parameter(torch.ones(3, dtype=torch.float64))
    assert kernels_of(kind([parameter], lr=0.1, **options))  # type: ignore[call-arg]
    found, expected = (train(kind, torch.float64, options, c) for c in (True, False))
    for mine, theirs in zip(found, expected, strict=True):
        assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


@pytest.fixture
def notes() -> Iterator[list[str]]:
    """The warnings that fxzero logs meanwhile."""
    found: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("fxzero").addHandler(handler)
    yield found
    logging.getLogger("fxzero").removeHandler(handler)


def drop_momentum(step: Callable[..., None]) -> Callable[..., None]:
    """A kernel that forgets half of its state."""

    def wrong(params: Any, grads: Any, state: Any, group: Any, scale: Any, skip: Any) -> None:
        step(params, grads, state, group, scale, skip)
        for tensors in state:
            for tensor in tensors:
                if tensor.dim():
                    tensor[..., -1].mul_(0.5)

    return wrong


@pytest.mark.parametrize(("kind", "kernel"), [(SGD, "sgd"), (Adam, "adam"), (Adagrad, "adagrad")])
def test_a_wrong_kernel_is_not_chosen(
    kind: type[Optimizer], kernel: str, monkeypatch: pytest.MonkeyPatch, notes: list[str]
) -> None:
    """Whatever its dtype, and a line in the log says what happens instead."""
    monkeypatch.setitem(updates.KERNELS, kernel, drop_momentum(updates.KERNELS[kernel]))
    proven_kernels._try.cache_clear()
    options: dict[str, Any] = {"momentum": 0.9} if kind is SGD else {}
    try:
        optimizer = kind([nn.Parameter(torch.ones(3))], lr=0.1, **options)  # type: ignore[call-arg]
        assert kernels_of(optimizer) == ()
    finally:
        proven_kernels._try.cache_clear()
    assert f"runs {kind.__name__}.step() instead" in notes[-1]


def test_fused_on_purpose_where_it_is_wrong_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    """The optimizer's own step would run the same kernel: nobody but the user can choose."""
    monkeypatch.setattr("fxzero.runtime.optimizers.is_proven", lambda *_: False)
    optimizer = SGD([nn.Parameter(torch.ones(3))], lr=0.1, fused=True)
    with pytest.warns(FxZeroWarning, match="Drop fused=True"):
        assert proven_kernel_of(optimizer, optimizer.param_groups[0]) is None


def test_trying_takes_little_and_leaves_random_numbers_alone() -> None:
    """Once per kernel, dtype and settings; the user's seed means what it meant."""
    proven_kernels._try.cache_clear()
    state = torch.get_rng_state()
    optimizer = AdamW([nn.Parameter(torch.ones(3))], lr=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        work = calls(lambda: kernels_of(optimizer))
    assert work < 20_000, "some milliseconds"
    assert torch.equal(torch.get_rng_state(), state)
    tried = proven_kernels._try.cache_info().misses
    assert kernels_of(optimizer)
    assert calls(lambda: kernels_of(optimizer)) < work / 10
    assert proven_kernels._try.cache_info().misses == tried == 1


@pytest.mark.parametrize("kind", [SGD, AdamW, Adagrad])
def test_a_gradient_of_other_strides_is_laid_out_like_its_parameter(
    kind: type[Optimizer],
) -> None:
    """Fused kernels walk through both in the order of memory."""
    torch.manual_seed(0)
    grad = torch.randn(2, 3, 4, 4)
    results = []
    for given in (grad.clone(), grad.clone(memory_format=torch.channels_last)):
        param = torch.zeros_like(grad, memory_format=torch.contiguous_format)
        optimizer = kind([nn.Parameter(param)], lr=0.1)  # type: ignore[call-arg]
        (kernel,) = kernels_of(optimizer)
        state = [
            [torch.zeros(()) if n == "step" else torch.zeros_like(param)] for n in kernel.state
        ]
        group = optimizer.param_groups[0]
        updates.KERNELS[kernel.name]([param], [given], state, group, None, None)
        results.append(param)
    assert torch.equal(*results)


def test_betas_in_float32_explain_little() -> None:
    """What CUDA's kernels may differ by: far less than a step without momentum would."""
    for kind in (torch.optim.Adam, torch.optim.AdamW):
        assert 5e-5 < proven_kernels._of_rounded_betas(kind) < 1e-4
    assert proven_kernels._of_rounded_betas(torch.optim.SGD) == 0
