"""`fxzero.inspect.side_by_side`: in processes of their own where that is safe.

The jobs run in a process without other threads, which pytest's own may have.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from torch import nn

from fxzero.errors import CaptureError, ConfigError
from fxzero.inspect import side_by_side as module
from fxzero.inspect.estimate import estimate
from fxzero.inspect.mesh import MeshShape
from fxzero.inspect.side_by_side import side_by_side
from fxzero.inspect.targets import Target

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    "jobs",
    [
        (
            "results_in_order",
            "the_first_error",
            "an_error_that_cannot_be_sent",
            "one_that_is_killed",
            "others_have_threads",
            "little_memory",
        ),
        ("an_estimate",),
    ],
    ids=["processes", "estimate"],
)
def test_jobs(jobs: tuple[str, ...]) -> None:
    """Below, each by its name."""
    calls = "; ".join(f"t.{job}()" for job in jobs)
    ran = subprocess.run(
        [sys.executable, "-c", f"import tests.inspect.test_side_by_side as t; {calls}"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stderr


def room_for(count: int) -> None:
    """Let there be so many cores, and memory for as many processes."""
    module.cores = lambda: count  # type: ignore[attr-defined]
    module.available_bytes = lambda: count * module._BYTES  # type: ignore[attr-defined]


def results_in_order() -> None:
    """Of closures, which cannot be sent; the first takes longest."""
    room_for(2)
    own = os.getpid()

    def at(number: int) -> tuple[int, int]:
        time.sleep(0.4 if number == 0 else 0)
        return number, os.getpid()

    found = side_by_side([lambda n=n: at(n) for n in range(5)])  # type: ignore[misc]
    assert [number for number, _ in found] == list(range(5))
    assert own not in {pid for _, pid in found}
    assert len({pid for _, pid in found}) == 2
    assert side_by_side([os.getpid]) == [own]
    assert side_by_side([]) == []


def the_first_error() -> None:
    """As it was raised, with its type and its words."""
    room_for(3)

    def fails(error: Exception, seconds: float) -> None:
        time.sleep(seconds)
        raise error

    tasks = [
        lambda: None,
        lambda: fails(CaptureError("the first"), 0.3),
        lambda: fails(ConfigError("the second"), 0),
    ]
    with pytest.raises(CaptureError, match=r"^the first$"):
        side_by_side(tasks)
    assert side_by_side([lambda: 1, lambda: 2]) == [1, 2]


def an_error_that_cannot_be_sent() -> None:
    """Its words arrive, and its type's name."""
    room_for(2)

    class OwnError(Exception):
        pass

    def fails() -> None:
        raise OwnError("what was wrong")

    with pytest.raises(
        CaptureError, match=r"^OwnError at .*test_side_by_side.py:\d+: what was wrong$"
    ):
        side_by_side([fails, fails])


def one_that_is_killed() -> None:
    """As the system does where memory ends: all of it is done again, here."""
    room_for(2)
    own = os.getpid()

    def dies() -> int:
        if os.getpid() != own:
            os.kill(os.getpid(), signal.SIGKILL)
        return os.getpid()

    assert side_by_side([dies, dies]) == [own] * 2


def others_have_threads() -> None:
    """Of which one may hold a lock."""
    room_for(2)
    ends = threading.Event()
    thread = threading.Thread(target=ends.wait)
    thread.start()
    assert side_by_side([os.getpid] * 2) == [os.getpid()] * 2
    ends.set()
    thread.join()
    assert os.getpid() not in side_by_side([os.getpid] * 2)


def little_memory() -> None:
    """For one of them."""
    room_for(2)
    module.available_bytes = lambda: 2 * module._BYTES - 1  # type: ignore[attr-defined]
    assert side_by_side([os.getpid] * 2) == [os.getpid()] * 2


def an_estimate() -> None:
    """The same in one process and in several, of a pipeline too."""
    target = Target("here", lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)))
    found = []
    for count in (1, 3):
        room_for(count)
        found.append(
            estimate(
                target,
                world_size=4,
                stages=(3, 1),
                meshes=[MeshShape.parse("pipeline=2,shard=2")],
                micro_batches=4,
                inputs="input=float32[B,8]",
                cluster="laptop",
            ).to_json()
        )
    assert found[0] == found[1]
    assert list(found[1]["stages"]) == ["3", "1"]
    (mesh,) = found[1]["meshes"].values()
    assert list(mesh["stages"]) == ["3", "1"]
