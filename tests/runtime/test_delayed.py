"""Updates that run one step late, against a loop that is written out, bit by bit."""

from __future__ import annotations

import gc
import io
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxzero
from fxzero.graph import Lane, Role
from fxzero.graph.stamps import stamp_of
from fxzero.runtime import delayed
from fxzero.schedule.simulate import simulate
from tests.parity.harness import Pools
from tests.passes.test_offload_states import ONE_PROCESS, compiled, downloads, offloaded, uploads
from tests.stepping import EAGER
from tests.tracing import of_role

LATE: dict[str, Any] = {**EAGER, "memory": "states_host", "offload_states": {"delay": 1}}
KINDS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.05, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
}


class Training:
    """A small model in training; with dropout, so that an extra forward would show."""

    def __init__(self, options: dict[str, Any], kind: str = "adamw", **step: Any) -> None:
        torch._dynamo.reset()
        torch.manual_seed(0)
        self.model = nn.Sequential(
            nn.Linear(12, 16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 8), nn.Linear(8, 4)
        )
        self.optimizer = KINDS[kind](self.model.parameters())
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.9)
        self.step = fxzero.compile_step(
            self.model,
            self.optimizer,
            nn.functional.mse_loss,
            scheduler=self.scheduler,
            options=options,
            **step,
        )
        self.losses: list[Tensor] = []

    def batch(self, rows: int) -> tuple[Tensor, Tensor]:
        """Another one for each step, and the generator as it is then."""
        torch.manual_seed(100 + len(self.losses))
        return torch.randn(rows, 12), torch.randn(rows, 4)

    def run(self, steps: int = 1, rows: int = 8) -> Training:
        """Train on some more batches."""
        for _ in range(steps):
            self.losses.append(self.step(*self.batch(rows)).loss)
        return self

    def left(self) -> list[Tensor]:
        """All that there is to compare."""
        parameters = list(self.model.parameters())
        state = [v for p in parameters for v in self.optimizer.state[p].values()]
        return [t.detach().clone() for t in (*self.losses, *parameters, *state)]


class Written(Training):
    """The same loop by torch, with each update one step later than its gradients."""

    def __init__(
        self, kind: str = "adamw", clip: float | None = None, after: int = 0, micro: int = 1
    ) -> None:
        super().__init__(EAGER, kind)
        self.clip, self.after, self.micro = clip, after, micro
        self.pending: tuple[list[Tensor], float] | None = None

    def run(self, steps: int = 1, rows: int = 8) -> Training:
        """See the class."""
        for _ in range(steps):
            x, y = self.batch(rows)
            rate = self.optimizer.param_groups[0]["lr"]
            losses = []
            for part, target in zip(x.chunk(self.micro), y.chunk(self.micro), strict=True):
                loss = nn.functional.mse_loss(self.model(part), target) / self.micro
                loss.backward()
                losses.append(loss.detach())
            self.losses.append(sum(losses[1:], losses[0]))
            if self.clip is not None:
                nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
            grads = [p.grad.clone() for p in self.model.parameters()]  # type: ignore[union-attr]
            self.use()
            self.pending = grads, rate
            if len(self.losses) <= self.after:
                self.use()
            self.optimizer.zero_grad()
            self.scheduler.step()
        return self

    def use(self) -> None:
        """Apply what is pending, with the learning rate of its step."""
        if self.pending is None:
            return
        (grads, rate), self.pending = self.pending, None
        (group,) = self.optimizer.param_groups
        now, group["lr"] = group["lr"], rate
        for parameter, grad in zip(self.model.parameters(), grads, strict=True):
            parameter.grad = grad
        self.optimizer.step()
        self.optimizer.zero_grad()
        group["lr"] = now


def same(one: Training, other: Training) -> bool:
    """Whether two trainings have left the same; a loop has no state before its first update."""
    mine, theirs = one.left(), other.left()
    if not any(one.optimizer.state.values()):
        theirs = theirs[: len(mine)]
    return len(mine) == len(theirs) and all(map(torch.equal, mine, theirs))


@pytest.mark.parametrize(
    ("kind", "clip", "after", "micro"),
    [("adamw", None, 0, 1), ("adamw", 0.1, 2, 4), ("sgd", 0.1, 0, 1), ("sgd", None, 9, 4)],
)
def test_it_is_the_loop_that_is_written_out(
    kind: str, clip: float | None, after: int, micro: int
) -> None:
    """After every step, and once the last gradients are used."""
    options = {**LATE, "offload_states": {"delay": 1, "delay_after": after}}
    written = Written(kind, clip, after, micro)
    late = Training(options, kind, clip_grad_norm=clip, micro_batches=micro)
    for _ in range(5):
        assert same(written.run(), late.run())
    written.use()
    late.step.use_gradients()
    assert same(written, late)
    late.step.use_gradients()  # once
    assert same(written, late)


def test_it_is_another_training_than_without() -> None:
    """Else nothing would have been tested."""
    late = Training(LATE).run(3)
    late.step.use_gradients()
    assert not same(late, Training(EAGER).run(3))


def test_a_checkpoint_has_all_that_was_learned() -> None:
    """A state dict is made once the last gradients are used, and training goes on from there; a
    loaded one is what the next step begins with."""
    written, late = Written(), Training(LATE)
    written.run(3)
    late.run(3)
    file = io.BytesIO()
    torch.save((late.model.state_dict(), late.optimizer.state_dict()), file)
    written.use()
    assert same(written, late)
    assert same(written.run(2), late.run(2))
    for training in (written, late):
        file.seek(0)
        model, optimizer = torch.load(file)  # each its own: an optimizer takes the very tensors
        training.model.load_state_dict(model)
        training.optimizer.load_state_dict(optimizer)
    written.pending = None
    assert same(written.run(2), late.run(2))


def test_whatever_is_written_between_two_steps() -> None:
    """The update of the step before comes on top of it, as in the loop."""
    written, late = Written(), Training(LATE)
    for training in (written, late):
        training.run(2)
        with torch.no_grad():
            for parameter in training.model.parameters():
                parameter.mul_(0.5)
        training.run(2)
    assert same(written, late)


def test_an_ordinary_step_of_the_optimizer() -> None:
    """Uses what is left first."""
    written, late = Written(), Training(LATE)
    for training in (written, late):
        training.run(2)
        if isinstance(training, Written):
            training.use()
        for parameter in training.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        training.optimizer.step()
        training.optimizer.zero_grad()
        training.run(2)
    assert same(written, late)


def test_two_shapes_of_batches() -> None:
    """Gradients of one graph are used before another one's arrive at their place."""
    written, late = Written(), Training(LATE)
    for rows in (8, 4, 4, 8):
        if isinstance(written, Written) and rows != 4:
            written.use()
        if len(written.losses) == 1:
            written.use()
        assert same(written.run(1, rows), late.run(1, rows))


def test_an_overflow_is_late_too() -> None:
    """In fp16: the step after it does not apply what was not finite."""
    late = Training(LATE, precision="fp16").run(2)
    late.step.use_gradients()
    before = late.left()[2:]
    x, y = late.batch(8)
    assert late.step(x * 1e6, y).skipped
    late.step.use_gradients()
    assert all(map(torch.equal, before, late.left()[2:]))


def on_ranks(zero: int) -> list[list[Tensor]]:
    """Parameters of a late training on several ranks, and of the same in one process' hands."""
    found = []
    for options in (LATE, {**LATE, "offload_states": {"delay": 1, "delay_after": 99}}):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = fxzero.shard(
            nn.Sequential(nn.Linear(12, 15), nn.Tanh(), nn.Linear(15, 3)), zero=zero
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = fxzero.compile_step(model, optimizer, nn.functional.mse_loss, options=options)
        torch.manual_seed(torch.distributed.get_rank())
        step(torch.randn(8, 12), torch.randn(8, 3))
        step.use_gradients()
        found.append([fxzero_local(p) for p in model.parameters()])
    return found


def fxzero_local(parameter: Tensor) -> Tensor:
    """This rank's part."""
    return getattr(parameter, "_local_tensor", parameter).detach().clone()


@pytest.mark.parametrize("zero", [0, 3])
def test_on_two_ranks(ranks: Pools, zero: int) -> None:
    """One step, whose gradients are used at once or behind it, leaves the same."""
    for late, now in ranks(2).run(on_ranks, zero):
        assert all(map(torch.equal, late, now))


# -- the graph


def test_updates_start_before_compute_and_gradients_wait_for_them() -> None:
    """Behind what takes the copies; they are joined at the end, before copies are renewed."""
    graph = offloaded(options=LATE, **ONE_PROCESS)
    starts = of_role(graph, Role.START)
    assert len(starts) == len(of_role(graph, Role.UPDATE)) == 3
    first = min(n for n in graph.nodes(role=Role.COMPUTE))
    assert max(copy.launch for copy in uploads(graph)) < min(starts) < max(starts) < first
    for copy in downloads(graph):
        (start,) = copy.launch.args[5]  # type: ignore[misc]
        assert start in starts


def test_an_update_is_beside_the_next_steps_compute() -> None:
    """In the simulation a slow host costs nothing until it is slower than compute."""
    found = {}
    for name, options in (("late", LATE), ("now", {**LATE, "offload_states": {}})):
        compilation = compiled(options=options, **ONE_PROCESS)
        assert compilation.joint is not None
        found[name] = simulate(compilation.joint, compilation.context.costs, fuses=False)
    assert found["late"].busy_us["host"] == pytest.approx(found["now"].busy_us["host"])
    begin = {s.node: s.start_us for s in found["late"].spans if s.lane is Lane.HOST and s.us}
    compute = min(s.start_us for s in found["late"].spans if s.lane is Lane.COMPUTE and s.us)
    assert min(begin.values()) <= compute


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"memory": "all_host"}, "delay=1 and offload_params.share=1"),
        ({"memory": "infinity"}, "delay=1 and offload_params.share=1"),
        ({"memory": "states_host", "host_budget": "1GiB"}, "delay=1 and host_budget=1GiB"),
    ],
)
def test_what_cannot_be_late(options: dict[str, Any], message: str) -> None:
    """A sentence that says why, and what can."""
    with pytest.raises(fxzero.ConfigError, match=message):
        fxzero.Config.from_options({**options, "offload_states": {"delay": 1}})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"delay": 2}, "offload_states.delay=2: an update can be one step late, or none"),
        ({"delay": -1}, "offload_states.delay=-1 must be 0 or more"),
        ({"delay": 1, "ahead": False}, "offload_states.delay=1 needs copies that stay"),
        (
            {"delay": 1, "update": "device"},
            "offload_states.delay=1 and offload_states.update=device",
        ),
        ({"delay_after": -3}, "offload_states.delay_after=-3 must be 0 or more"),
    ],
)
def test_numbers_that_cannot_be(settings: dict[str, Any], message: str) -> None:
    """Said at once."""
    with pytest.raises(fxzero.ConfigError) as caught:
        fxzero.Config.from_options({"offload_states": settings})
    assert str(caught.value).startswith(message)


def test_nothing_is_kept_of_an_optimizer_that_is_gone() -> None:
    """Its gradients end with it."""
    late = Training(LATE).run(1)
    assert any(p.gradients is not None for p in delayed._pending[late.optimizer].values())
    count = len(delayed._pending)
    del late
    torch._dynamo.reset()
    gc.collect()
    assert len(delayed._pending) < count


def test_stamps() -> None:
    """A start is the host's, in the step's beginning."""
    (start, *_) = of_role(offloaded(options=LATE, **ONE_PROCESS), Role.START)
    assert stamp_of(start).lane is Lane.HOST


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", ["checkpoint", "state dicts"])
def test_a_run_that_goes_on_counts_on(tmp_path: Path, kind: str, how: str) -> None:
    """The first steps that are not late are those of the run, not those since it was loaded."""
    options = {**LATE, "offload_states": {"delay": 1, "delay_after": 4}}
    first = Training(options, kind).run(2)
    second = Training(options, kind)
    second.losses = list(first.losses)
    if how == "checkpoint":
        fxzero.checkpoint.save(fxzero.TrainState(first.step), tmp_path, step=2).wait()
        fxzero.checkpoint.load(fxzero.TrainState(second.step), tmp_path)
    else:
        second.step.load_state_dict(deepcopy(first.step.state_dict()))
    first.run(5)
    second.run(5)
    assert all(map(torch.equal, first.left(), second.left()))
    anew = Training(options, kind)  # the premise: a count from nothing would be seen
    anew.losses = list(first.losses[:2])
    state = fxzero.TrainState(anew.step, rng=False)
    if how == "checkpoint":
        fxzero.checkpoint.load(state, tmp_path)
        for group in anew.optimizer.param_groups:
            assert group.pop(delayed.NUM_STEPS) == 2
        anew.run(5)
        assert not torch.equal(anew.losses[-1], first.losses[-1])
