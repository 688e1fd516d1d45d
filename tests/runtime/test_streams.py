"""Whole steps on a device that is behind the thread that launches: nothing is ordered by luck.

The device is simulated: see `tests.simulated_streams`. Every read, write and reuse of memory in the
steps below is ordered by events, futures and queues, or is named.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxzero
from fxzero import HostMemoryError
from fxzero.graph.stamps import Lane
from fxzero.runtime import copies, streams
from fxzero.runtime.arena import HostArena
from fxzero.runtime.lanes import drain, worker
from fxzero.runtime.residents import Resident, _residents, release
from tests.parity.test_offload import EAGER, VALUES, Training, held_by
from tests.races import thread
from tests.simulated_streams import World, simulated_streams

CPU = torch.device("cpu")
HOST_STEP = {**EAGER, "memory": "states_host"}


@pytest.fixture
def world() -> Iterator[World]:
    """A device in this test alone."""
    with simulated_streams() as found:
        yield found


def held(training: Any) -> list[Tensor]:
    """What a script can lay hands on between two steps."""
    parameters = list(training.model.parameters())
    return [t for p in parameters for t in (p, *training.optimizer.state[p].values())]


# -- whole steps

CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("states_host", {}, {}),
    ("states_host", VALUES, {"clip_grad_norm": 0.1, "micro_batches": 4, "precision": "bf16"}),
    ("states_host", {"offload_states": {"delay": 1}}, {"clip_grad_norm": 0.1}),
    ("states_host, device", {}, {"clip_grad_norm": 0.1, "precision": "bf16"}),
    ("all_host", VALUES, {"precision": "bf16"}),
    ("all_host, device", {}, {}),
    ("l2l", {}, {"clip_grad_norm": 0.1}),
    ("infinity", {**VALUES, "disk": {"chunk_bytes": 4096, "depth": 1}}, {}),
]


@pytest.mark.parametrize(("memory", "more", "rest"), CASES)
def test_nothing_in_a_step_races(
    world: World, memory: str, more: dict[str, Any], rest: dict[str, Any]
) -> None:
    """Nor with what a script does between two steps."""
    options = {**EAGER, **held_by(memory), **more}
    training = Training("gpt", "adamw", None, options, **rest)
    for _ in range(2):
        training.run(1)
        world.used_by_user(held(training))
    assert world.races.found == []
    assert world.races.num_accesses > 500


class Small:
    """A small model in training, by either door."""

    def __init__(self, options: dict[str, Any], *, offload: bool = False, **rest: Any) -> None:
        torch._dynamo.reset()
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 8), nn.Linear(8, 4))
        if offload:
            fxzero.shard(self.model, offload=True)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05, fused=True)
        self.options = options
        self.rest = rest
        self.seen: list[Tensor] = []

    @property
    def batch(self) -> tuple[Tensor, Tensor]:
        """Another one each time."""
        torch.manual_seed(len(self.seen))
        return torch.randn(8, 12), torch.randn(8, 4)

    def steps(self, between: Callable[[], None] = lambda: None) -> Small:
        """Whole steps."""
        mse = nn.functional.mse_loss
        step = fxzero.compile_step(
            self.model, self.optimizer, mse, options=self.options, **self.rest
        )
        for _ in range(3):
            self.seen.append(step(*self.batch).loss)
            between()
        return self

    def loop(self, between: Callable[[], None] = lambda: None) -> Small:
        """The ordinary loop."""
        compiled = torch.compile(self.model, backend="fxzero", options=EAGER)
        for _ in range(3):
            x, y = self.batch
            loss = nn.functional.mse_loss(compiled(x), y)
            between()
            loss.backward()
            between()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.seen.append(loss.detach())
        return self

    def left(self) -> list[Tensor]:
        """All that there is to compare."""
        return [t.detach().clone() for t in (*self.seen, *held(self))]


def change(small: Small) -> Callable[[], None]:
    """Something that a script writes between two steps, unseen by autograd."""

    def write() -> None:
        small.model[0].weight.data.mul_(0.5)  # type: ignore[operator, union-attr]

    return write


@pytest.mark.parametrize(("delay", "precision"), [(0, None), (1, "bf16")])
def test_what_a_script_writes_is_what_the_next_step_begins_with(
    delay: int, precision: str | None
) -> None:
    """What was sent to the device is compared with it, on the host, and sent again."""
    options = {**HOST_STEP, "offload_states": {"delay": delay}}
    plain = Small(options, precision=precision)
    plain.steps(change(plain))
    with simulated_streams() as world:
        small = Small(options, precision=precision)
        small.steps(change(small))
        found = list(_residents[small.optimizer].values())
    assert all(map(torch.equal, plain.left(), small.left()))
    assert world.races.found == []
    assert all(a is not b for r in found for a, b in zip(r.tensors, r.sent, strict=True))


def test_the_loop_and_its_gradients() -> None:
    """When a graph has returned, nothing reads parameters any more, and gradients are there."""
    plain = Small({}, offload=True).loop()
    with simulated_streams() as world:
        small = Small({}, offload=True)

        def between() -> None:
            grads = [p.grad for p in small.model.parameters() if p.grad is not None]
            world.used_by_user([*small.model.parameters(), *grads])

        small.loop(between)
    assert world.races.found == []
    assert all(map(torch.equal, plain.left(), small.left()))


def test_the_main_thread_waits_for_the_device_when_a_graph_is_over(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not before: it launches all of the step without a stop."""
    log: list[str] = []
    wait, submit = world.event.synchronize, type(worker(Lane.HOST)).submit
    main = thread()

    def waits(self: Any) -> None:
        if thread() == main:
            log.append("waits")
        wait(self)

    def submits(*args: Any, **kwargs: Any) -> Any:
        log.append("submits")
        return submit(*args, **kwargs)

    monkeypatch.setattr(world.event, "synchronize", waits)
    monkeypatch.setattr(type(worker(Lane.HOST)), "submit", submits)
    Small({**HOST_STEP, "memory": "all_host"}).steps()
    steps = "".join({"waits": "w", "submits": "s"}[word] for word in log).split("w")
    assert [len(step) for step in steps if step] == [len(steps[0])] * 3
    assert len(steps[0]) > 8


# -- single copies


def run(graph: Callable[[], Any]) -> None:
    """What runs as a graph does."""
    with torch.no_grad(), streams.computing_on(CPU):
        graph()


def host_tensor(world: World, value: Tensor) -> Tensor:
    """The same in memory of the host."""
    return world.pinned_like(value, None).copy_(value)


def test_numbers_of_the_device_that_an_update_reads(world: World) -> None:
    """Nobody but the host's lane waits for their copy: that holds them until then."""
    seen = list[float]()
    params = [torch.ones(4)]

    may_wait = threading.Event()

    def graph() -> None:
        worker(Lane.HOST).submit(may_wait.wait)
        scale = torch.full((2,), 0.5) * 1.0
        (number,) = copies.arrived(copies.send_home([scale], 0.0))
        del scale
        torch.ones(2).mul_(3)  # takes whatever memory is free
        may_wait.set()
        update = copies.HostUpdate(lambda p, n: seen.append(float(n[0])))(params, number)
        copies.join_updates([update])

    run(graph)
    assert seen == [0.5]
    assert world.races.found == []


def test_the_hosts_lane_begins_behind_compute(world: World) -> None:
    """It sees all that compute has waited for, were it only events: here a copy of what it
    changes."""
    param = host_tensor(world, torch.ones(4))

    def graph() -> None:
        (mine,) = copies.join_upload(copies.upload([param], None, None, 0.0))
        copies.join_updates([copies.HostUpdate(lambda params: params[0].mul_(2))([param])])
        mine.mul_(2)

    run(graph)
    assert param.eq(2).all()
    assert world.races.found == []


def test_memory_is_given_away_behind_the_copy_that_reads_it(world: World) -> None:
    """A gradient's, where the host's lane has not waited for it yet."""
    may_wait = threading.Event()

    def graph() -> None:
        worker(Lane.HOST).submit(may_wait.wait)
        down = copies.send_home([torch.ones(4) * 2], 0.0)
        copies.arrived(down)
        copies.landed(down)
        worker(Lane.D2H).submit(lambda: None).result()  # its lane holds it no longer
        torch.ones(4).mul_(2)  # takes whatever memory is free
        may_wait.set()

    run(graph)
    assert world.races.found == []


def test_a_copy_that_is_let_go_of_before_anybody_has_waited(world: World) -> None:
    """Its memory would be filled by the next operator while it is on its way: that is named."""
    source = host_tensor(world, torch.ones(4))

    def graph() -> None:
        copies.upload([source], None, None, 0.0)
        worker(Lane.H2D).submit(lambda: None).result()  # its lane holds it no longer
        torch.ones(4).mul_(2)

    run(graph)
    (found,) = world.races.found
    assert "stream h2d writes" in found
    assert "let go of before stream compute waited" in found


def test_a_copy_that_nobody_has_waited_for(world: World) -> None:
    """Whoever reads it is named, beside who writes it."""
    source = host_tensor(world, torch.ones(4))
    kept: list[Any] = []

    def graph() -> None:
        kept.append(copy := copies.upload([source], None, None, 0.0))
        copy.done.result()
        kept.append(copy.tensors[0] * 2)

    run(graph)
    (found,) = world.races.found
    assert "stream h2d writes in copy_.default, move_up of copies.py" in found
    assert "stream compute reads in mul.Tensor" in found


def test_a_script_that_writes_while_a_copy_runs(world: World) -> None:
    """Outside of a graph nothing waits for it."""
    source = host_tensor(world, torch.ones(4))
    with streams.computing_on(CPU):
        copies.upload([source], None, None, 0.0).done.result()
        world.used_by_user([source])
    (found,) = world.races.found
    assert "stream h2d reads" in found
    assert "writes in a script" in found


def test_copies_that_lie_otherwise_than_their_source(world: World) -> None:
    """Both ways they are laid out before they travel, and ordered all the same."""
    matrix = torch.arange(6.0).reshape(2, 3)
    found: list[Tensor] = []

    def graph() -> None:
        down = copies.send_home([matrix.t() * 1], 0.0)
        there = copies.join_download(down)[0]
        place = streams.pinned_like(matrix)
        back = copies.bring_back([there.t() * 1], [place], None, 0.0)  # of other strides
        copies.landed(back)
        found.append(place)

    run(graph)
    assert torch.equal(found[0], matrix)
    assert world.races.found == []


def test_copies_of_residents_outlive_them(world: World) -> None:
    """What is sent for a step that never comes keeps its memory until it is there."""
    param = host_tensor(world, torch.ones(4))
    resident = Resident("some")

    def graph() -> None:
        copies.join_upload(resident.take([param], torch.float32, None, 0.0))
        over = worker(Lane.HOST).submit(lambda: None)
        resident.launch([param], over, torch.float32, None, 0.0)
        worker(Lane.H2D).submit(lambda: None).result()
        resident.tensors = resident.sent = []
        torch.ones(4).mul_(2)

    run(graph)
    assert world.races.found == []


def test_what_is_sent_again_waits_until_what_was_sent_has_left(world: World) -> None:
    """A script may have written to a parameter while its copy is still on its way."""
    param = host_tensor(world, torch.ones(4))
    resident = Resident("some")

    def graph() -> None:
        copies.join_upload(resident.take([param], torch.float32, None, 0.0))
        over = worker(Lane.HOST).submit(lambda: None)
        resident.launch([param], over, torch.float32, None, 0.0)
        worker(Lane.H2D).submit(lambda: None).result()

    run(graph)
    param.mul_(2)
    run(lambda: copies.join_upload(resident.take([param], torch.float32, None, 0.0)))
    assert resident.num_stale == 1
    assert resident.tensors[0].eq(2).all()
    assert world.races.found == []


def test_copies_are_let_go_of_with_their_graphs(world: World) -> None:
    """By the optimizer that they are of."""
    small = Small(HOST_STEP).steps()
    release(small.optimizer)
    found = list(_residents[small.optimizer].values())
    assert found
    assert all(resident.tensors == resident.sent == [] for resident in found)


def test_a_lane_that_is_held_back_waits_itself(world: World) -> None:
    """For what it begins behind, and for what it has launched: the clock runs from there."""
    source = host_tensor(world, torch.ones(1000))
    begun = threading.Event()

    def graph() -> None:
        copy = copies.upload([source], None, None, 1e6)
        begun.set()
        copies.join_upload(copy)

    run(graph)
    assert begun.is_set()
    world.used_by_user([source])
    assert world.races.found == []


# -- memory that the system refuses


def test_a_block_that_cannot_be_pinned(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Is an error before anything has moved there, with what to do."""

    def refuse(memory: Tensor) -> Callable[[], None]:
        raise RuntimeError("no such pages")

    monkeypatch.setattr(world, "pin", refuse)
    small = Small(HOST_STEP)
    before = [p.data_ptr() for p in small.model.parameters()]
    with pytest.raises(HostMemoryError, match=r"\d+ bytes of pool host.*ulimit -l.*share") as told:
        small.steps()
    assert "no such pages" in str(told.value)
    assert before == [p.data_ptr() for p in small.model.parameters()]


def test_a_block_is_pinned_as_long_as_its_arena_lives(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not as long as the last tensor that is in it."""
    log = list[str]()
    monkeypatch.setattr(world, "pin", lambda memory: lambda: log.append("over"))
    arena = HostArena({}, 64, CPU)
    staging = arena.staging
    assert log == []
    del arena
    assert log == ["over"]
    assert staging.numel() == 64


def test_lanes_rest_with_their_streams(world: World) -> None:
    """Behind a step that failed halfway nobody holds what is on its way."""
    source = host_tensor(world, torch.ones(4))

    def graph() -> None:
        copies.upload([source], None, None, 0.0)
        raise ArithmeticError

    with pytest.raises(ArithmeticError):
        run(graph)
    drain()
    world.used_by_user([source])
    assert world.races.found == []
