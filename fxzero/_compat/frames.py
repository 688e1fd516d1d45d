"""Room for Python's frames, so that no loop's calls go over the end of a chunk again and again.

CPython lays frames into chunks of 16 KiB (`push_chunk` in its pystate.c). The call that does not
fit maps a new chunk, and its return unmaps it. A loop whose calls happen to stand there pays two
system calls and a page fault for each: a third of the CPU seconds of deciding for a thousand ranks,
or none, by how deep the caller happened to stand. Seen on Python 3.11, 3.12 and 3.13.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_SLOTS = 1 << 14
"""Of the frame that is too large for any chunk: the chunk made for it has twice its 128 KiB, and
the rest is for what is called. The compiler's deepest stacks take some 30 KiB."""


def with_room_for_frames(function: Callable[P, T]) -> Callable[P, T]:
    """The same function, whose calls begin a large chunk.

    That takes 11 µs: for what runs for milliseconds at least.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        result: T = _in_a_large_chunk(function, args, kwargs)
        return result

    return call


def _in_a_large_chunk(function: Any, args: Any, kwargs: Any) -> Any:
    return function(*args, **kwargs)


_in_a_large_chunk.__code__ = _in_a_large_chunk.__code__.replace(co_stacksize=_SLOTS)
