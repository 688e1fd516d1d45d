"""What moves between disk, host and device, piece by piece: started by one node, joined by another.

    up = ReadParams(bucket)([w], …); join_upload(up)          read, h2d     w to the device
    s = ReadStates(bucket)([w], [[m], [v]], …)                read   r0 r1 r2 …
    u = StoredUpdate(adamw)([w], [h], [[m], [v]], …, s)       host      u0 u1 u2 …
    d = write_states(s, u, …); join_write(d)                  write        w0 w1 w2 …

A piece goes through all three lanes while others are on their way, so that an update takes as long
as the slowest of them and holds a fixed number of buffers. `ReadStates`, the update and
`write_states` are launched in a row: were compute to wait for the disk between them, it would wait
for reads that wait for buffers which only that update would let go of.

What is not at home (something else looks at its memory, say) is updated where it is.
"""

from __future__ import annotations

import concurrent.futures
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from fxzero._compat import is_fake
from fxzero.errors import DiskError
from fxzero.graph.stamps import Lane
from fxzero.runtime import updates
from fxzero.runtime.copies import Copy, move_up
from fxzero.runtime.disk_arena import Bucket, Place
from fxzero.runtime.disk_buffers import Buffer, Buffers, Ring
from fxzero.runtime.lanes import before_drain, worker
from fxzero.runtime.streams import Event, launching, leaves_open


class Pace:
    """Holds something back to a bandwidth; 0 for as fast as it goes."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._begin = time.perf_counter()
        self._moved = 0

    def moved(self, num_bytes: int) -> None:
        """Return when as many bytes more could have been moved."""
        self._moved += num_bytes
        if self._bytes_per_s:
            left_s = self._begin + self._moved / self._bytes_per_s - time.perf_counter()
            if left_s > 0:
                time.sleep(left_s)


def flat(tensor: Tensor) -> Tensor:
    """A tensor without gaps, element by element in the order of memory: (elements,)."""
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())


class States:
    """A bucket on its way from the disk through an update and back.

    All three lanes get their work at once, in one order for all threads of the process: were one
    thread's update queued behind another's, whose reads wait behind its own, both would wait for
    ever. What the update and the write lack they wait for.
    """

    def __init__(self, place: Place, ring: Ring, bytes_per_s: float) -> None:
        self.place = place
        self._ring = ring
        self._arrived: SimpleQueue[Any] = SimpleQueue()
        self._updated: SimpleQueue[Any] = SimpleQueue()
        self._error: BaseException | None = None
        self._held: set[Buffer] = set()
        self._io: deque[Future[None]] = deque()
        self._lanes_left = 3
        self._lock = threading.Lock()
        self.thread = threading.get_ident()
        """Whose step it is of."""
        self.work: Future[Callable[[], None]] = Future()
        """What the host's lane does."""
        self.write_rate: Future[float] = Future()
        """What the write is held back to, in bytes a second."""
        with _in_one_order:
            read = worker(Lane.READ).submit(lambda: self.read(bytes_per_s))
            self.updated = worker(Lane.HOST).submit(lambda: self.work.result()())
            self.written = worker(Lane.WRITE).submit(lambda: self.write(self.write_rate.result()))
        for lane in (read, self.updated, self.written):
            lane.add_done_callback(lambda done: self._ended(done.exception()))
        _open.add(self)

    def abandon(self) -> None:
        """End lanes that wait for what will not come: an interrupt came between them."""
        why = InterruptedError("the step ended before this update began")
        for lacking in (self.work, self.write_rate):
            if not lacking.done():
                lacking.set_exception(why)

    def read(self, bytes_per_s: float) -> None:
        """Read all pieces, as far as there are buffers."""
        pace = Pace(bytes_per_s)
        for number in range(self.place.num_pieces):
            buffers = [self._take() for _ in self.place.sections]
            pieces = [section.pieces[number] for section in self.place.sections]
            reads = [
                self.place.store.start_reading(piece, buffer.memory)
                for piece, buffer in zip(pieces, buffers, strict=True)
            ]
            self._io += reads
            pace.moved(sum(piece.num_bytes for piece in pieces))
            self._arrived.put((buffers, reads))

    def update(
        self,
        kernel: str,
        grads: Sequence[Tensor],
        steps: list[list[Tensor]],
        group: updates.Group,
        skip: Tensor | None,
    ) -> None:
        """Update each piece once it is there."""
        skipped = skip is not None and bool(skip.item())
        flat_grads = list(map(flat, grads))
        on_slices = updates.ON_SLICES[kernel]
        for own in self.place.slices:
            buffers, reads = _next(self._arrived)
            for read in reads:
                read.result()
            if not skipped and own:
                params, *state = (
                    [
                        buffer.tensor[s.offset : s.offset + s.end - s.begin].view(
                            self.place.layouts[s.tensor].dtype
                        )
                        for s in own
                    ]
                    for buffer in buffers
                )
                sizes = [self.place.layouts[s.tensor].dtype.itemsize for s in own]
                parts = [
                    flat_grads[s.tensor][s.begin // size : s.end // size]
                    for s, size in zip(own, sizes, strict=True)
                ]
                counts = [[part[s.tensor] for s in own] for part in steps]
                on_slices(params, parts, [*state, *counts], group, skip)
            self._updated.put((buffers, skipped))

    def write(self, bytes_per_s: float) -> None:
        """Write each piece once it is updated. What cannot be written is in memory, and nothing is
        wrong with what comes behind it."""
        pace = Pace(bytes_per_s)
        going: deque[tuple[Future[None], Buffer]] = deque()

        def end_one() -> None:
            done, buffer = going.popleft()
            try:
                done.result()
            except DiskError as error:
                self.place.store.failures.append(error)
            self._give(buffer)

        for number in range(self.place.num_pieces):
            buffers, unchanged = _next(self._updated)
            for section, buffer in zip(self.place.sections, buffers, strict=True):
                if unchanged:
                    self._give(buffer)
                    continue
                piece = section.pieces[number]
                write = self.place.store.start_writing(piece, buffer.memory)
                self._io.append(write)
                going.append((write, buffer))
                pace.moved(piece.num_bytes)
            while len(going) > len(self.place.sections):
                end_one()
        while going:
            end_one()

    def _take(self) -> Buffer:
        buffer = self._ring.take(lambda: self._error is not None)
        if buffer is None:
            assert self._error is not None
            raise self._error
        self._held.add(buffer)
        return buffer

    def _give(self, buffer: Buffer) -> None:
        self._held.discard(buffer)
        self._ring.give(buffer)

    def _ended(self, error: BaseException | None) -> None:
        """A lane is done. If it failed, so do the others; after the last one nothing is held."""
        with self._lock:
            self._lanes_left -= 1
            is_last = not self._lanes_left
            if error is not None and self._error is None:
                self._error = error
        if error is not None:
            self._arrived.put(error)
            self._updated.put(error)
            self._ring.wake()
        if is_last:
            concurrent.futures.wait(self._io)
            for buffer in list(self._held):
                self._give(buffer)


_in_one_order = threading.Lock()
_open: weakref.WeakSet[States] = weakref.WeakSet()


def _abandon_all() -> None:
    mine = threading.get_ident()
    for states in [states for states in _open if states.thread == mine]:
        states.abandon()


before_drain.append(_abandon_all)


def _next(queue: SimpleQueue[Any]) -> Any:
    """What a lane before has done.

    Raises:
        BaseException: what has ended it.
    """
    found = queue.get()
    if isinstance(found, BaseException):
        raise found
    return found


class ReadStates:
    """Starts reading a bucket for its update."""

    __module__ = "fxzero.runtime.disk_streams"

    def __init__(self, bucket: Bucket) -> None:
        self.bucket = bucket
        self.__name__ = self.__qualname__ = "read_states"

    def __call__(
        self,
        params: list[Tensor],
        state: list[list[Tensor]],
        buffers: Buffers,
        bytes_per_s: float,
    ) -> States | None:
        """Start; None if some of it is not on disk."""
        place = self.bucket.place
        if place is None or any(map(is_fake, params)):
            return None
        tensors = [params, *state[: len(self.bucket.names)]]
        if not all(place.holds(i, own) for i, own in enumerate(tensors)):
            return None
        return States(place, buffers.states, bytes_per_s)


def taken(states: States | None) -> States | None:
    """What is being read, for the host's lane, which waits for each piece."""
    return states


class StoredUpdate:
    """One of `fxzero.runtime.updates.KERNELS`, run on the host's lane, on what is on disk."""

    __module__ = "fxzero.runtime.disk_streams"
    runs_on_host = True

    def __init__(self, kernel: Callable[..., None], bucket: Bucket) -> None:
        self.kernel = kernel
        self.bucket = bucket
        self.__name__ = self.__qualname__ = f"stored_{kernel.__name__}"

    def __call__(
        self,
        params: list[Tensor],
        grads: list[Tensor],
        state: list[list[Tensor]],
        group: updates.Group,
        scale: Tensor | None,
        skip: Tensor | None,
        states: States | None = None,
    ) -> Future[Any]:
        """Start the update of what `states` param_reads; in place, if it param_reads nothing."""
        if any(map(is_fake, params)):
            done: Future[Any] = Future()
            done.set_result(self.kernel(params, grads, state, group, scale, skip))
            return done
        if states is None:
            return worker(Lane.HOST).submit(
                lambda: self.kernel(params, grads, state, group, scale, skip)
            )
        steps = state[len(self.bucket.names) :]

        def run() -> None:
            own = updates.ready(grads, params, scale)
            if steps:
                with updates.counted(steps[0], skip):
                    states.update(self.kernel.__name__, own, steps, group, skip)
            else:
                states.update(self.kernel.__name__, own, steps, group, skip)

        states.work.set_result(run)
        return states.updated

    def __repr__(self) -> str:
        return self.__name__


def write_states(
    states: States | None, update: Future[Any], buffers: Buffers, bytes_per_s: float
) -> Future[Any]:
    """Start writing what an update leaves."""
    if states is None:
        return update
    states.write_rate.set_result(bytes_per_s)
    return states.written


def join_write(done: Future[Any]) -> None:
    """Wait until what an update has left is on disk. What could not be written is in memory, and
    whoever runs the step says so once it is complete: `DiskStore.failures`."""
    done.result()


class ReadParams:
    """Starts copying some of a bucket's parameters from the disk to the device."""

    __module__ = "fxzero.runtime.disk_streams"

    def __init__(self, bucket: Bucket, keys: Sequence[str]) -> None:
        self.bucket = bucket
        self.wanted = tuple(bucket.keys.index(key) for key in keys)
        self.__name__ = self.__qualname__ = "read_params"

    def __call__(
        self,
        params: list[Tensor],
        dtype: torch.dtype | None,
        device: torch.device | None,
        buffers: Buffers,
        bytes_per_s: float,
    ) -> Copy:
        """Start; as another dtype if one is given, and on a device as `copies.upload` says."""
        made = [torch.empty_like(param, dtype=dtype, device=device) for param in params]
        if any(map(is_fake, params)):
            done: Future[Any] = Future()
            done.set_result(None)
            return Copy(made, params, done)
        place = self.bucket.place
        addresses = place.addresses[0] if place is not None else []
        at_home = place is not None and all(
            param.data_ptr() == addresses[i] for param, i in zip(params, self.wanted, strict=True)
        )

        def run() -> Event | None:
            if at_home:
                assert place is not None
                targets = dict(zip(self.wanted, map(flat, made), strict=True))
                return _read_params(place, targets, buffers.params, bytes_per_s)
            return _copied(list(zip(made, params, strict=True)))

        done = worker(Lane.READ).submit(run)
        leaves_open(Lane.READ, done)
        return Copy(made, params, done)


def read_params_of(bucket: Bucket, keys: tuple[str, ...]) -> ReadParams:
    """What copies some of a bucket's parameters: one for all micro-steps, which then do the
    same."""
    found = bucket.param_reads.get(keys)
    if found is None:
        found = bucket.param_reads[keys] = ReadParams(bucket, keys)
    return found


def _copied(copies: list[tuple[Tensor, Tensor]]) -> Event | None:
    """Copy to the device what a thread of the host has read, on the stream that copies have there,
    if it has streams; then what is returned is reached when all is there."""
    with launching(Lane.H2D) as launched:
        for target, source in copies:
            move_up(target, source)
    return launched.event


def _read_params(
    place: Place, targets: dict[int, Tensor], ring: Ring, bytes_per_s: float
) -> Event | None:
    """Copy some of a place's parameters, as far as there are buffers: they are read ahead of the
    copies, and go back once what was read has been copied.

    Returns:
        Where the last copy is over, if a stream makes them.
    """
    pace = Pace(bytes_per_s)
    read: deque[tuple[int, Buffer, Future[None]]] = deque()
    leaving: deque[tuple[Buffer, Event | None]] = deque()
    last: Event | None = None

    def copy_one() -> None:
        nonlocal last
        number, buffer, done = read[0]
        done.result()
        copies = []
        for s in place.slices[number]:
            if s.tensor in targets:
                dtype = place.layouts[s.tensor].dtype
                source = buffer.tensor[s.offset : s.offset + s.end - s.begin].view(dtype)
                size = dtype.itemsize
                copies.append((targets[s.tensor][s.begin // size : s.end // size], source))
        last = _copied(copies)
        read.popleft()
        leaving.append((buffer, last))

    def give_one() -> None:
        buffer, copied = leaving.popleft()
        if copied is not None:
            copied.synchronize()
        ring.give(buffer)

    try:
        for number, piece in enumerate(place.sections[0].pieces):
            if not any(s.tensor in targets for s in place.slices[number]):
                continue
            if not ring.num_free:
                copy_one()
                give_one()
            buffer = ring.take()
            assert buffer is not None
            read.append((number, buffer, place.store.start_reading(piece, buffer.memory)))
            pace.moved(piece.num_bytes)
        while read:
            copy_one()
    finally:
        while leaving:
            give_one()
        for _, buffer, done in read:
            concurrent.futures.wait([done])
            ring.give(buffer)
    return last
