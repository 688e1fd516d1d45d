"""A CPU that is behind the thread that launches, as a GPU is: its streams, events and memory.

    with simulated_streams() as races:
        step(x)                      computes what it computes anyway, in this thread's own time
    assert races.found == []         and nothing that it did had to be in that order by luck

Operators run when they are called, so that values are right. By the books they belong to a stream,
which the calling thread is ahead of, or to the thread itself, where they use the host's memory
alone. Every access is noted; what orders two of them are events, futures and queues, and nothing
else: see `tests.races`. What of memory is the host's is said by who has it pinned. Memory of the
device that nobody holds any more is given out again at once, as by the fastest of allocators.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fxzero.graph.stamps import Lane
from fxzero.runtime import lanes, streams
from tests.handed_over import buffers_hand_over, disks_fill, futures_hand_over, queues_hand_over
from tests.races import Clock, Memory, Races, thread

COMPUTE = "stream compute"
_local = threading.local()


class Event:
    """A point of a stream."""

    def __init__(self, world: World, known: Clock) -> None:
        self.world = world
        self.known = known

    def synchronize(self) -> None:
        """The calling thread knows what the stream did before it."""
        self.world.races.learn(thread(), self.known)


class Stream:
    """What is done one after the other, some time after it was launched."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name

    def wait_event(self, event: Event) -> None:
        """What is launched from now on knows what another stream did before the event."""
        self.world.hand_out_again()
        self.world.races.learn(self.name, event.known)

    def synchronize(self) -> None:
        """The calling thread knows all that it has done."""
        self.world.races.learn(thread(), self.world.races.hand_over(self.name))


class World(TorchDispatchMode):
    """The streams of a device, and all memory that was used."""

    def __init__(self, races: Races) -> None:
        super().__init__()
        self.races = races
        self.event = Event
        self._streams: dict[Lane, Stream] = {}
        self._compute = Stream(self, COMPUTE)
        self._pinned: list[tuple[int, int, Memory]] = []
        self._known: dict[int, tuple[Any, Memory]] = {}
        """By storage: itself, so that no other one is taken for it, and what is known of it."""

    # -- fxzero.runtime.streams.Streams

    def current(self) -> Stream:
        """The stream on which the calling thread computes."""
        return self._compute

    def of(self, lane: Lane) -> Stream:
        """A lane's own."""
        with self.races.lock:
            return self._streams.setdefault(lane, Stream(self, f"stream {lane.value}"))

    def made(self) -> list[Stream]:
        """Those of lanes."""
        return list(self._streams.values())

    @contextlib.contextmanager
    def using(self, stream: Stream | None) -> Iterator[None]:
        """Operators of the calling thread go to a stream, or are its own."""
        before = getattr(_local, "stream", None), getattr(_local, "is_inside", False)
        _local.stream, _local.is_inside = stream, True
        try:
            with contextlib.nullcontext() if before[1] else self:
                yield
        finally:
            _local.stream, _local.is_inside = before

    def record(self, stream: Stream) -> Event:
        """An event where a stream is now; it is launched behind what the thread has done."""
        self.races.learn(stream.name, self.races.hand_over(thread()))
        return Event(self, self.races.hand_over(stream.name))

    def outlives(self, tensor: Tensor, stream: Stream) -> None:
        """Who hands its memory out again waits for the stream."""
        self._memory_of(tensor).kept_for.add(stream.name)

    def pinned_like(self, tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
        """Memory of the host."""
        with torch.utils._python_dispatch._disable_current_modes():
            made = torch.empty_like(tensor, dtype=dtype)
        self._know(made, Memory("pinned memory", on_host=True))
        return made

    def return_pinned(self) -> None:
        """Nothing is kept."""

    def pin(self, memory: Tensor) -> Callable[[], None]:
        """A block of the host's."""
        begin = memory.data_ptr()
        self._pinned.append((begin, begin + memory.nbytes, Memory("the block", on_host=True)))
        return lambda: None

    # -- what operators use

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator, and note what it uses."""
        kwargs = kwargs or {}
        with self.races.lock:
            self.hand_out_again()
        result = func(*args, **kwargs)
        with self.races.lock:
            self._note(func, args, kwargs, result)
        return result

    def _note(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        read, written = _used(func, args, kwargs)
        made = [t for t in _tensors(result) if not _shares(t, [*read, *written])]
        if _only_looks(func):
            read = []
        is_empty = "empty" in func.__name__
        if is_empty:
            read = []
        stream = _local.stream
        on_host = stream is None or (
            stream is not self._compute
            and not is_empty
            and all(self._memory_of(t).on_host for t in (*read, *written))
        )
        for tensor in made:
            self._know(tensor, Memory(f"what {func.__name__} makes", on_host=on_host))
        for tensor in _tensors(result):
            weakref.finalize(tensor, self._let_go, self._memory_of(tensor)).atexit = False
        used = [(t, False) for t in read] + [(t, True) for t in written]
        used += [] if is_empty else [(t, True) for t in made]
        who = self._who(func, [t for t, _ in used])
        where = f"{func.__name__}, {_place()}"
        is_checked = "residents.py" in where
        for tensor, writes in used:
            if who != thread() or self._memory_of(tensor).on_host:
                self.use(tensor, who, writes=writes, where=where, is_checked=is_checked)

    def _who(self, func: Any, used: list[Tensor]) -> str:
        """Who does what uses some tensors: a stream, unless all of it is the host's."""
        stream = _local.stream
        memories = [self._memory_of(tensor) for tensor in used]
        if stream is not None and not all(memory.on_host for memory in memories):
            self.races.learn(stream.name, self.races.hand_over(thread()))
            return stream.name
        for tensor, memory in zip(used, memories, strict=True):
            if not memory.on_host and tensor.dim():  # a GPU's numbers are copied: numbers_on_host
                self.races.forbid(f"{thread()} itself uses {memory.name} in {func}, {_place()}")
        return thread()

    def used_by_user(self, tensors: Iterable[Tensor]) -> None:
        """Somebody reads and writes some of the host's tensors between two steps."""
        _local.stream = None
        for tensor in tensors:
            if self._memory_of(tensor).on_host:
                self.use(tensor, thread(), writes=True, where="a script", is_users=True)

    def use(self, tensor: Tensor, who: str, *, writes: bool, **more: Any) -> None:
        """Note an access."""
        if tensor.numel():
            last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
            begin = tensor.data_ptr()
            span = begin, begin + (last + 1) * tensor.element_size()
            self.races.use(self._memory_of(tensor), who, span, writes=writes, **more)

    def _let_go(self, memory: Memory) -> None:
        self.races.let_go(memory, thread())

    def hand_out_again(self) -> None:
        """Give what nobody holds to whoever comes next on the stream that computes."""
        with self.races.lock:
            for identity, (storage, memory) in list(self._known.items()):
                if not memory.on_host and torch._C._storage_Use_Count(identity) <= 1:
                    self.races.hand_out(memory, COMPUTE)
                    del self._known[identity], storage

    def _memory_of(self, tensor: Tensor) -> Memory:
        address = tensor.data_ptr()
        for begin, end, memory in self._pinned:
            if begin <= address < end:
                return memory
        storage = tensor.untyped_storage()
        if storage._cdata not in self._known:
            host = _local.stream is not self._compute
            self._know(tensor, Memory("what was there before", on_host=host))
        return self._known[storage._cdata][1]

    def _know(self, tensor: Tensor, memory: Memory) -> None:
        storage = tensor.untyped_storage()
        self._known[storage._cdata] = storage, memory


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [t for v in value for t in _tensors(v)] if isinstance(value, (list, tuple)) else []


def _used(func: Any, args: Any, kwargs: Any) -> tuple[list[Tensor], list[Tensor]]:
    """What an operator reads, and what it writes to."""
    read: list[Tensor] = []
    written: list[Tensor] = []
    for i, argument in enumerate(func._schema.arguments):
        value = args[i] if i < len(args) else kwargs.get(argument.name)
        writes = argument.alias_info is not None and argument.alias_info.is_write
        (written if writes else read).extend(_tensors(value))
    return read, written


def _only_looks(func: Any) -> bool:
    """Whether an operator returns views, and touches no memory."""
    returns = func._schema.returns
    return bool(returns) and all(
        r.alias_info is not None and not r.alias_info.is_write for r in returns
    )


def _shares(tensor: Tensor, others: list[Tensor]) -> bool:
    mine = tensor.untyped_storage()._cdata
    return any(other.untyped_storage()._cdata == mine for other in others)


def _place() -> str:
    """Where in the runtime, or in a graph, the calling thread is."""
    frame = sys._getframe(2)
    while frame.f_back is not None:
        file = frame.f_code.co_filename
        if "/fxzero/runtime/" in file or "<eval_with_key>" in file:
            return f"{frame.f_code.co_name} of {file.rpartition('/')[2]}:{frame.f_lineno}"
        frame = frame.f_back
    return "?"


@contextlib.contextmanager
def simulated_streams() -> Iterator[World]:
    """Let the CPU be behind the threads that launch, for graphs that run inside."""
    races = Races()
    world = World(races)

    def writes(tensor: Tensor, who: str, where: str) -> None:
        world.use(tensor, who, writes=True, where=where)

    with (
        futures_hand_over(races),
        disks_fill(races, writes),
        buffers_hand_over(races),
        queues_hand_over(races),
        mock.patch.dict(lanes._workers, clear=True),
        mock.patch.dict(streams.MAKERS, {"cpu": lambda _: world}),
        mock.patch.dict(streams._made, clear=True),
    ):
        try:
            yield world
        finally:
            lanes.drain()
