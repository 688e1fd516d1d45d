"""`examples/tour.py` runs from top to bottom, and prints the graphs that its text points at.

What it asserts itself holds too: 3 P on the wire, the table of ZeRO's stages, eager's gradients.
"""

from __future__ import annotations

import functools
import subprocess
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]


@functools.cache
def lines() -> list[str]:
    """What a person sees who runs it, from a folder of their own."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "tour.py")],
        cwd=ROOT.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr
    return done.stdout.splitlines()


def part(first: str) -> list[str]:
    """The lines behind one that begins so."""
    (start, *_) = [i for i, line in enumerate(lines()) if line.startswith(first)]
    return lines()[start:]


def in_order(wanted: str, found: list[str]) -> list[str]:
    """The wanted lines that do not follow each other in what was found."""
    rest = iter(found)
    return [w for w in wanted.splitlines() if not any(line.startswith(w) for line in rest)]


SHOWN = {
    "down.weight: (8, 32), of which this rank has (2, 32)": """\
unshard: f32[32, 8] = fxzero.unshard(
unshard_1: f32[8, 32] = fxzero.unshard(
reshard_grad: f32[2, 32] = fxzero.reshard_grad(
""",
    "shard_params: params=2, gathers=4": """\
-unshard: f32[32, 8] = fxzero.unshard(
+gather_up: (f32[32, 8]) = _c10d_functional.all_gather_into_tensor_coalesced(
+gather_up_done: (f32[32, 8]) = wait(gather_up)
+up_weight: f32[32, 8] = getitem(gather_up_done, 0)
+release_default: None = fxzero.release([up_weight])
""",
    "shard_grads: gradients=2, reduced=2, kept=0": """\
-reshard_grad: f32[2, 32] = fxzero.reshard_grad(
+reduce_down: (f32[2, 32]) = _c10d_functional.reduce_scatter_tensor_coalesced(
""",
    "bucket: gathers=4, reduces=2": "gather.forward.0: all_gather of 1024 bytes\n",
    "prefetch: tasks=": """\
+gather_down: (f32[8, 32]) = _c10d
 gather_up_done: (f32[32, 8]) = wait(gather_up)
-gather_down: (f32[8, 32]) = _c10d
""",
}
"""Behind a line that begins so, lines that begin so, in this order."""


def test_it_runs_from_top_to_bottom() -> None:
    """In one test, as it is one run."""
    assert "P = 512" in lines()
    assert "on the wire: 1536 elements = 3 P" in lines()
    assert [line for line in lines() if line.startswith("ZeRO-")] == [
        "ZeRO-0: 1024 elements = 2 P",
        "ZeRO-1: 1024 elements = 2 P",
        "ZeRO-2: 1536 elements = 3 P",
        "ZeRO-3: 2560 elements = 5 P",
    ]
    (said,) = [line for line in lines() if line.startswith("after pass 'our own'")]
    assert "reads up_weight after release_default released its memory" in said
    for first, wanted in SHOWN.items() if torch.__version__ >= "2.13" else ():  # as `texts` has it
        assert in_order(wanted, part(first)) == [], first
    assert [line.partition(",")[0] for line in lines()[-2:]] == [
        "up.weight: the gradient is eager's",
        "down.weight: the gradient is eager's",
    ]


def test_lines_that_are_not_there_are_missed() -> None:
    """A comparison that finds everything would be none."""
    assert in_order("b\na", ["a", "b"]) == ["a"]
