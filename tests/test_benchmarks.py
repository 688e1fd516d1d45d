"""The benchmarks' own machinery: two hosts on one machine, workloads, and what is left behind."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import fxzero
from examples.benchmarks import estimated_steps, kernels, launch, link, overhead
from examples.benchmarks.report import bounds
from examples.benchmarks.workload import Workload
from fxzero.cost.kernel_table import read_table
from fxzero.kernels.patterns import KERNELS as PATTERNS
from tests.tiers import exhaustive

ROOT = Path(__file__).resolve().parents[1]


def why_no_link() -> str:
    """What keeps this machine from playing two hosts; empty if nothing does."""
    try:
        link.check(2)
    except link.LinkError as error:
        return str(error)
    made = subprocess.run(["unshare", "--net", "true"], capture_output=True, check=False)
    return made.stderr.decode().strip() if made.returncode else ""


needs_link = pytest.mark.skipif(bool(why_no_link()), reason=why_no_link() or "two hosts")


@pytest.mark.parametrize(
    ("ranks", "patch", "message"),
    [
        (2, ("sys.platform", "darwin"), "needs Linux's network namespaces; this is darwin"),
        (2, ("os.geteuid", lambda: 1000), "needs root: run it with sudo"),
        (2, ("shutil.which", lambda tool: None), "needs ip, tc, .* apt-get install"),
        (3, None, "--ranks 3 is odd"),
        (1024, None, "1024 ranks, "),
    ],
    ids=["system", "user", "programs", "odd", "cores"],
)
def test_machines_that_cannot_play_two_hosts(
    monkeypatch: pytest.MonkeyPatch, ranks: int, patch: tuple[str, object] | None, message: str
) -> None:
    """What is missing, and what to do."""
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setattr("shutil.which", lambda tool: f"/sbin/{tool}")
    if patch is not None:
        monkeypatch.setattr(*patch)
    with pytest.raises(link.LinkError, match=message):
        link.check(ranks)


PARENT = """
import os, sys, time
from pathlib import Path
from examples.benchmarks import link

shell = "ip -o address show | grep -c 10.253; exec sleep 100"
hosts = link.start(
    [["sh", "-c", shell]] * 2, "1gbit", [[0], [0]],
    environment=os.environ, folder=Path.cwd(), log=sys.stdout,
)
line = " ".join(["hosts", *(str(host.pid) for host in hosts)]) + "\\n"
os.write(1, line.encode())  # at once: the hosts write to the same pipe
time.sleep(100)
"""


@needs_link
def test_nothing_is_left_when_the_benchmark_is_killed() -> None:
    """Hosts end with the process that made them, and their link with them."""
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    lines: list[str] = []
    while sum(line.strip() == "1" for line in lines) < 2 or not any("hosts" in x for x in lines):
        line = parent.stdout.readline()
        assert line, lines
        lines.append(line)
    pids = [int(pid) for line in lines if "hosts" in line for pid in line.split()[1:]]
    family = [p for pid in pids for p in [psutil.Process(pid), *psutil.Process(pid).children(True)]]
    assert len(family) >= 4
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    _, alive = psutil.wait_procs(family, timeout=10)
    assert not [p for p in alive if p.status() != psutil.STATUS_ZOMBIE]
    shown = subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=True)
    assert "bench0" not in shown.stdout


def test_folders_of_killed_runs_are_swept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Those of living processes stay."""
    monkeypatch.setattr(launch, "gettempdir", lambda: str(tmp_path))
    ended = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    for owner in (ended, str(os.getpid())):
        (tmp_path / f"{launch.PREFIX}{owner}-x").mkdir()
    time.sleep(0.1)
    launch.sweep()
    assert [f.name for f in tmp_path.iterdir()] == [f"{launch.PREFIX}{os.getpid()}-x"]


def test_a_workload_is_a_model_of_hydras_group() -> None:
    """Chosen and overridden as in training."""
    settings = Workload.settings(["model=gpt_tiny", "model.num_layers=3"])
    workload = Workload(model=settings, batch=2, dtype="fp32", device="cpu")
    assert (workload.config.num_layers, workload.config.hidden) == (3, 128)
    assert workload.with_layers(5).config.num_layers == 5
    tokens, targets = workload.sample(0, 0)
    assert list(tokens.shape) == [2, workload.config.block_size]
    assert bool((targets[:, :-1] == tokens[:, 1:]).all())


def test_the_bound_is_the_larger_one() -> None:
    """Compute alone, or what is sent over what the link carries."""
    row = {"sent_bytes_per_step": 100.0, "num_parameter_bytes": 80, "median_ms": 1.0}
    found = bounds([row], {"median_ms": 700.0}, [{"bytes_per_s": [100.0, 50.0, 200.0]}], 2)
    assert found["traffic_ms"] == 1000.0
    assert found["zero3_traffic_ms"] == 1200.0
    assert found["bound_ms"] == 1000.0


def test_kernels_are_measured_against_what_they_are(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Every case computes the same both ways; its table is one that lower_kernels reads."""
    monkeypatch.setattr(torch, "compile", lambda function: function)
    torch.manual_seed(0)
    measured = []
    for case in kernels.cases("cpu", torch.float32, 1024):
        if case.differentiates:
            ours, plain = (f(*case.tensors) for f in (case.ours, case.plain))
            torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-4)
        measured.append(kernels.measure(case, "cpu", 1e9))
    assert {row["kernel"] for row in measured} >= {*PATTERNS, "adamw", "cast_pack", "unpack"}
    path = tmp_path / "table.json"
    kernels.write_table(path, "cpu", measured)
    table = read_table(str(path))
    assert table.speedup("rms_norm", torch.float32, 1000) is not None
    assert table.speedup("rms_norm", torch.float16, 1000) is None


def compile_eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let what is compiled call torch's own kernels."""
    compile_model, compile_step = torch.compile, fxzero.compile_step
    options = {"lower_regions": {"backend": "eager"}}

    def compiled(function: Any, *, backend: Any, **settings: Any) -> Any:
        eager = {"inductor": {"backend": "aot_eager"}}
        eager["fxzero"] = {"backend": "fxzero", "options": options}
        known = eager.get(backend) if isinstance(backend, str) else None
        return compile_model(function, **(known or {"backend": backend}), **settings)

    monkeypatch.setattr(torch, "compile", compiled)
    monkeypatch.setattr(fxzero, "compile_step", functools.partial(compile_step, options=options))


@pytest.mark.parametrize("kernels", ["torch's", *exhaustive("Inductor's")])
def test_the_hosts_part_is_measured_through_both_doors(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kernels: str
) -> None:
    """Every figure is there, and what was timed took time; the file says what they are."""
    if kernels == "torch's":
        compile_eagerly(monkeypatch)
    out = tmp_path / "overhead.json"
    monkeypatch.setattr(sys, "argv", ["examples/benchmarks/overhead.py"])
    num_threads = torch.get_num_threads()
    try:
        overhead.main(json_path=out, layers="1", steps=5, ranks=8)
    finally:
        torch.set_num_threads(num_threads)
    found = json.loads(out.read_text())
    times = {row["name"]: [row[k] for k in row if k.endswith("_ms")] for row in found["rows"]}
    assert {name: len(some) for name, some in times.items()} == {
        "inductor": 5,
        "fxzero": 5,
        "fxzero-step": 3,
    }
    for row in found["rows"]:
        timed = [row[name] for name in row if name.endswith("_ms") and name != "host_ms"]
        assert all(0 < time_ms < 10_000 for time_ms in timed)
        # A difference of medians, of steps and of what was timed in others: of any sign.
        assert row["kernels_ms"] + row["host_ms"] == pytest.approx(row["step_ms"])
    assert "overhead.py" in found["conditions"]["command"]


def test_estimated_steps_are_held_against_measured_ones_turn_by_turn() -> None:
    """The ratio is the median of the turns' own: a machine that is slower in one is so in both."""
    turns = [
        {"estimated_ms": 90.0, "measured_ms": 100.0},
        {"estimated_ms": 190.0, "measured_ms": 200.0},
        {"estimated_ms": 105.0, "measured_ms": 100.0},
    ]
    row = estimated_steps.row_of(3, turns)
    assert row["ratio"] == pytest.approx(0.95)
    assert (row["estimated_ms"], row["measured_ms"]) == (105.0, 100.0)
    assert "0.90, 0.95, 1.05" in estimated_steps.rendered([row])
