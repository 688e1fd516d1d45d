"""What a rank leaves behind when it ends in the middle of a wait: where each of its threads is, at
which line of the schedule, and torch's own record of the last collectives."""

from __future__ import annotations

import linecache
import os
import sys
import threading
import traceback
from collections.abc import Collection
from pathlib import Path
from types import FrameType

from fxzero._compat import flight_record

_SHOWN = 24
"""Innermost frames of the main thread."""
_SHOWN_OF_OTHERS = 6
_BEFORE, _BEHIND = 3, 3
"""Lines of the schedule around the one that runs."""
_WIDTH = 160


def stacks(rank: int, leave_out: Collection[threading.Thread] = ()) -> str:
    """The stacks of this process's threads, the main one first, and its place in the schedule.

    Args:
        leave_out: threads of no interest: who looks.
    """
    frames = sys._current_frames()
    main = threading.main_thread()
    stack = traceback.format_stack(frames.get(main.ident or 0))
    text = [f"Rank {rank} is here:\n{''.join(stack[-_SHOWN:])}"]
    place = position_of(frames.get(main.ident or 0))
    if place:
        text.append(place)
    for thread in threading.enumerate():
        frame = frames.get(thread.ident or 0)
        if thread is main or thread in leave_out or frame is None:
            continue
        stack = traceback.format_stack(frame)
        text.append(f"Its thread {thread.name}:\n{''.join(stack[-_SHOWN_OF_OTHERS:])}")
    return "\n".join(text)


def position_of(frame: FrameType | None) -> str:
    """Which line of a schedule a thread is at, with those around it; empty if it is in none."""
    while frame is not None and not frame.f_code.co_filename.startswith("<eval_with_key>"):
        frame = frame.f_back
    if frame is None:
        return ""
    lines = linecache.getlines(frame.f_code.co_filename, frame.f_globals)
    at = frame.f_lineno
    shown = [
        f"{'-->' if number == at else '   '} {lines[number - 1].rstrip()[:_WIDTH]}"
        for number in range(max(at - _BEFORE, 1), min(at + _BEHIND, len(lines)) + 1)
    ]
    return f"Line {at} of {len(lines)} of the schedule that runs:\n" + "\n".join(shown)


def write_flight_record(rank: int) -> str:
    """Write torch's record of the last collectives to where torch itself would, and say where.

    Returns:
        A sentence; empty if this torch keeps none, or nothing can be written there.
    """
    record = flight_record()
    if record is None:
        return ""
    path = Path(f"{_prefix()}{rank}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(record)
    except OSError:
        return ""
    return f"torch's flight recorder, its last collectives: {path}"


def _prefix() -> str:
    """Where torch writes the record of a rank, but for the rank's number."""
    for name in ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"):
        if os.environ.get(name):
            return os.environ[name]
    cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return f"{cache}/torch/comm_lib_trace_rank_"
