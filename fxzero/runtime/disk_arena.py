"""The disk's share of what does not stay on the device: tensors whose memory is in scratch files.

    bucket      w, b                     one update
    sections    [w b] [m_w m_b] [v_w v_b]    parameters, and each kind of state, laid out alike
    pieces      the same stretch of each section is read, updated and written together

As on the host (`fxzero.runtime.arena`) the objects stay the model's and the optimizer's own: their
memory is the mapping of a store, so that whoever reads, saves or loads them sees nothing of it.
Numbers that count steps are not worth a disk, and stay in memory.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from fxzero._compat import shares_memory, trim_heap
from fxzero.disk.scratch import BLOCK, DiskSettings
from fxzero.disk.store import DiskStore, Section, in_blocks
from fxzero.graph.lanes import aligned
from fxzero.runtime.arena import Home, whole
from fxzero.runtime.disk_buffers import Buffers
from fxzero.sharding.host import HOST
from fxzero.transfer import Form

log = logging.getLogger("fxzero")


_TRIM_AT = 64 << 20
"""Bytes that are moved before the system gets back what they took."""


@dataclass(frozen=True)
class Slice:
    """The part of one tensor that is in a piece."""

    tensor: int
    """Which of the section's."""
    begin: int
    """In the tensor, in bytes."""
    end: int
    offset: int
    """In the piece."""


class Bucket:
    """Parameters that are updated together, with their state: what graphs know of it.

    Args:
        keys: the parameters'.
        names: of their state's tensors, those that are as large as a parameter.
    """

    def __init__(self, keys: tuple[str, ...], names: tuple[str, ...]) -> None:
        self.keys = keys
        self.names = names
        self.place: Place | None = None
        """Where it is on disk, once something has been moved there."""
        self.param_reads: dict[tuple[str, ...], Any] = {}
        """By parameters, what copies them to the device."""

    @property
    def kinds(self) -> tuple[str, ...]:
        """Names of its sections; "" is the parameters'."""
        return ("", *self.names)


class Place:
    """Where a bucket is on disk.

    Args:
        sections: one for each of its kinds.
        layouts: of the parameters, and of each kind of state alike.
    """

    def __init__(
        self, store: DiskStore, sections: Sequence[Section], layouts: Sequence[Form]
    ) -> None:
        self.store = store
        self.sections = tuple(sections)
        self.layouts = tuple(layouts)
        self.begins: list[int] = []
        """Of each tensor in its section."""
        end = 0
        for layout in layouts:
            self.begins.append(end)
            end += aligned(layout.num_bytes)
        self.addresses: list[list[int]] = []
        """By section, where each tensor lies in memory."""

    @property
    def num_pieces(self) -> int:
        """Of each section."""
        return len(self.sections[0].pieces)

    @cached_property
    def slices(self) -> list[list[Slice]]:
        """By piece, what is in it."""
        found: list[list[Slice]] = []
        section = self.sections[0]
        for piece in section.pieces:
            first = piece.begin - section.begin
            last = first + piece.num_bytes
            own = []
            for i, (begin, layout) in enumerate(zip(self.begins, self.layouts, strict=True)):
                low, high = max(first, begin), min(last, begin + layout.num_bytes)
                if low < high:
                    own.append(Slice(i, low - begin, high - begin, low - first))
            found.append(own)
        return found

    def holds(self, section: int, tensors: Sequence[Tensor]) -> bool:
        """Whether these are the tensors that lie in a section."""
        return [t.data_ptr() for t in tensors] == self.addresses[section]


class DiskArena:
    """What lives on disk of one optimizer's step.

    Args:
        buckets: with the layout of each of their parameters.
        device: where parameters are copied to.

    Raises:
        DiskError: there is no room, or no right to write.
        HostMemoryError: a GPU has to reach the buffers, and the system does not let it.
    """

    def __init__(
        self,
        buckets: Mapping[Bucket, tuple[Form, ...]],
        settings: DiskSettings,
        device: torch.device = HOST,
    ) -> None:
        self.buckets = dict(buckets)
        self.settings = settings
        sizes = [
            (_label(bucket, kind), sum(aligned(layout.num_bytes) for layout in layouts))
            for bucket, layouts in self.buckets.items()
            for kind in bucket.kinds
        ]
        self.store = DiskStore(sizes, settings)
        self.buffers = Buffers(
            settings.depth,
            max((len(bucket.kinds) for bucket in self.buckets), default=1),
            max((piece.num_bytes for piece in self.store.pieces), default=BLOCK),
            device,
        )
        """What is between the disk and whoever reads it."""
        self._moved_bytes = 0
        """Of what was in memory, and the heap may still have."""
        self._places: dict[Home, tuple[int, Tensor]] = {}
        sections = iter(self.store.sections)
        for bucket, layouts in self.buckets.items():
            own = [next(sections) for _ in bucket.kinds]
            bucket.place = place = Place(self.store, own, layouts)
            for section, kind in zip(own, bucket.kinds, strict=True):
                tensors = self._tensors_in(section, place)
                place.addresses.append([tensor.data_ptr() for _, tensor in tensors])
                for key, found in zip(bucket.keys, tensors, strict=True):
                    self._places[key, kind] = found

    @property
    def num_bytes(self) -> int:
        """All of it."""
        return self.store.num_bytes

    def _tensors_in(self, section: Section, place: Place) -> list[tuple[int, Tensor]]:
        """Where in the mapping each tensor of a section begins, and the tensor."""
        found = []
        for begin, layout in zip(place.begins, place.layouts, strict=True):
            at = section.begin + begin
            own = whole(self.store.memory[at : at + layout.num_bytes])
            # Not a view: it would keep what it is a view of, which looks like another user.
            tensor = torch.empty(0, dtype=layout.dtype)
            tensor.set_(own.untyped_storage(), 0, layout.shape, layout.stride)
            found.append((at, tensor))
        return found

    def fits(self, buckets: Mapping[Bucket, tuple[Form, ...]], settings: DiskSettings) -> bool:
        """Whether a graph's buckets are here."""
        same = all(self.buckets.get(bucket) == layouts for bucket, layouts in buckets.items())
        return same and self.settings == settings

    def leave(self) -> None:
        """Hold nothing for those who live here: another arena takes its place."""
        self._places.clear()

    def check(self, *, of_parameters: bool) -> None:
        """See that parameters, or else their state, are what was written to disk.

        Raises:
            DiskError: some are not.
        """
        for bucket in self.buckets:
            assert bucket.place is not None
            sections = bucket.place.sections
            for section in sections[:1] if of_parameters else sections[1:]:
                self.store.check(section)

    def expect(self, *, of_parameters: bool) -> None:
        """Parameters, or else their state, are about to be loaded."""
        for bucket in self.buckets:
            assert bucket.place is not None
            sections = bucket.place.sections
            for section in sections[:1] if of_parameters else sections[1:]:
                self.store.expect(section)

    def begin_of(self, home: Home) -> int:
        """Where a tensor begins; tensors that are not here come first."""
        return self._places[home][0] if home in self._places else -1

    def bring_home(self, home: Home, tensor: Tensor) -> bool:
        """Let a tensor's memory be here, as `HostArena.bring_home` does.

        Returns:
            Whether it is here now.

        Raises:
            DiskError: it cannot be written; it is where it was.
        """
        if home not in self._places:
            return False  # its state looks otherwise than it does
        at, own = self._places[home]
        if tensor.data_ptr() == own.data_ptr() or not own.numel():
            return True
        if (tensor.shape, tensor.dtype) != (own.shape, own.dtype):
            return False
        if shares_memory(tensor) or shares_memory(own):
            return False
        dense = tensor.detach()
        if dense.stride() != own.stride():
            dense = torch.empty_like(own, device="cpu").copy_(dense)
        flat = dense.as_strided((dense.numel(),), (1,), dense.storage_offset())
        self.store.put(at, memoryview(flat.view(torch.uint8).numpy()))  # type: ignore[arg-type]
        tensor.data = own
        self._moved_bytes += own.nbytes
        if self._moved_bytes > _TRIM_AT:
            trim_heap()
            self._moved_bytes = 0
        return True


def _label(bucket: Bucket, kind: str) -> str:
    """A section, for people."""
    names = [key.partition("/")[2] for key in bucket.keys]
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"{kind or 'the parameter'} of {names[0]}{more}"


_Buckets = dict[tuple[tuple[str, ...], tuple[str, ...]], Bucket]
_buckets: weakref.WeakKeyDictionary[Optimizer, _Buckets] = weakref.WeakKeyDictionary()
_arenas: weakref.WeakKeyDictionary[Optimizer, DiskArena] = weakref.WeakKeyDictionary()


def bucket_of(optimizer: Optimizer, keys: tuple[str, ...], names: tuple[str, ...]) -> Bucket:
    """An optimizer's bucket of some parameters: one for all of its graphs."""
    return _buckets.setdefault(optimizer, {}).setdefault((keys, names), Bucket(keys, names))


def disk_arena_of(optimizer: Optimizer) -> DiskArena | None:
    """The disk's share of an optimizer's steps."""
    return _arenas.get(optimizer)


def disk_arena_for(
    optimizer: Optimizer,
    buckets: Mapping[Bucket, tuple[Form, ...]],
    settings: DiskSettings,
    device: torch.device = HOST,
) -> DiskArena:
    """An arena with a place for what a graph wants, and for what other graphs wanted before.

    A new one takes the place of one that has no such place: what lives there moves with the next
    step, unless it is in a bucket that the graph has made otherwise.

    Raises:
        DiskError: there is no room, or no right to write.
        HostMemoryError: a GPU has to reach its buffers, and the system does not let it.
    """
    arena = disk_arena_of(optimizer)
    if arena is not None:
        if arena.fits(buckets, settings):
            return arena
        log.warning(
            "what is on disk moves to other files: this batch's graph updates %d buckets there "
            "that those of before do not have",
            sum(bucket not in arena.buckets for bucket in buckets),
        )
    wanted = {key for bucket in buckets for key in bucket.keys}
    known = {} if arena is None else arena.buckets
    others = {b: layouts for b, layouts in known.items() if wanted.isdisjoint(b.keys)}
    made = DiskArena({**others, **buckets}, settings, device)
    _arenas[optimizer] = made
    if arena is not None:
        arena.leave()
        for bucket in known.keys() - made.buckets.keys():
            bucket.place = None  # it would keep the files
    return made


def section_bytes(sizes: Sequence[int]) -> int:
    """What parameters of some sizes take on disk together; so does each kind of their state."""
    return in_blocks(sum(map(aligned, sizes)))
