"""A timeout: all ranks end when it has passed, each saying who is late and where it is itself."""

from __future__ import annotations

import math
import os
import pickle
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from fxzero._compat import flight_record
from fxzero.errors import ConfigError
from fxzero.ranks import groups, status
from fxzero.ranks.arrivals import Heard, overdue, who_is_missing
from fxzero.ranks.dump import position_of
from fxzero.ranks.status import Limits, Status
from tests.tiers import exhaustive

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = Path(__file__).with_name("run_with_a_fault.py")


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """No timeout but the test's own."""
    monkeypatch.setattr(status, "_said", [])
    monkeypatch.delenv("FXZERO_TIMEOUT_S", raising=False)


def run_under_torchrun(tmp_path: Path, fault: str, timeout_s: float) -> tuple[str, str]:
    """What the ranks have printed, and what they have logged.

    A rank that is stopped does not hear torchrun, which would wait half a minute for it: the
    others are waited for, and then it is killed.
    """
    out, err = tmp_path / "out", tmp_path / "err"
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *("--nproc-per-node", "2", "--monitor-interval", "0.1"),
        *(str(SCRIPT), fault, str(timeout_s)),
    ]
    env = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "TORCH_FR_DUMP_TEMP_FILE": str(tmp_path / "records" / "rank_"),
    }
    with out.open("w") as stdout, err.open("w") as stderr:
        job = subprocess.Popen(command, stdout=stdout, stderr=stderr, env=env)
        deadline = time.monotonic() + 300
        while job.poll() is None and time.monotonic() < deadline:
            if fault == "stopped" and "TOLD" in out.read_text():
                for pid in re.findall(r"PID 1 (\d+)", out.read_text()):
                    with suppress(ProcessLookupError):
                        os.kill(int(pid), signal.SIGKILL)
            time.sleep(0.1)
        assert job.poll() is not None, "the job has not ended"
        assert job.returncode != 0
    return out.read_text(), err.read_text()


@pytest.mark.parametrize(
    ("fault", "timeout_s"),
    [
        ("loops", 4.0),
        *exhaustive(("stopped", 4.0), ("skips", 4.0)),
        *exhaustive(("loops", 20.0), ("stopped", 20.0), ("skips", 20.0)),
    ],
)
def test_a_rank_that_does_not_come(tmp_path: Path, fault: str, timeout_s: float) -> None:
    """All end within a half of the timeout more, or ten seconds, and tell what they waited for."""
    printed, logged = run_under_torchrun(tmp_path, fault, timeout_s)
    (told,) = re.findall(r"^TOLD 0 (\S+) RankLostError (.*)$", printed, re.MULTILINE)
    (since,) = re.findall(r"^FAULT (\S+)$", printed, re.MULTILINE)
    at, message = float(told[0]), told[1]
    assert at - float(since) < timeout_s + 10, (at - float(since), message)
    assert f"timeout_s={timeout_s:g} has passed: rank 0 waits in run " in message
    assert re.search(r"(gather|reduce)\.\S+: ", message)  # the bucket …
    assert "0.weight" in message  # … its parameters …
    assert re.search(r", (forward|backward)\) at ", message)  # … its phase …
    assert "run_with_a_fault.py" in message  # … and whose it is
    assert "in train: step(" in message
    assert "arrived: rank 0 |" in message
    assert "has not arrived: rank 1: " in message
    if fault == "stopped":
        assert "nothing was heard of it for" in message
    else:
        assert "is busy at" in message
        assert "in loop_for_ever: time.sleep(0.1)" in message
        # … which says so itself, its threads and why, and ends: unless torchrun was quicker.
        assert "Rank 1 is here:" in logged
        by_itself = "rank 1 is where no error reaches it, and ends here"
        assert by_itself in logged or "Signal 15 (SIGTERM) received" in logged
    assert "Rank 0 is here:" in logged
    assert re.search(r"Line \d+ of \d+ of the schedule that runs:\n(.*\n)*--> ", logged)
    record = tmp_path / "records" / "rank_0"
    assert f"torch's flight recorder, its last collectives: {record}" in logged
    assert pickle.loads(record.read_bytes())["entries"]


@pytest.mark.exhaustive
def test_a_rank_of_another_option(tmp_path: Path) -> None:
    """Nobody waits for the timeout: what it would run is compared before the first wait."""
    printed, _ = run_under_torchrun(tmp_path, "option", 20.0)
    told = re.findall(r"^TOLD (\d) \S+ RanksDisagreeError (.*)$", printed, re.MULTILINE)
    assert told  # by those whom torchrun has not ended because of the others
    for _, message in told:
        assert "rank 0: step graph" in message
        assert "rank 1: step graph" in message


SOME = Limits(warn=1, look=1, deadlock=5, stopped=9, probe=2, beat=1, sample=1, timeout=10)
WAITS = Status(1, "fxzero", "run 3, step graph", "a.py:1 in f: step()", "gather.0", 10.0, True)


def other(silent_s: float = 0.0, **changes: Any) -> Heard:
    """A rank that waits where the first one does, but for some changes."""
    return Heard(Status(**{**vars(WAITS), **changes}), silent_s)


def test_what_is_said_of_ranks() -> None:
    """Who has come is named apart from who has not, each with the reason."""
    others = {
        1: other(),
        2: other(kind="elsewhere", line="b.py:2 in g: sleep()", transfer=""),
        3: other(name="run 4, step graph"),
        4: other(silent_s=6.0),
        5: other(ended="it raised ValueError: no\nmore"),
    }
    text = overdue(WAITS, 0, others, 7, SOME).splitlines()
    assert text[0].startswith("timeout_s=10 has passed: rank 0 waits in run 3, step graph (gather")
    assert text[1] == "  arrived: rank 0, 1"
    assert text[2] == "  has not arrived: rank 2: is busy at b.py:2 in g: sleep()"
    assert text[3].startswith("  has not arrived: rank 3: waits in run 4, step graph")
    assert text[4].startswith("  has not arrived: rank 4: nothing was heard of it for 6 s")
    assert text[5] == "  has not arrived: rank 5: has ended: it raised ValueError: no"
    assert text[6] == "  has not arrived: rank 6: nothing was ever heard of it"
    assert "timeout_s" in text[7]
    assert "FXZERO_TIMEOUT_S" in text[7]
    assert who_is_missing(WAITS, 0, {1: other()}, 2, SOME) == ""


@pytest.mark.parametrize(
    ("mine", "theirs", "ends"),
    [
        ({"blocked_s": 9.0}, {"kind": "elsewhere"}, False),
        ({}, {}, True),  # a message was lost
        ({"idle": False}, {}, False),  # much data, or a slow network
        ({}, {"idle": False}, False),
        ({"kind": "checkpoint"}, {"kind": "checkpoint"}, False),  # a slow disk
        ({"kind": "checkpoint"}, {}, True),
        ({"idle": False}, {"kind": "elsewhere", "idle": False}, True),
    ],
)
def test_when_a_wait_is_overdue(mine: dict[str, Any], theirs: dict[str, Any], ends: bool) -> None:
    """Where nobody is missing and something moves it goes on."""
    status = Status(**{**vars(WAITS), **mine})
    assert bool(overdue(status, 0, {1: other(**theirs)}, 2, SOME)) is ends


@pytest.mark.parametrize("value", ["soon", "0", "-3", "nan", "inf", ""])
def test_a_timeout_that_is_none(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    """It is refused by the name under which it was given."""
    monkeypatch.setenv("FXZERO_TIMEOUT_S", value)
    with pytest.raises(ConfigError, match=r"FXZERO_TIMEOUT_S=.* must be a positive number of sec"):
        Limits.from_environment()
    with pytest.raises(ConfigError, match=r"^timeout_s=.* must be a positive number of seconds"):
        groups.init_distributed(timeout_s=value)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"^timeout_s=True must"):
        groups.init_distributed(timeout_s=True)


def test_what_is_said_goes_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """All other limits stay within the timeout."""
    assert Limits.from_environment().timeout == math.inf
    monkeypatch.setenv("FXZERO_TIMEOUT_S", "20")
    assert Limits.from_environment().timeout == 20
    assert groups.init_distributed(timeout_s=5) is None  # of one process
    limits = Limits.from_environment()
    assert limits.timeout == 5
    assert limits.look + limits.beat + limits.sample < 5
    assert limits.warn == 2.5


@pytest.mark.parametrize(("timeout_s", "backend"), [(20.0, "cuda"), (20.0, "cpu"), (None, "cuda")])
def test_what_torch_is_told(
    monkeypatch: pytest.MonkeyPatch, timeout_s: float | None, backend: str
) -> None:
    """A group of NCCL's has the timeout, and its watchdog writes torch's flight recorder then."""
    told: dict[str, Any] = {}
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_PORT", "0")
    for name in ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_DUMP_ON_TIMEOUT"):
        monkeypatch.setenv(name, "")  # so that it is brought back
        monkeypatch.delenv(name)
    monkeypatch.setattr(groups.torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(dist, "init_process_group", lambda *args, **kwargs: told.update(kwargs))
    monkeypatch.setattr(groups.atexit, "register", lambda function: None)
    groups.init_distributed(backend, timeout_s=timeout_s)
    if timeout_s is None or backend == "cpu":
        assert told["timeout"] is None
        assert "TORCH_NCCL_DUMP_ON_TIMEOUT" not in os.environ
    else:
        assert told["timeout"].total_seconds() == timeout_s
        assert os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "1"
        assert os.environ["TORCH_FR_BUFFER_SIZE"] == "2000"


def test_no_place_in_a_schedule() -> None:
    """Outside of a generated graph there is nothing to say."""
    assert position_of(sys._getframe()) == ""
    assert flight_record()  # of this torch
