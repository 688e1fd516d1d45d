"""Work in lanes, and copies between pools: its order, who waits for whom, and what goes wrong."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import fxzero
from fxzero.graph.stamps import BESIDE_COMPUTE, Lane
from fxzero.runtime import copies
from fxzero.runtime.lanes import Worker, drain, worker
from tests.stepping import EAGER
from tests.tracing import Chain

LANES = sorted(BESIDE_COMPUTE)
SOON = 5.0
"""Seconds after which a test gives up waiting."""


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    """No lane works on for another test."""
    yield
    drain()


@pytest.fixture
def num_threads() -> Iterator[Callable[[int], None]]:
    """Sets how many cores a kernel of this thread may use, until the test ends."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


class Gate:
    """Work that waits until the test lets it go on."""

    def __init__(self) -> None:
        self.open = threading.Event()

    def __call__(self) -> None:
        """Wait."""
        assert self.open.wait(SOON), "nobody opened the gate"


def takes(seconds: float, action: Callable[[], object]) -> bool:
    """Whether an action takes as long as it should, by a fifth; on a busy machine in one of three
    turns, and never shorter."""
    for _ in range(3):
        begin = time.perf_counter()
        action()
        taken = time.perf_counter() - begin
        assert taken > 0.95 * seconds
        if taken < 1.2 * seconds:
            return True
    return False


# -- a lane


@pytest.mark.parametrize("lane", LANES)
def test_a_lane_does_what_it_is_given_in_that_order(lane: Lane) -> None:
    """One after the other."""
    gate, done = Gate(), list[int]()
    worker(lane).submit(gate)
    futures = [worker(lane).submit(partial(done.append, i)) for i in range(20)]
    assert done == []
    gate.open.set()
    futures[-1].result(SOON)
    assert done == list(range(20))


def test_lanes_run_beside_each_other() -> None:
    """Each waits until all have come."""
    together = threading.Barrier(len(LANES))
    futures = [worker(lane).submit(lambda: together.wait(SOON)) for lane in LANES]
    assert sorted(future.result(SOON) for future in futures) == list(range(len(LANES)))


def test_a_lane_of_a_process_is_one_thread() -> None:
    """Whoever asks for it."""
    found: list[Worker] = []
    askers = [threading.Thread(target=lambda: found.append(worker(Lane.HOST))) for _ in range(8)]
    for asker in askers:
        asker.start()
    for asker in askers:
        asker.join()
    assert len(set(found)) == 1
    names = {worker(Lane.HOST).submit(threading.current_thread).result(SOON).name for _ in "ab"}
    assert len(names) == 1
    assert threading.current_thread().name not in names


@pytest.mark.parametrize("rate", [1e6, 4e6])
def test_a_throttle_holds_a_lane_back(rate: float) -> None:
    """To so many bytes a second: all that it is given together."""

    def submit() -> None:
        futures = [worker(Lane.H2D).submit(lambda: None, int(rate * 0.1), rate) for _ in range(3)]
        futures[-1].result(SOON)

    assert takes(0.3, submit)


def test_a_throttle_is_no_slower_than_it_says() -> None:
    """The time that the work itself takes counts."""
    lane = worker(Lane.H2D)
    assert takes(0.3, lambda: lane.submit(lambda: time.sleep(0.2), 300_000, 1e6).result(SOON))


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_lane_uses_as_many_cores_as_who_asked(
    num_threads: Callable[[int], None], count: int
) -> None:
    """A thread of its own begins with another number."""
    num_threads(count)
    assert worker(Lane.HOST).submit(torch.get_num_threads).result(SOON) == count
    assert torch.get_num_threads() == count


def test_a_lane_records_nothing_for_autograd() -> None:
    """It changes leaves in place, whatever mode its caller is in."""
    leaf = torch.ones(2, requires_grad=True)
    assert torch.is_grad_enabled()
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            assert worker(Lane.HOST).submit(torch.is_grad_enabled).result(SOON) is False
    worker(Lane.HOST).submit(lambda: leaf.add_(1)).result(SOON)
    assert leaf.tolist() == [2, 2]
    assert leaf.grad_fn is None
    assert torch.is_grad_enabled()


# -- what goes wrong


class LostError(RuntimeError):
    """What a test lets happen."""


def lose() -> None:
    """Fail."""
    raise LostError("lost")


@pytest.mark.parametrize("lane", LANES)
def test_an_error_arrives_at_who_waits(lane: Lane) -> None:
    """What comes behind it may need what was not done, and fails alike, until the lane rests."""
    future = worker(lane).submit(lose)
    behind = worker(lane).submit(lambda: "done")
    for waiting in (future, behind):
        with pytest.raises(LostError):
            waiting.result(SOON)
    drain()
    assert worker(lane).submit(lambda: "done").result(SOON) == "done"


def test_an_update_behind_a_copy_that_failed_changes_nothing() -> None:
    """It would read what was there before."""
    copy = copies.Copy([torch.zeros(2)], [], worker(Lane.D2H).submit(lose))
    arrived = copies.arrived(copy)
    ran: list[object] = []
    update = copies.HostUpdate(lambda *args: ran.append(args))([torch.ones(2)], arrived)
    with pytest.raises(LostError):
        copies.join_updates([update])
    assert not ran


def test_draining_waits_for_every_lane() -> None:
    """Where each waits for one before it, and one has failed."""
    gate, done = Gate(), list[str]()
    down = worker(Lane.D2H).submit(gate)
    failed = worker(Lane.D2H).submit(lose)
    update = worker(Lane.HOST).submit(down.result)
    worker(Lane.H2D).submit(update.result)
    worker(Lane.H2D).submit(lambda: done.append("up"))
    threading.Timer(0.05, gate.open.set).start()
    drain()
    assert done == ["up"]
    assert failed.done()


def test_a_step_that_fails_halfway_leaves_no_lane_at_work() -> None:
    """An update on the host fails: the step says so, and the next one trains."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Chain(3, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    step = fxzero.compile_step(model, optimizer, options={**EAGER, "memory": "states_host"})
    x = torch.randn(4, 8)
    step(x)
    (group,) = optimizer.param_groups
    betas, group["betas"] = group["betas"], "none"
    with pytest.raises((TypeError, ValueError)):
        step(x)
    for lane in LANES:
        assert worker(lane)._queue.empty()
    group["betas"] = betas
    before = [p.detach().clone() for p in model.parameters()]
    assert torch.isfinite(step(x).loss)
    after = [p.detach() for p in model.parameters()]
    assert not any(map(torch.equal, before, after))
    torch._dynamo.reset()


# -- copies


def test_a_copy_to_the_device_is_another_tensor_of_the_dtype_that_was_asked_for() -> None:
    """With the strides that it had."""
    source = torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    (made,) = copies.join_upload(copies.upload([source], torch.bfloat16, None, 0.0))
    assert torch.equal(made, source.bfloat16())
    assert made.stride() == source.stride()
    assert made.data_ptr() != source.data_ptr()


def test_a_copy_from_the_device_is_where_it_was_told_to_be() -> None:
    """In the staging area, with its parameter's strides."""
    staging = torch.zeros(512, dtype=torch.uint8)
    grads = [torch.randn(4, 2), torch.randn(3).double()]
    like = [torch.empty(2, 4).t(), torch.empty(3).double()]
    copy = copies.download(list(grads), like, staging, [64, 256], [g.dtype for g in grads], [], 0.0)
    copies.landed(copy)
    for tensor, grad, other, offset in zip(copy.tensors, grads, like, [64, 256], strict=True):
        assert torch.equal(tensor, grad)
        assert tensor.stride() == other.stride()
        assert tensor.data_ptr() == staging.data_ptr() + offset
    own = torch.cat([torch.arange(64, 96), torch.arange(256, 280)])
    rest = staging.clone()
    rest[own] = 0
    assert not rest.any()


def test_the_hosts_lane_waits_for_what_arrives() -> None:
    """Compute does not: it goes on while a copy and an update are on their way."""
    gate, seen = Gate(), list[list[float]]()

    def kernel(params: list[Tensor], grads: list[Tensor]) -> None:
        seen.append(grads[0].tolist())

    worker(Lane.D2H).submit(gate)
    staging = torch.zeros(64, dtype=torch.uint8)
    copy = copies.download([torch.ones(2)], [torch.ones(2)], staging, [0], [torch.float32], [], 0.0)
    update = copies.HostUpdate(kernel)([torch.ones(2)], copies.arrived(copy))
    time.sleep(0.05)
    assert not update.done()
    gate.open.set()
    copies.join_updates([update])
    assert seen == [[1, 1]]


def test_landing_waits_for_the_copy_and_lets_go_of_what_was_copied() -> None:
    """The device's memory, until then, is held."""
    gate = Gate()
    worker(Lane.D2H).submit(gate)
    grad = torch.ones(1000)
    there = weakref.ref(grad)
    staging = torch.zeros(4000, dtype=torch.uint8)
    copy = copies.download([grad], [grad], staging, [0], [torch.float32], [], 0.0)
    del grad
    gc.collect()
    assert there() is not None
    threading.Timer(0.05, gate.open.set).start()
    copies.landed(copy)
    assert copy.done.done()
    gc.collect()
    assert there() is None
    assert copy.tensors[0].eq(1).all()


def test_a_join_waits_for_all_updates_and_tells_of_errors() -> None:
    """In whichever of them."""
    gate, done = Gate(), list[int]()
    fine = copies.HostUpdate(lambda params: (gate(), done.append(1)))([torch.ones(1)])  # type: ignore[arg-type, func-returns-value]
    threading.Timer(0.05, gate.open.set).start()
    copies.join_updates([fine])
    assert done == [1]
    failing = copies.HostUpdate(lambda params: lose())([torch.ones(1)])
    with pytest.raises(LostError):
        copies.join_updates([fine, failing])


@pytest.mark.parametrize(("dtype", "seconds"), [(torch.float32, 0.4), (torch.bfloat16, 0.2)])
def test_copies_are_held_back_by_their_bytes(dtype: torch.dtype, seconds: float) -> None:
    """Of what is written: half of them, of a parameter that is cast."""
    source = torch.ones(100_000)
    assert takes(seconds, lambda: copies.join_upload(copies.upload([source], dtype, None, 1e6)))


def test_fake_tensors_are_copied_at_once() -> None:
    """A lane's thread knows nothing of the mode that they belong to."""
    with FakeTensorMode():
        tensor, staging = torch.ones(4), torch.empty(64, dtype=torch.uint8)
        up = copies.upload([tensor], torch.bfloat16, None, 1.0)
        down = copies.download([tensor], [tensor], staging, [0], [tensor.dtype], [], 1.0)
        update = copies.HostUpdate(lambda params: params[0].add_(1))([tensor])
        done: list[Future[Any]] = [up.done, down.done, update]
        assert all(future.done() for future in done)
        assert copies.join_upload(up)[0].dtype is torch.bfloat16
