"""A run's dump: what is in it, what reading refuses, and that nothing of it is executed."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxzero
from fxzero import ConfigError
from fxzero.compiler.dump_folder import HEAD, VARIABLE, rank_folder
from fxzero.inspect import Analysis, capture
from fxzero.inspect.dump import profiles, programs, read
from fxzero.inspect.trace import profile_of, trace_of
from tests.parity.harness import Pools
from tests.tiers import exhaustive

ROOT = Path(__file__).parents[2]
EAGER: dict[str, Any] = {"lower_regions": {"backend": "eager"}}


class Net(nn.Module):
    """A block between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(32, 64)
        self.second = nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        """(B, 32) → scalar."""
        return self.second(nn.functional.gelu(self.first(x))).pow(2).mean()


def train(
    folder: str, steps: int = 9, *, whole: bool = True, micro_batches: int = 1, **options: Any
) -> list[float]:
    """Some steps, dumped."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Net()
    x = torch.randn(16, 32)
    fxzero.shard(model, zero=3)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    settings = {**EAGER, **options, **({"dump": folder} if folder else {})}
    if whole:
        step = fxzero.compile_step(model, optimizer, micro_batches=micro_batches, options=settings)
        return [step(x).loss.item() for _ in range(steps)]
    compiled: Any = torch.compile(model, backend="fxzero", options=settings)
    losses = []
    for _ in range(steps):
        loss = compiled(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.fixture(scope="module")
def dump(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Nine whole steps."""
    folder = tmp_path_factory.mktemp("runs") / "dump"
    train(str(folder))
    yield folder
    torch._dynamo.reset()


@pytest.fixture
def copy(dump: Path, tmp_path: Path) -> Path:
    """Another one, to be spoilt."""
    return Path(shutil.copytree(dump, tmp_path / "copy"))


def test_what_is_in_it(dump: Path) -> None:
    """The graph behind every pass, decisions, costs and schedule, and what was measured."""
    graph = dump / "rank0" / "graph0"
    names = {path.name for path in graph.iterdir()}
    expected = {"analysis.json", "measured.json", "plan.json", "schedule.py", "passes"}
    assert names == expected | {"step.trace.json.gz"}
    (analysis,) = read(str(dump)).values()
    assert (analysis.world_size, analysis.rank, analysis.num_parameters) == (1, 0, 4192)
    (detail,) = analysis.details
    ran = [row.name for row in analysis.passes]
    assert [text.name for text in detail.texts] == ["capture", *ran]
    assert all(text.text for text in detail.texts)
    assert {"recompute", "bucket", "prefetch"} <= set(detail.decisions)
    plan = json.loads((graph / "plan.json").read_text())
    assert list(plan["graphs"]) == [detail.digest]


def test_what_was_measured(dump: Path) -> None:
    """Each node that ran once, five calls, and a peak that the simulation knew."""
    (analysis,) = read(str(dump)).values()
    (detail,) = analysis.details
    (measured,) = detail.measured
    assert measured.part == "step"
    assert len(measured.calls_us) == 5
    assert all(us > 0 for us in measured.calls_us)
    ran = {span.node for span in measured.spans}
    assert {span.node for span in detail.spans} <= ran
    assert {row.name for row in detail.nodes if row.role == "update"} <= ran
    assert measured.peak_bytes is not None
    (schedule,) = analysis.schedules
    assert measured.peak_bytes == pytest.approx(schedule.peak_bytes, rel=0.05)


def test_a_dumped_run_is_the_same_run(dump: Path) -> None:
    """Nothing changes by being watched, the step that is watched included."""
    assert train("") == train(str(dump.parent / "again"))


@pytest.mark.parametrize(
    "options",
    [{"micro_batches": 8}, {"memory": "all_host"}, {"memory": "states_host"}],
    ids=["looped", "all_host", "states_host"],
)
def test_of_other_steps(tmp_path: Path, options: dict[str, Any]) -> None:
    """A micro-step that stands for others, and copies that code empties lists for."""
    assert train(str(tmp_path / "d"), **options) == train("", **options)
    (analysis,) = read(str(tmp_path / "d")).values()
    (measured,) = analysis.details[0].measured
    assert measured.spans
    assert len(measured.calls_us) == 5


RANKS = """
import os, sys
import torch
import fxzero
from tests.inspect.test_dump import Net

fxzero.init_distributed()
torch.manual_seed(0)
model = fxzero.shard(Net(), zero=3)
step = fxzero.compile_step(
    model,
    torch.optim.AdamW(model.parameters(), fused=True),
    options={"lower_regions": {"backend": "eager"}},
)
for _ in range(9):
    step(torch.randn(8, 32))
torch.distributed.destroy_process_group()
"""


def test_of_two_ranks(ranks: Pools, tmp_path: Path) -> None:
    """Each has its own folder."""
    ranks(2).run(train, str(tmp_path / "d"))
    check_of_two_ranks(tmp_path / "d")


@pytest.mark.exhaustive
def test_of_two_ranks_of_torchrun(tmp_path: Path) -> None:
    """They end as they would without a dump."""
    (tmp_path / "train.py").write_text(RANKS)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), VARIABLE: str(tmp_path / "d")}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    ran = subprocess.run(
        [*command, "--nproc-per-node", "2", str(tmp_path / "train.py")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert ran.returncode == 0, ran.stderr
    check_of_two_ranks(tmp_path / "d")


def check_of_two_ranks(folder: Path) -> None:
    """Whole steps of stage 3 were measured on both."""
    ranks = read(str(folder))
    assert list(ranks) == [0, 1]
    for rank, analysis in ranks.items():
        assert (analysis.rank, analysis.world_size, analysis.zero) == (rank, 2, 3)
        assert analysis.details[0].measured[0].spans
        assert len(analysis.details[0].measured[0].calls_us) == 5


def test_a_command_does_not_heed_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would replace the dump that it was asked about."""
    monkeypatch.setenv(VARIABLE, str(tmp_path / "asked"))
    capture(lambda: (Net(), torch.randn(16, 32)), zero=3, world_size=8, options=EAGER)
    assert not (tmp_path / "asked").exists()


def test_beside_a_profiler_that_warms_up(tmp_path: Path) -> None:
    """The user's goes on, and ours stays away."""
    torch._dynamo.reset()
    model = Net()
    fxzero.shard(model, zero=3)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    options = {**EAGER, "dump": str(tmp_path / "d")}
    step = fxzero.compile_step(model, optimizer, options=options)
    when = torch.profiler.schedule(wait=0, warmup=5, active=3)
    with torch.profiler.profile(schedule=when) as profiler:
        for _ in range(9):
            step(torch.randn(4, 32))
            profiler.step()
    (analysis,) = read(str(tmp_path / "d")).values()
    assert analysis.details[0].measured[0].peak_bytes is None
    assert analysis.details[0].measured[0].spans


def test_the_loop_has_two_parts(tmp_path: Path) -> None:
    """Forward and backward are measured apart."""
    assert train(str(tmp_path / "loop"), whole=False) == train("", whole=False)
    (analysis,) = read(str(tmp_path / "loop")).values()
    parts = [(m.part, len(m.calls_us), bool(m.spans)) for m in analysis.details[0].measured]
    assert parts == [("forward", 5, True), ("backward", 5, True)]
    assert len(profiles(str(tmp_path / "loop"))) == 2


@pytest.mark.parametrize("whole", [False, *exhaustive(True)])
def test_the_schedule_runs_by_itself(tmp_path: Path, whole: bool) -> None:
    """As a program, for ranks that are not there."""
    options = {**EAGER, "dump": str(tmp_path / "of_eight")}
    capture(lambda: (Net(), torch.randn(16, 32)), zero=3, world_size=8, step=whole, options=options)
    (file,) = (tmp_path / "of_eight").glob("rank0/graph*/schedule.py")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(
        [sys.executable, str(file)], env=environment, capture_output=True, text=True, timeout=120
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith("()")
    assert programs(str(tmp_path / "of_eight"), 0) == [file.read_text()]


def test_by_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a word in the program."""
    monkeypatch.setenv(VARIABLE, str(tmp_path / "asked"))
    train("", steps=1)
    (analysis,) = read(str(tmp_path / "asked")).values()
    assert analysis.details[0].measured == (), "one step is not measured"


NOTHING = """
import sys, torch, fxzero
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)
    def forward(self, x):
        return self.layer(x).sum()
x, model = torch.ones(2, 4), Net()
if sys.argv[1] == "step":
    Net.forward = torch.compiler.disable(Net.forward)
    optimizer = torch.optim.SGD(model.parameters())
    fxzero.compile_step(model, optimizer, options={"dump": sys.argv[2]})(x)
else:
    fxzero.shard(model)
    if sys.argv[1] == "compiled":
        model = torch.compile(model, backend="fxzero")
    model(x).backward()
"""


@pytest.mark.parametrize(
    ("kind", "is_older"), [("step", False), ("eager", True), ("compiled", False)]
)
def test_a_run_that_compiles_nothing_says_so(
    tmp_path: Path, dump: Path, kind: str, is_older: bool
) -> None:
    """It leaves no dump, or that of the run before."""
    script, folder = tmp_path / "nothing.py", tmp_path / "asked"
    script.write_text(NOTHING)
    if is_older:
        shutil.copytree(dump, folder)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    if kind != "step":
        environment[VARIABLE] = str(folder)
    ran = subprocess.run(
        [sys.executable, str(script), kind, str(folder)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ran.returncode == 0, ran.stderr
    said = "fxzero compiled nothing in this process, so that no dump was written"
    assert (said in ran.stderr) is (kind != "compiled")
    assert ("is of an earlier run" in ran.stderr) is is_older
    assert bool([*folder.glob("rank0/dump.json")]) is (kind == "compiled" or is_older)


def test_several_graphs_are_numbered(tmp_path: Path) -> None:
    """Two models of one process stand beside each other."""
    train(str(tmp_path / "two"), steps=1)
    train(str(tmp_path / "two"), steps=1)
    (analysis,) = read(str(tmp_path / "two")).values()
    assert [detail.graph for detail in analysis.details] == [0, 1]
    assert {row.graph for row in analysis.passes} == {0, 1}


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    """Nobody loses a file by a wrong name, nor one that lies beside a dump."""
    (tmp_path / "rank0").mkdir()
    (tmp_path / "rank0" / HEAD).write_text("{}")
    (tmp_path / "rank0" / "thesis.tex").write_text("years of work")
    with pytest.raises(ConfigError, match=r"holds 'thesis\.tex', which is of no dump"):
        rank_folder(str(tmp_path))
    assert (tmp_path / "rank0" / "thesis.tex").exists()


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    """Said before anything is compiled."""
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        train(str(tmp_path / "file" / "dump"), steps=1)


def test_it_is_read_as_it_was(dump: Path) -> None:
    """And written again, it is the same."""
    (analysis,) = read(str(dump)).values()
    assert Analysis.from_json(json.loads(json.dumps(analysis.to_json())), "itself") == analysis


def spoil_json(path: Path) -> None:
    """Cut short, as by a full disk."""
    text = path.read_text()
    path.write_text(text[: len(text) // 2])


@pytest.mark.parametrize(
    ("file", "message"),
    [
        (HEAD, "no JSON, and may have been cut short"),
        ("graph0/analysis.json", "no JSON, and may have been cut short"),
        ("graph0/measured.json", "no JSON, and may have been cut short"),
    ],
)
def test_cut_short(copy: Path, file: str, message: str) -> None:
    """The file is named."""
    spoil_json(copy / "rank0" / file)
    with pytest.raises(ConfigError, match=message) as raised:
        read(str(copy))
    assert Path(file).name in str(raised.value)


def test_a_missing_file(copy: Path) -> None:
    """The file is named."""
    (copy / "rank0" / "graph0" / "analysis.json").unlink()
    with pytest.raises(ConfigError, match=r"analysis\.json is missing"):
        read(str(copy))


@pytest.mark.parametrize("file", ["plan.json", "schedule.py", "passes/02_*.txt"])
def test_cut_short_where_nobody_reads(copy: Path, file: str) -> None:
    """What one command does not need another one does."""
    (path,) = (copy / "rank0" / "graph0").glob(file)
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    with pytest.raises(ConfigError, match=rf"has {len(whole) - 1} bytes, and {len(whole)} were"):
        read(str(copy))
    path.unlink()
    with pytest.raises(ConfigError, match=r"is missing|instead of one"):
        read(str(copy))


def test_of_before_sizes_were_written(copy: Path) -> None:
    """A dump without them is read."""
    path = copy / "rank0" / HEAD
    head = json.loads(path.read_text())
    for graph in head["graphs"]:
        del graph["bytes"]
    path.write_text(json.dumps(head))
    assert read(str(copy))


def test_a_missing_text(copy: Path) -> None:
    """Of one pass."""
    next((copy / "rank0" / "graph0" / "passes").glob("03_*")).unlink()
    with pytest.raises(ConfigError, match=r"has 0 files 03_\*\.txt instead of one"):
        read(str(copy))


def test_another_format(copy: Path) -> None:
    """A version that is not this one's is refused."""
    head = json.loads((copy / "rank0" / HEAD).read_text())
    (copy / "rank0" / HEAD).write_text(json.dumps({**head, "format": 99}))
    with pytest.raises(ConfigError, match="has format 99, and this version reads 1"):
        read(str(copy))


def test_a_field_of_another_version(copy: Path) -> None:
    """So is what has other fields."""
    path = copy / "rank0" / "graph0" / "analysis.json"
    data = json.loads(path.read_text())
    path.write_text(json.dumps({**data, "colour": "blue"}))
    with pytest.raises(ConfigError, match=r"'colour'.*another version"):
        read(str(copy))


def test_ranks_of_two_runs(copy: Path) -> None:
    """Of other numbers of ranks."""
    shutil.copytree(copy / "rank0", copy / "rank1")
    for file, key in ((HEAD, "rank"), ("graph0/analysis.json", "world_size")):
        path = copy / "rank1" / file
        data = json.loads(path.read_text())
        path.write_text(json.dumps({**data, key: 1 if key == "rank" else 2}))
    with pytest.raises(ConfigError, match="ranks of several runs"):
        read(str(copy))


def test_a_rank_of_another_run(copy: Path) -> None:
    """Of as many ranks, and of anything."""
    shutil.copytree(copy / "rank0", copy / "rank1")
    for rank in (0, 1):
        path = copy / f"rank{rank}" / HEAD
        head = json.loads(path.read_text())
        path.write_text(json.dumps({**head, "rank": rank, "run": "none localhost 29500"}))
    assert list(read(str(copy))) == [0, 1]
    path.write_text(json.dumps({**head, "rank": 1, "run": "none localhost 29501"}))
    with pytest.raises(ConfigError, match="several runs: 1 is of another one than 0"):
        read(str(copy))


def test_no_dump(tmp_path: Path) -> None:
    """A folder that is none."""
    with pytest.raises(ConfigError, match="is a folder, and no dump"):
        read(str(tmp_path))


def test_names_are_no_paths(copy: Path) -> None:
    """A pass whose name leads elsewhere leads nowhere."""
    secret = copy.parent / "secret.txt"
    secret.write_text("secret")
    path = copy / "rank0" / "graph0" / "analysis.json"
    data = json.loads(path.read_text())
    data["details"][0]["texts"][0]["name"] = "../../../../secret"
    path.write_text(json.dumps(data))
    (analysis,) = read(str(copy)).values()
    assert all(text.text != "secret" for text in analysis.details[0].texts)


def test_a_program_is_not_run_by_reading(copy: Path) -> None:
    """Nor by showing it."""
    file = copy / "rank0" / "graph0" / "schedule.py"
    code = "raise SystemExit('executed')\n" * 1000
    assert len(code) > file.stat().st_size, "a shorter one is cut short"
    file.write_text(code)
    read(str(copy))
    assert programs(str(copy), 0) == [code]


def test_traces_of_it(dump: Path) -> None:
    """Simulated and measured, side by side; and the profile, from its begin."""
    events = trace_of(read(str(dump)))
    names = {e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {"graph 0", "graph 0 step, measured"}
    found = profile_of(profiles(str(dump)))
    ranges = [e for e in found if str(e.get("name")).startswith("fxzero::")]
    assert ranges
    assert min(e["ts"] for e in found if e.get("ph") == "X") == 0


def test_a_profile_that_is_none(copy: Path) -> None:
    """The file is named."""
    path = copy / "rank0" / "graph0" / "step.trace.json.gz"
    path.write_bytes(gzip.compress(b"[1, 2"))
    with pytest.raises(ConfigError, match=r"step\.trace\.json\.gz is no profile"):
        profile_of(profiles(str(copy)))
    path.unlink()
    with pytest.raises(ConfigError, match="has no profile"):
        profiles(str(copy))
