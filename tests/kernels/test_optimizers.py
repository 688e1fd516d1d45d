"""AdamW over buckets: against its float64 trajectory, `torch.optim`, and bit for bit where due."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from fxzero.errors import KernelError
from fxzero.kernels import optimizers
from fxzero.kernels.optimizers import (
    adamw_,
    adamw_reference,
    philox_reference,
    stochastic_round_reference,
)
from tests.kernels.checking import DEVICE, check_close, random

SHAPES = [(), (1,), (31,), (127,), (0,), (10, 100), (4097,)]
SMALL = [(), (0,), (31,), (3, 7)]

OPERATIONS = 28
"""Of one step on the way to a parameter, in float32: 3 for the gradient's factor, 3 for exp_avg,
4 for exp_avg_sq, twice 5 for the bias corrections, 5 for the quotient, 3 for the parameter."""

LR = 0.1
"""So large that updates are of the size of the parameters, and an error in them shows."""

Bucket = dict[str, list[Tensor]]


def draw(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    return random(math.prod(shape), dtype=dtype).view(shape)


def bucket(
    shapes: list[tuple[int, ...]] = SHAPES,
    param: torch.dtype = torch.float32,
    grad: torch.dtype | None = None,
    state: torch.dtype = torch.float32,
) -> Bucket:
    """Parameters, gradients, and the state before the first step."""
    return {
        "params": [draw(s, param) / 10 for s in shapes],
        "grads": [draw(s, grad or param) for s in shapes],
        "exp_avgs": [torch.zeros(s, dtype=state, device=DEVICE) for s in shapes],
        "exp_avg_sqs": [torch.zeros(s, dtype=state, device=DEVICE) for s in shapes],
    }


def clone(tensors: Bucket) -> Bucket:
    return {name: [t.clone() for t in ts] for name, ts in tensors.items()}


class Trajectory:
    """What float64 makes of a bucket, and how large the numbers are that its parameters are
    sums of: the old value, and updates made of absolute gradients."""

    def __init__(self, start: Bucket) -> None:
        self.params = [t.double() for t in start["params"]]
        self.exp_avgs = [t.double() for t in start["exp_avgs"]]
        self.exp_avg_sqs = [t.double() for t in start["exp_avg_sqs"]]
        self._absolute = [t.abs() for t in self.exp_avgs]
        self._moved = [t.abs() for t in self.params]
        self._largest = 0.0

    def step(self, grads: list[Tensor], step: float, **options: Any) -> None:
        for i, grad in enumerate(grads):
            arguments = {"lr": LR, **options}
            new = adamw_reference(
                self.params[i], grad.double(), self.exp_avgs[i], self.exp_avg_sqs[i], step,
                **arguments,
            )  # fmt: skip
            decay = options.get("weight_decay", 1e-2)
            size = grad.double().abs() * float(options.get("grad_factor", 1.0))
            if not options.get("decoupled", True):
                size = size + decay * self.params[i].abs()
            beta1, beta2 = options.get("betas", (0.9, 0.999))
            self._absolute[i] = beta1 * self._absolute[i] + (1 - beta1) * size
            quotient = self._absolute[i] / (new[2].sqrt() / (1 - beta2**step) ** 0.5 + 1e-8)
            self._moved[i] += LR * (quotient / (1 - beta1**step) + decay * self.params[i].abs())
            self._largest = max([self._largest, *size.flatten().tolist()])
            self.params[i], self.exp_avgs[i], self.exp_avg_sqs[i] = new

    def check(self, found: Bucket, steps: int, **bound: Any) -> None:
        """See that a bucket took the same steps; each one rounds what it stores."""
        bound = {"operations": OPERATIONS * steps, "roundings": steps, **bound}
        moved = max(float(m.max()) for m in self._moved if m.numel())
        scales = {"params": moved, "exp_avgs": self._largest, "exp_avg_sqs": self._largest**2}
        for name, scale in scales.items():
            for one, other in zip(found[name], getattr(self, name), strict=True):
                check_close(one, other, scale=scale, **bound)


@pytest.mark.parametrize(
    ("param", "grad", "state"),
    [
        (torch.float32, torch.float32, torch.float32),
        (torch.float32, torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.bfloat16, torch.float32),
        (torch.float16, torch.float16, torch.float32),
        (torch.float32, torch.float16, torch.bfloat16),
    ],
)
def test_steps_are_those_of_float64(
    param: torch.dtype, grad: torch.dtype, state: torch.dtype
) -> None:
    tensors = bucket(SHAPES if param == grad else SMALL, param, grad, state)
    reference = Trajectory(tensors)
    for step in (1, 2, 3):
        tensors["grads"] = [draw(g.shape, grad) for g in tensors["grads"]]
        kept = clone(tensors)["grads"]
        adamw_(**tensors, step=step, lr=LR)
        reference.step(kept, step)
        assert all(
            torch.equal(one, other) for one, other in zip(tensors["grads"], kept, strict=True)
        )
    # A rounded state moves the parameters as well: exp_avg by its rounding, exp_avg_sq by half.
    rounded = {"dtype": state, "roundings": 6} if state is torch.bfloat16 else {}
    reference.check(tensors, steps=3, **rounded)


@pytest.mark.parametrize("decoupled", [True, False], ids=["adamw", "adam"])
def test_steps_are_those_of_torch(decoupled: bool) -> None:
    tensors = bucket(SMALL)
    reference = Trajectory(tensors)
    params = [torch.nn.Parameter(p.clone()) for p in tensors["params"]]
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    optimizer = kind(params, lr=LR, weight_decay=0.1, foreach=False)
    options = {"weight_decay": 0.1, "decoupled": decoupled}
    for step in (1, 2, 3):
        tensors["grads"] = [draw(g.shape) for g in tensors["grads"]]
        for p, g in zip(params, tensors["grads"], strict=True):
            p.grad = g.clone()
        optimizer.step()
        reference.step(tensors["grads"], step, **options)
        adamw_(**tensors, step=torch.tensor(float(step), device=DEVICE), lr=LR, **options)
    reference.check(tensors, steps=3)
    states = [optimizer.state[p] for p in params]
    theirs = {"params": [p.detach() for p in params]}
    theirs |= {n: [s[n[:-1]] for s in states] for n in ("exp_avgs", "exp_avg_sqs")}
    reference.check(theirs, steps=3)


@pytest.mark.parametrize("step", [1, 4, 5, 500, 501, 100_000])
def test_bias_corrections_early_and_late(step: int) -> None:
    tensors = bucket(SMALL)
    for average, square in zip(tensors["exp_avgs"], tensors["exp_avg_sqs"], strict=True):
        average.normal_()
        square.uniform_(0.5, 1.0)
    reference = Trajectory(tensors)
    adamw_(**tensors, step=step, lr=LR)
    reference.step(tensors["grads"], step)
    reference.check(tensors, steps=1)


def test_betas_of_zero() -> None:
    tensors = bucket(SMALL)
    reference = Trajectory(tensors)
    adamw_(**tensors, step=1, lr=LR, betas=(0.0, 0.0))
    reference.step(tensors["grads"], 1, betas=(0.0, 0.0))
    reference.check(tensors, steps=1)


@pytest.mark.parametrize("on_device", [False, True], ids=["host", "device"])
def test_numbers_may_be_tensors(on_device: bool) -> None:
    tensors = bucket(SMALL, grad=torch.float16)
    reference = Trajectory(tensors)
    numbers: dict[str, Any] = {"step": 3.0, "lr": LR, "grad_scale": 1024.0, "clip_coefficient": 0.3}
    if on_device:
        numbers = {n: torch.tensor(v, device=DEVICE) for n, v in numbers.items()}
        numbers["lr"] = numbers["lr"].double()
    adamw_(**tensors, **numbers)
    # 0.3 and 0.1 as float32 numbers are other numbers: that is among the counted operations.
    reference.step(tensors["grads"], 3, grad_factor=0.3 / 1024)
    reference.check(tensors, steps=1)


def test_skipping_changes_nothing() -> None:
    tensors = bucket(SMALL)
    copies = [torch.zeros_like(p, dtype=torch.bfloat16) for p in tensors["params"]]
    before = clone({**tensors, "copies": copies})
    skip = torch.ones((), device=DEVICE)
    adamw_(**tensors, copies=copies, step=1, lr=LR, skip=skip)
    after = {**tensors, "copies": copies}
    assert all(torch.equal(a, b) for n in before for a, b in zip(after[n], before[n], strict=True))
    adamw_(**tensors, copies=copies, step=1, lr=LR, skip=skip.zero_())
    for name in ("params", "exp_avgs", "exp_avg_sqs", "copies"):
        changed = [not torch.equal(a, b) for a, b in zip(after[name], before[name], strict=True)]
        assert changed == [a.numel() > 0 for a in after[name]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_copies_are_rounded_to_nearest(dtype: torch.dtype) -> None:
    tensors = bucket([(), (31,), (2049,)])
    copies = [torch.zeros_like(p, dtype=dtype) for p in tensors["params"]]
    adamw_(**tensors, copies=copies, step=1, lr=LR)
    assert all(torch.equal(c, p.to(dtype)) for c, p in zip(copies, tensors["params"], strict=True))


def test_tensors_that_are_not_aligned() -> None:
    tensors = bucket([(1025,), (31,)])
    reference = Trajectory(tensors)
    odd = {n: [torch.empty(t.numel() + 1, device=DEVICE)[1:].copy_(t) for t in ts]
           for n, ts in tensors.items()}  # fmt: skip
    adamw_(**odd, step=1, lr=LR)
    reference.step(tensors["grads"], 1)
    reference.check(odd, steps=1)


def test_gradients_that_are_not_contiguous() -> None:
    tensors = bucket([(31, 7), (4,)])
    reference = Trajectory(tensors)
    reference.step(tensors["grads"], 1)
    tensors["grads"][0] = tensors["grads"][0].t().contiguous().t()
    adamw_(**tensors, step=1, lr=LR)
    reference.check(tensors, steps=1)


def test_buckets_of_the_same_sizes_are_told_apart() -> None:
    first, second = bucket(SMALL), bucket(SMALL)
    references = Trajectory(first), Trajectory(second)
    for step in (1, 2):
        for tensors, reference in zip((first, second), references, strict=True):
            adamw_(**tensors, step=step, lr=LR)
            reference.step(tensors["grads"], step)
    references[0].check(first, steps=2)
    references[1].check(second, steps=2)


def test_nothing_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """No kernel is launched where no tensor has an element."""
    launched: list[Any] = []
    launch = optimizers.launch

    def noting(kernel: Any, grid: Any) -> Any:
        launched.append(kernel)
        return launch(kernel, grid)

    monkeypatch.setattr(optimizers, "launch", noting)
    adamw_([], [], [], [], 1, lr=LR)
    adamw_(**bucket([(0,), (3, 0)]), step=1, lr=LR)
    assert launched == []
    adamw_(**bucket([(0,), (3,)]), step=1, lr=LR)
    assert len(launched) == 1


# Stochastic rounding.


def seed_of(value: int) -> Tensor:
    return torch.tensor(value, device=DEVICE)


def rounded(params: list[Tensor], seed: int) -> list[Tensor]:
    """Copies that `adamw_` makes of parameters when it does not change them."""
    copies = [torch.zeros_like(p, dtype=torch.bfloat16) for p in params]
    state = {n: [torch.zeros_like(p) for p in params] for n in ("grads", "exp_avgs", "exp_avg_sqs")}
    adamw_(params, **state, step=1, lr=0.0, copies=copies, seed=seed_of(seed))
    return copies


def test_philox_is_that_of_its_authors() -> None:
    """The first two of the answers that Random123 1.09 is tested with (kat_vectors)."""
    zero = torch.zeros((), dtype=torch.int64)
    assert int(philox_reference(zero, zero)) == 0x6627E8D5


def test_random_bits_are_those_of_the_reference() -> None:
    # Places of the last tensor follow those of the others; the seed needs both of its words.
    params = [random(31), random(0), random(1500)]
    seed = 5 + (3 << 33)
    start = 0
    for param, copy in zip(params, rounded(params, seed), strict=True):
        expected = stochastic_round_reference(param, seed_of(seed), start)
        assert torch.equal(copy, expected)
        start += param.numel()


def test_parameters_in_bfloat16_are_rounded_alike() -> None:
    tensors = bucket([(31,), (100,)], param=torch.bfloat16)
    wide = {n: [t.float() for t in ts] for n, ts in clone(tensors).items()}
    copies = [torch.zeros_like(p) for p in tensors["params"]]
    seed = seed_of(11)
    adamw_(**tensors, step=1, lr=LR, seed=seed)
    adamw_(**wide, step=1, lr=LR, seed=seed, copies=copies)
    assert all(torch.equal(p, c) for p, c in zip(tensors["params"], copies, strict=True))
    nearest = [p.bfloat16() for p in wide["params"]]
    assert not all(torch.equal(p, c) for p, c in zip(nearest, copies, strict=True))


def test_rounding_goes_to_a_neighbour_and_is_unbiased() -> None:
    draws = 4096
    values = torch.tensor([1.0, 1.001, -1.005, 3.14159, -2.7e-39, 255.9, -1e30], device=DEVICE)
    found = rounded([values.repeat_interleave(draws)], seed=3)[0].float().view(-1, draws)
    lower = (values.view(torch.int32) & -0x10000).view(torch.float32)[:, None]
    upper = ((values.view(torch.int32) & -0x10000) + 0x10000).view(torch.float32)[:, None]
    assert bool(((found == lower) | (found == upper)).all())
    # Each draw is one of two, so the mean of n of them has variance f (1 - f) / n: within 5 of
    # its standard deviations but for 6 in 10 million. The seed is fixed: this passes or does not.
    fraction = ((values[:, None].double() - lower) / (upper.double() - lower))[:, 0]
    mean = ((found.double() - lower) / (upper.double() - lower)).mean(1)
    deviation = (fraction * (1 - fraction) / draws).sqrt()
    assert bool(((mean - fraction).abs() <= 5 * deviation).all())


def test_the_seed_and_the_place_decide() -> None:
    params = [torch.full((500,), 1.003, device=DEVICE), torch.full((500,), 1.003, device=DEVICE)]
    once, again, other = rounded(params, 1), rounded(params, 1), rounded(params, 2)
    assert all(torch.equal(a, b) for a, b in zip(once, again, strict=True))
    assert not torch.equal(once[0], once[1])
    assert not torch.equal(once[0], other[0])
    assert not torch.equal(once[0][:250], once[0][250:])


def test_what_is_not_finite_stays_so() -> None:
    # Of the bits of a NaN, a GPU sets all: a carry from the lower half would reach the sign.
    bits = torch.tensor([0x7F800000, -0x800000, 0x7FC00000, 0x7FFFFFFF, 0, -(2**31)], device=DEVICE)
    values = bits.int().view(torch.float32)
    for seed in range(3):
        found = rounded([values.clone()], seed)[0].float()
        torch.testing.assert_close(found, values, rtol=0, atol=0, equal_nan=True)


# As an operator.


def test_plain_torch_does_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    tensors = {n: [t.cpu() for t in ts] for n, ts in bucket(SMALL, grad=torch.bfloat16).items()}
    reference = Trajectory(tensors)
    copies = [torch.zeros_like(p, dtype=torch.bfloat16) for p in tensors["params"]]
    seed, numbers = torch.tensor(4), {"clip_coefficient": torch.tensor(0.25), "grad_scale": 0.5}
    adamw_(**tensors, step=1, lr=LR, **numbers, copies=copies, seed=seed)
    reference.step(tensors["grads"], 1, grad_factor=0.5)
    reference.check(tensors, steps=1)
    start = 0
    for param, copy in zip(tensors["params"], copies, strict=True):
        assert torch.equal(copy, stochastic_round_reference(param, seed, start))
        start += param.numel()
    before = clone(tensors)
    adamw_(**tensors, step=2, lr=LR, skip=torch.ones(1))
    assert all(
        torch.equal(a, b) for n in before for a, b in zip(tensors[n], before[n], strict=True)
    )


def test_float64() -> None:
    tensors = {n: [t.double() for t in ts] for n, ts in bucket(SMALL).items()}
    expected = [adamw_reference(*each, 2, lr=LR) for each in zip(*tensors.values(), strict=True)]
    adamw_(**tensors, step=2, lr=LR)
    found = zip(tensors["params"], tensors["exp_avgs"], tensors["exp_avg_sqs"], strict=True)
    for one, other in zip(found, expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_operator() -> None:
    tensors = bucket([(3,), (2, 2)])
    copies = [torch.zeros_like(p, dtype=torch.bfloat16) for p in tensors["params"]]
    one = torch.ones((), device=DEVICE)
    arguments = (*tensors.values(), copies, one, one, one, one, 0 * one, seed_of(1),
                 1.0, 0.1, 1.0, 0.9, 0.999, 1e-8, 1e-2, True)  # fmt: skip
    torch.library.opcheck(torch.ops.fxzero.adamw_.default, arguments)


def test_compiled() -> None:
    def train(tensors: Bucket, copies: list[Tensor], step: Tensor, seed: Tensor) -> Tensor:
        adamw_(**tensors, copies=copies, step=step, lr=LR, seed=seed)
        return tensors["params"][0] * 2

    eager = bucket(SMALL)
    compiled = clone(eager)
    copies = [torch.zeros_like(p, dtype=torch.bfloat16) for p in eager["params"]]
    copies_compiled = [c.clone() for c in copies]
    step = torch.ones((), device=DEVICE)
    expected = train(eager, copies, step, seed_of(1))
    step_compiled = torch.compile(train, fullgraph=True, backend="aot_eager")
    found = step_compiled(compiled, copies_compiled, step, seed_of(1))
    assert torch.equal(found, expected)
    for name, tensors in {**eager, "copies": copies}.items():
        others = {**compiled, "copies": copies_compiled}[name]
        assert all(torch.equal(a, b) for a, b in zip(tensors, others, strict=True))


# Memory, and numbers in it.


def side_by_side(offset: int, written: str, position: int = 0) -> Bucket:
    """A bucket whose first gradient begins some elements after a tensor that is written."""
    tensors = bucket([(50,), (50,)])
    memory = random(150).abs()
    tensors[written][position] = memory[50:100]
    tensors["grads"][0] = memory[50 + offset : 100 + offset]
    return tensors


@pytest.mark.parametrize("written", ["params", "exp_avgs", "exp_avg_sqs"])
@pytest.mark.parametrize("offset", [-49, -1, 1, 49])
def test_gradients_that_are_overwritten_are_refused(written: str, offset: int) -> None:
    for position in (0, 1):
        tensors = side_by_side(offset, written, position)
        before = clone(tensors)
        with pytest.raises(KernelError, match=r"adamw_: grads\[0\] must be in memory of its own"):
            adamw_(**tensors, step=1, lr=LR)
        for name, others in before.items():
            assert all(torch.equal(a, b) for a, b in zip(tensors[name], others, strict=True))


def test_gradients_exactly_where_another_tensor_is_written_are_refused() -> None:
    with pytest.raises(KernelError, match=r"adamw_: grads\[0\]"):
        adamw_(**side_by_side(0, "params", 1), step=1, lr=LR)
    # Nor may the numbers be narrower: they then lie elsewhere.
    tensors = bucket([(50,)])
    tensors["grads"] = [tensors["params"][0].view(torch.bfloat16)[:50]]
    with pytest.raises(KernelError, match=r"adamw_: grads\[0\]"):
        adamw_(**tensors, step=1, lr=LR)


@pytest.mark.parametrize("offset", [-50, 0, 50])
def test_gradients_next_to_what_is_written_or_in_its_place(offset: int) -> None:
    tensors = side_by_side(offset, "exp_avg_sqs")
    apart = clone(tensors)
    adamw_(**tensors, step=1, lr=LR)
    adamw_(**apart, step=1, lr=LR)
    for name in ("params", "exp_avgs", "exp_avg_sqs"):
        assert all(torch.equal(a, b) for a, b in zip(tensors[name], apart[name], strict=True))


@pytest.mark.skipif(DEVICE != "cpu", reason="numbers on a GPU are not read")
@pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning")
def test_a_step_before_the_first() -> None:
    tensors = bucket(SMALL)
    before = clone(tensors)
    with pytest.raises(KernelError, match="adamw_: step must be at least 1"):
        adamw_(**tensors, step=torch.zeros(()), lr=LR)
    # One that is skipped may not have been counted.
    adamw_(**tensors, step=torch.zeros(()), lr=LR, skip=torch.ones(()))
    for name, others in before.items():
        assert all(torch.equal(a, b) for a, b in zip(tensors[name], others, strict=True))


def wrong(name: str, **changes: Any) -> Any:
    return pytest.param(changes, name, id=f"{name}-{len(changes)}-{next(iter(changes))}")


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        wrong("grads", grads=lambda b: b["grads"][:1]),
        wrong(r"grads\[1\]", grads=lambda b: [b["grads"][0], b["grads"][1][:3]]),
        wrong(r"exp_avgs\[1\]", exp_avgs=lambda b: [b["exp_avgs"][0], b["exp_avgs"][1].half()]),
        wrong(r"exp_avg_sqs\[0\]", exp_avg_sqs=lambda b: [t.half() for t in b["exp_avg_sqs"]]),
        wrong(r"params\[0\]", params=lambda b: [p.int() for p in b["params"]]),
        wrong(r"params\[1\]", params=lambda b: [b["params"][0], random(8, 4).t()]),
        wrong(r"grads\[0\]", grads=lambda b: [g.double() for g in b["grads"]]),
        wrong(r"copies\[0\]", copies=lambda b: [p.clone() for p in b["params"]]),
        wrong("copies", copies=lambda b: [p.half() for p in b["params"]][:1]),
        wrong(r"exp_avgs\[0\]", exp_avgs=lambda b: [t.to("meta") for t in b["exp_avgs"]]),
        wrong("share", exp_avgs=lambda b: b["params"]),
        wrong("share", exp_avgs=lambda b: [b["exp_avg_sqs"][0], b["exp_avgs"][1]]),
        wrong("betas", betas=lambda b: (0.9, 1.0)),
        wrong("step", step=lambda b: 0),
        wrong("step", step=lambda b: torch.ones(2)),
        wrong("step", step=lambda b: 1.5),
        wrong("step", step=lambda b: math.nan),
        wrong("step", step=lambda b: math.inf),
        wrong("step", step=lambda b: None),
        wrong("lr", lr=lambda b: math.nan),
        wrong("lr", lr=lambda b: -1e-3),
        wrong("lr", lr=lambda b: "0.1"),
        wrong("lr", lr=lambda b: None),
        wrong("eps", eps=lambda b: -1e-8),
        wrong("eps", eps=lambda b: math.nan),
        wrong("weight_decay", weight_decay=lambda b: -0.1),
        wrong("weight_decay", weight_decay=lambda b: math.nan),
        wrong("betas", betas=lambda b: (-0.1, 0.9)),
        wrong("betas", betas=lambda b: (0.9, math.nan)),
        wrong("betas", betas=lambda b: 0.9),
        wrong("betas", betas=lambda b: (0.9, 0.99, 0.999)),
        wrong("grad_scale", grad_scale=lambda b: math.nan),
        wrong("grad_scale", grad_scale=lambda b: math.inf),
        wrong("clip_coefficient", clip_coefficient=lambda b: math.nan),
        wrong("decoupled", decoupled=lambda b: "no"),
        wrong("skip", skip=lambda b: 1.0),
        wrong("seed", copies=lambda b: [p.bfloat16() for p in b["params"]], seed=lambda b: 3),
        wrong(r"grads\[1\]", grads=lambda b: [b["grads"][0], [1.0]]),
        wrong(r"params\[0\]", params=lambda b: [p.to_sparse() for p in b["params"]]),
        wrong("lr", lr=lambda b: torch.ones((), device="meta")),
        wrong("grad_scale", grad_scale=lambda b: 0.0),
        wrong("skip", skip=lambda b: torch.ones(3)),
        wrong("seed", seed=lambda b: seed_of(1)),
        wrong("seed", copies=lambda b: [p.half() for p in b["params"]], seed=lambda b: seed_of(1)),
        wrong("seed", copies=lambda b: [p.bfloat16() for p in b["params"]],
              seed=lambda b: seed_of(1).int()),
    ],
)  # fmt: skip
def test_wrong_arguments(changes: dict[str, Any], name: str) -> None:
    tensors = bucket([(5,), (4, 8)])
    arguments: dict[str, Any] = {**tensors, "step": 1, "lr": LR}
    arguments |= {key: change(tensors) for key, change in changes.items()}
    with pytest.raises(KernelError, match=f"adamw_: .*{name}"):
        adamw_(**arguments)
