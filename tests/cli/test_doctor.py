"""`fxzero doctor`: what it prints and writes, how it ends, alone and on two ranks."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import fxzero
from fxzero.cli import doctor as command
from fxzero.cli.app import app
from fxzero.cost import load_cluster
from fxzero.cost.cluster import guess_cluster
from fxzero.doctor import Examination
from fxzero.doctor.cluster_file import values_of
from fxzero.doctor.verdicts import fail, ok, warn
from tests.cli.test_cli import assert_sentence

ROOT = Path(__file__).resolve().parents[2]
NET = "tests.targets:dict_batches"
NEEDED = {
    *("python", "torch", "libraries", "gpu", "pinned memory", "cores", "memory", "shared memory"),
    *("huge pages", "compiler", "triton"),
}
MEASURED = {"compute", "copies", "disk", "links"}


def call(*arguments: str) -> Result:
    """Run the command, wide enough not to wrap."""
    return CliRunner().invoke(app, ["doctor", *arguments], env={"COLUMNS": "200"})


def clean_environment() -> dict[str, str]:
    """Without torchrun's variables."""
    return {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path, Path]:
    """One rank, measured: what is printed as JSON, the file, and the disk's folder."""
    folder = tmp_path_factory.mktemp("doctor")
    disk = folder / "disk"
    disk.mkdir()
    file = folder / "mine.yaml"
    result = call("--json", "--write", str(file), "--disk", str(disk))
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found, file, disk


Alone = tuple[dict[str, Any], Path, Path]


def test_it_checks_and_measures(alone: Alone) -> None:
    """Everything that the documentation names."""
    found, file, _ = alone
    names = {check["name"] for check in found["checks"]}
    assert names >= NEEDED | MEASURED
    assert found["is_fine"]
    assert found["world_size"] == 1
    assert found["file"] == str(file)
    assert found["fxzero"] == fxzero.__version__
    links = next(check for check in found["checks"] if check["name"] == "links")
    assert links["verdict"] == "warn"
    assert "torchrun --nproc-per-node 2 -m fxzero doctor" in links["advice"]


def test_the_json_is_what_is_documented(alone: Alone) -> None:
    """Key by key, in the order of the table; every check that there was is named."""
    found, _, _ = alone
    text = (ROOT / "docs/doctor.md").read_text()
    table = text.split("## JSON")[1]
    keys = [
        (bool(indent), key)
        for indent, cell in re.findall(r"^\| (&nbsp; )?(`.*?) \|", table, re.M)
        for key in re.findall(r"`(\w+)`", cell)
    ]
    assert [key for inner, key in keys if not inner] == list(found)
    assert [key for inner, key in keys if inner] == list(found["checks"][0])
    checks = text.split("## Checks")[1].split("##")[0]
    assert {check["name"] for check in found["checks"]} <= set(re.findall(r"`(.+?)`", checks))


def test_the_file_is_a_cluster(alone: Alone) -> None:
    """The JSON's; what was measured is, and what was not says so."""
    found, file, _ = alone
    spec = load_cluster(str(file))
    assert values_of(spec) == found["cluster"]
    guess = guess_cluster("cpu", 1)
    if found["device"] == "cpu":
        assert (spec.intra, spec.inter) == (guess.intra, guess.inter)
    assert spec.sources["intra"].startswith("not measured: as in ")
    assert spec.sources["inter"].startswith("not measured: as in ")
    for part in ("device", "host", "disk"):
        assert spec.sources[part].startswith("measured: ")
        assert getattr(spec, part) != getattr(guess, part)


@pytest.mark.parametrize(
    "words", [("inspect", "--step", "--zero", "3"), ("estimate", "--zero", "3")], ids=lambda w: w[0]
)
def test_the_file_is_used(alone: Alone, words: tuple[str, ...]) -> None:
    """By the commands that simulate."""
    _, file, _ = alone
    name, *options = words
    arguments = [name, NET, *options, "--world-size", "2", "--cluster", str(file), "--json"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    if name == "estimate":
        assert data["cluster"] == "mine"
        assert data["stages"]["3"]["step_ms"] > 0
    else:
        (row,) = data["schedules"]
        assert row["costs"] == "analytic, mine"


def test_the_disk_is_as_it_was(alone: Alone) -> None:
    """Nothing is left."""
    _, _, disk = alone
    assert list(disk.iterdir()) == []


def examination(*checks: Any) -> Examination:
    """One that was not made here."""
    return Examination(
        versions={"fxzero": "1", "torch": "2", "python": "3"},
        device="cpu",
        rank=0,
        world_size=1,
        checks=checks,
        cluster=load_cluster("laptop"),
        seconds=1.0,
    )


def test_what_is_printed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A line a check, what to do below it, the sum; text of a machine is no markup."""
    made = examination(ok("gpu", "[none]"), warn("cores", "4 [bold]", "take [2]"))
    monkeypatch.setattr(command, "examine", lambda *_, **__: made)
    file = tmp_path / "mine.yaml"
    result = call("--write", str(file))
    assert result.exit_code == 0
    lines = [" ".join(re.sub("[│┃]", " ", line).split()) for line in result.output.splitlines()]
    at = lines.index("ok gpu [none]")
    assert lines[at + 1 : at + 3] == ["warn cores 4 [bold]", "→ take [2]"]
    assert "1 ok, 1 warn, 0 fail; one rank, 1.0 s" in lines
    assert replace(load_cluster(str(file)), name="laptop") == load_cluster("laptop")


def test_other_ranks_are_silent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """They end as rank 0 does, and write nothing."""
    made = replace(examination(fail("gpu", "gone", "get one")), rank=1)
    monkeypatch.setattr(command, "examine", lambda *_, **__: made)
    file = tmp_path / "mine.yaml"
    result = call("--write", str(file))
    assert (result.exit_code, result.output) == (1, "")
    assert not file.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--nope",), "No such option: --nope"),
        (("extra",), "unexpected extra argument"),
        (("--write",), "requires an argument"),
        (("--write", "no/such/folder/mine.yaml"), "there is no folder 'no/such/folder'"),
        (("--write", "tests"), "--write tests is a folder"),
        (("--write", "mine.json"), "a cluster file's name ends in .yaml: mine.yaml"),
        (("--write", "/proc/mine.yaml"), "/proc"),
        (("--disk", "no/such/folder"), "--disk no/such/folder: there is no such folder"),
        (("--disk", "README.md"), "there is no such folder"),
        (("--quick", "--write", "mine.yaml"), "--write has a meaning only with measuring"),
        (("--quick", "--disk", "tests"), "--disk has a meaning only with measuring"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_wrong_use(
    arguments: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One sentence and 2, before anything takes time; the last thing that could go wrong, after."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(command, "examine", lambda *_, **__: examination())
    assert_sentence(call(*arguments), 2, message)


def test_a_rank_that_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the variables that torchrun sets."""
    variables = {"RANK": "2", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert_sentence(call(), 2, "rank 2 is not in a world of 2 ranks")


def test_help_teaches() -> None:
    """By commands that there are."""
    result = call("--help")
    assert result.exit_code == 0
    assert "torchrun --nproc-per-node 2 -m fxzero doctor --write cluster.yaml" in result.output
    assert "doctor" in CliRunner().invoke(app, ["--help"]).output


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_compiler_that_is_not_there() -> None:
    """What is found, what to do, and exit code 1; its caches do not hide it."""
    words = [sys.executable, "-m", "fxzero", "doctor", "--quick", "--json"]
    environment = {**clean_environment(), "CXX": "/nonexistent/c++"}
    result = subprocess.run(
        words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert result.returncode == 1, result.stderr
    found = json.loads(result.stdout)
    assert not found["is_fine"]
    failed = [check for check in found["checks"] if check["verdict"] == "fail"]
    assert [check["name"] for check in failed] == ["compiler"]
    assert "/nonexistent/c++" in failed[0]["found"]
    assert "CXX" in failed[0]["advice"]
    assert found["cluster"] is None
    assert "Traceback" not in result.stderr


@pytest.mark.exhaustive
@pytest.mark.slow
def test_two_ranks_measure_links(tmp_path: Path) -> None:
    """Under torchrun: one of them speaks and writes, and what is between them is measured."""
    torchrun = shutil.which("torchrun") or str(Path(sys.executable).with_name("torchrun"))
    file = tmp_path / "pair.yaml"
    words = [torchrun, "--standalone", "--nproc-per-node", "2", "-m", "fxzero", "doctor"]
    result = subprocess.run(
        [*words, "--json", "--write", str(file), "--disk", str(tmp_path)],
        cwd=ROOT,
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)  # once
    assert found["world_size"] == 2
    spec = load_cluster(str(file))
    assert (spec.devices_per_node, spec.num_nodes) == (2, 1)
    assert spec.sources["intra"].startswith("measured: ")
    assert spec.sources["inter"] == "not measured: as in laptop"
    guess = guess_cluster("cpu", 2)
    assert spec.intra != guess.intra
    assert 1e7 < spec.intra.bytes_per_s < 1e11
    assert 1 < spec.intra.latency_us < 1e5
    assert spec.intra.host_us > 0
    assert [p.name for p in tmp_path.iterdir()] == ["pair.yaml"]
