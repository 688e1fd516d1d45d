"""Sweeps: what a job leaves, what becomes of one that fails, and the table of them all."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path

import pytest
from hydra import compose, initialize_config_module
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra_plugins.hydra_optuna_sweeper._impl import create_optuna_distribution_from_override

from examples.sweep_results import gathered, plot, rows_of, varied, write
from examples.sweeps import Result, _last_words, quoted
from tests.examples.running import ROOT, TORCHRUN, run

SMALL = (
    *("model=gpt_tiny", "model.num_layers=1", "model.hidden=16", "data.max_bytes=100000"),
    *("trainer.steps=2", "trainer.log_every=1", "trainer.val_batches=1", "trainer.sample_length=0"),
    *("trainer.warmup_steps=0", "fxzero.lower_regions.backend=eager"),
)


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    """Three jobs that ended, two with a value, and one that never did."""
    told = {
        "0": Result(["zero=1", "lr=0.1"], 3.0, {"peak_bytes": 2.0**20}),
        "1": Result(["zero=3", "lr=0.1"], None, {}, "does not fit: it is\ntoo large"),
        "10": Result(["zero=3", "lr=0.1", "+x=1"], 2.0, {"peak_bytes": 2.0**21}),
    }
    for folder, result in told.items():
        result.write(tmp_path / folder)
    (tmp_path / "2" / ".hydra").mkdir(parents=True)
    (tmp_path / "2" / ".hydra" / "overrides.yaml").write_text("- zero=0\n")
    return tmp_path


def test_the_best_job_is_first_and_none_is_lost(sweep: Path) -> None:
    """One without a result is in the table, with the reason."""
    rows = rows_of(gathered(sweep))
    assert [row["job"] for row in rows] == ["10", "0", "1", "2"]
    assert [row["value"] for row in rows] == [2.0, 3.0, None, None]
    assert [row["zero"] for row in rows] == ["3", "1", "3", "0"]
    assert rows[2]["reason"] == "does not fit: it is\ntoo large"
    assert "has not ended" in rows[3]["reason"]


def test_settings_that_all_jobs_share_have_no_column() -> None:
    """Others have, also where only some jobs have them."""
    jobs = {"0": Result(["zero=1", "lr=1"], 1.0), "1": Result(["zero=1", "lr=1", "+x=1"], 1.0)}
    assert varied(jobs) == ["+x"]


def test_what_is_written(sweep: Path) -> None:
    """The same in all files; the plot is a picture."""
    jobs = gathered(sweep)
    rows = rows_of(jobs)
    write(jobs, rows, sweep)
    plot(rows, sweep / "results.png", varied(jobs))
    with (sweep / "results.csv").open(newline="") as file:
        assert [row["value"] for row in csv.DictReader(file)] == ["2.0", "3.0", "", ""]
    data = json.loads((sweep / "results.json").read_text())
    values = [(name, job["value"]) for name, job in data.items()]
    assert values == [("10", 2.0), ("0", 3.0), ("1", None), ("2", None)]
    assert (sweep / "results.png").read_bytes()[:4] == b"\x89PNG"


def test_a_folder_without_jobs(tmp_path: Path) -> None:
    """A sentence."""
    with pytest.raises(SystemExit, match=r"hydra\.sweep\.dir"):
        gathered(tmp_path)


def test_a_job_without_a_value_is_worse_than_any() -> None:
    """A sweeper must not take it for the best."""
    assert Result([], None).objective == math.inf
    assert Result([], 1.5).objective == 1.5


def test_a_failed_rank_speaks_last(tmp_path: Path) -> None:
    """Behind torchrun's table."""
    output = tmp_path / "output.txt"
    output.write_text("step 1\n====\nRoot Cause:\n  error: it broke\n====\n\n")
    assert "error: it broke" in _last_words(output, 1)


@pytest.mark.parametrize("name", ["a b", "zero=1,lr=0.1", "it's", "back\\slash"])
def test_folders_are_quoted_for_hydra(name: str) -> None:
    """Whatever a sweep's folders are called."""
    with initialize_config_module("examples.conf", version_base="1.3"):
        folders = ("hydra.run.dir", "checkpoint.dir=before", "checkpoint.dir")
        told = [f if "=" in f else f"{f}={quoted(name)}" for f in folders]
        cfg = compose("train", told, return_hydra_config=True)
    assert cfg.hydra.run.dir == name
    assert cfg.checkpoint.dir == name


@pytest.mark.exhaustive
@pytest.mark.slow
def test_jobs_of_ranks_of_their_own(tmp_path: Path) -> None:
    """By joblib, two ranks each: two are refused, the ranks of one fail, and one is trained."""
    script = ROOT / "examples" / "train.py"
    words = (
        "ranks=2",
        *SMALL,
        "trainer.batch_size=4,5",
        "memory_budget=none,1KiB",
        f"hydra.sweep.dir={tmp_path}",
    )
    joblib = ("hydra/launcher=joblib", "hydra.launcher.n_jobs=2")
    run(script, "-m", *joblib, *words, folder=tmp_path)
    good, small, bad, worse = (Result.read(tmp_path / job) for job in "0123")
    assert good.value is not None
    assert good.value == good.figures["final_val_loss"]
    assert good.figures["step_ms"] > 0
    assert "--nproc-per-node 2" in good.command
    assert small.value is bad.value is worse.value is None
    assert "torchrun ended with 1: " in small.reason
    assert "1.0 KiB" in small.reason
    assert "Traceback" not in (tmp_path / "1" / "output.txt").read_text().partition("Root Cause")[2]
    for refused in (bad, worse):
        assert "5 rows cannot be shared evenly by 2 ranks" in refused.reason
    printed = run(ROOT / "examples" / "sweep_results.py", tmp_path, folder=tmp_path)
    assert "job 2: trainer.batch_size=5 rows cannot" in printed


@pytest.mark.slow
@pytest.mark.exhaustive
def test_ranks_that_are_there_already(tmp_path: Path) -> None:
    """They are not those of a sweep's jobs: a sentence says what to type."""
    script = ROOT / "examples" / "train.py"
    words = ("-m", *SMALL, f"hydra.sweep.dir={tmp_path}", "zero=1,3")
    with pytest.raises(AssertionError, match=r"python examples/train.py -m ranks=2 … instead"):
        run(*TORCHRUN, script, *words, folder=tmp_path)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_optuna_chooses_by_simulation(tmp_path: Path) -> None:
    """No ranks; a job that cannot be has its reason, and the best is the least of the others."""
    words = (
        *("target=examples.models:gpt_nano", "cluster_name=laptop", "hydra/sweeper=optuna"),
        *("hydra.sweeper.n_trials=3", "hydra.sweeper.n_jobs=1", "hydra.sweeper.sampler.seed=0"),
        *("zero=choice(1,3)", "batch_size=choice(1,2)", "micro_batches=choice(1,2)"),
    )
    script = ROOT / "examples" / "sweep_simulated.py"
    run(script, "-m", f"hydra.sweep.dir={tmp_path}", *words, folder=tmp_path)
    jobs = gathered(tmp_path)
    assert len(jobs) == 3
    values = [result.value for result in jobs.values()]
    for result in jobs.values():
        impossible = {"batch_size=1", "micro_batches=2"} <= {*result.overrides}
        assert (result.value is None) is impossible
        assert bool(result.reason) is impossible
        assert impossible or result.value == result.figures["step_ms"]
    least = min(value for value in values if value is not None)
    best = (tmp_path / "optimization_results.yaml").read_text()
    assert f"best_value: {least}" in best


@pytest.mark.parametrize("sweep", ["by_hand", "gpt_lite", "gpt_xl_offload"])
def test_every_file_of_a_sweep(sweep: str) -> None:
    """It is one, of settings that there are."""
    with initialize_config_module("examples.conf", version_base="1.3"):
        cfg = compose("simulated", [f"sweep={sweep}"], return_hydra_config=True)
    parser = OverridesParser.create()
    for name, values in (cfg.hydra.sweeper.params or {}).items():
        (override,) = parser.parse_overrides([f"{name}={values}"])
        assert len(create_optuna_distribution_from_override(override).choices) > 2
        with initialize_config_module("examples.conf", version_base="1.3"):
            compose("simulated", [f"{name}=1"])
