"""Scripts as people run them: by torchrun, at default settings, with and without fxzero."""

from __future__ import annotations

import difflib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "pages" / "integrations" / "trainer.md"
PAIR = ("examples/trainer_lm_ddp.py", "examples/trainer_lm.py")
SETTINGS = (
    "--use_cpu --ddp_backend gloo --report_to none --disable_tqdm true --logging_steps 1 "
    "--per_device_train_batch_size 2 --gradient_accumulation_steps 2 --adam_epsilon 1e-4"
).split()


def run(script: str, *args: str) -> str:
    """Run a script on two ranks; warnings of fxzero are errors."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
    }
    launch = "-m torch.distributed.run --standalone --nproc-per-node 2".split()
    done = subprocess.run(
        [sys.executable, *launch, "tests/integrations/strict.py", script, *args],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout + done.stderr


def _losses(folder: Path) -> list[dict[str, Any]]:
    (state,) = folder.glob("checkpoint-*/trainer_state.json")
    log = json.loads(state.read_text())["log_history"]
    return [{k: line[k] for k in ("step", "loss", "grad_norm")} for line in log if "loss" in line]


def _difference(before: str, after: str) -> list[str]:
    texts = [(ROOT / name).read_text().splitlines() for name in (before, after)]
    return list(difflib.unified_diff(*texts, before, after, n=1, lineterm=""))


@pytest.mark.exhaustive
def test_a_script_and_its_ddp_form_train_alike(tmp_path: Path) -> None:
    for name, script in zip(("ddp", "fxzero"), PAIR, strict=True):
        said = run(script, "--output_dir", str(tmp_path / name), "--max_steps", "4", *SETTINGS)
    assert said.count("fxzero: ZeRO-3 over 2 ranks") == 1
    plain, sharded = (_losses(tmp_path / name) for name in ("ddp", "fxzero"))
    assert len(plain) == len(sharded) == 4
    for line, other in zip(sharded, plain, strict=True):
        # Inductor adds up in another order; and transformers 4 logs four digits of a loss.
        assert line == pytest.approx(other, rel=5e-5)
    weights = load_file(tmp_path / "ddp" / "model.safetensors")
    found = load_file(tmp_path / "fxzero" / "model.safetensors")
    assert found.keys() == weights.keys()
    for name, weight in weights.items():
        assert (found[name] - weight).abs().max() <= 1e-5 * weight.abs().max(), name


def test_the_page_shows_the_difference() -> None:
    difference = _difference(*PAIR)
    changed = [line for line in difference[2:] if line[0] in "+-"]
    replaced = max(sum(line[0] == sign for line in changed) for sign in "+-")
    assert replaced <= 4, changed
    mark = f"<!-- difference: {' '.join(PAIR)} -->\n"
    shown = PAGE.read_text().partition(mark)[2]
    wanted = "```diff\n" + "\n".join(difference) + "\n```\n"
    assert shown.startswith(wanted), f"the page should show\n{wanted}"


AUTO_SCHEDULE = {
    "type": "WarmupDecayLR",
    "params": dict.fromkeys(
        ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps"), "auto"
    ),
}


def test_the_seq2seq_script_follows_a_schedule_alone(tmp_path: Path) -> None:
    """Of Trainer's own optimizer, over as many steps as Trainer takes."""
    from transformers import Seq2SeqTrainingArguments

    from examples.trainer_seq2seq import by_deepspeed, take_optimizer

    args = Seq2SeqTrainingArguments(
        output_dir=str(tmp_path),
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        num_train_epochs=1.5,
        warmup_steps=2,
        use_cpu=True,
    )
    zero = {"stage": 2, "reduce_bucket_size": "auto"}
    sizes = ("train_batch_size", "gradient_accumulation_steps", "gradient_clipping")
    said = {**dict.fromkeys(sizes, "auto"), "zero_optimization": zero, "scheduler": AUTO_SCHEDULE}
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(said))
    model = SimpleNamespace(config=SimpleNamespace(hidden_size=8))
    made = by_deepspeed(str(file), model, args, num_pairs=41)  # 11 batches, 6 updates, 9 in all
    assert made.options["bucket"] == {"cap_bytes": 64 * 4}
    assert made.make_scheduler is not None
    assert made.make_scheduler.settings["total_num_steps"] == 9
    assert made.make_scheduler.settings["warmup_num_steps"] == 2
    own = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])
    trainer = SimpleNamespace(optimizer=own, lr_scheduler=None, create_optimizer=lambda: own)
    take_optimizer(trainer, made)  # type: ignore[arg-type]
    assert trainer.lr_scheduler.optimizer is trainer.optimizer is own


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("goes_on", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_the_seq2seq_script_trains_by_deepspeeds_json(tmp_path: Path, goes_on: bool) -> None:
    more = (
        "--max_steps 4 --predict_with_generate --generation_max_length 8 --save_steps 2 "
        "--source_length 16 --target_length 16 --num_eval 8 --eval_strategy steps --eval_steps 2"
    ).split()
    said = tmp_path / "ds.json"
    auto = dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")
    optimizer = {"type": "AdamW", "params": auto}
    sizes = dict.fromkeys(
        "train_micro_batch_size_per_gpu gradient_accumulation_steps gradient_clipping".split(),
        "auto",
    )
    zero = {"stage": 2, "reduce_bucket_size": 5e7}
    trains = {"scheduler": AUTO_SCHEDULE} if goes_on else {"optimizer": optimizer}
    said.write_text(json.dumps({**sizes, "zero_optimization": zero, **trains}))
    more = [*more, "--deepspeed_config", str(said)]
    folder = str(tmp_path)
    first = run("examples/trainer_seq2seq.py", "--output_dir", folder, *more, *SETTINGS)
    assert "eval_right" in first
    assert "fxzero: ZeRO-2 over 2 ranks" in first
    if not goes_on:
        return
    weights = load_file(tmp_path / "model.safetensors")
    resume = ["--resume_from_checkpoint", f"{folder}/checkpoint-2"]
    run("examples/trainer_seq2seq.py", "--output_dir", folder, *more, *SETTINGS, *resume)
    again = load_file(tmp_path / "model.safetensors")
    for name, weight in weights.items():
        assert (again[name] - weight).abs().max() <= 1e-6 * weight.abs().max(), name


@pytest.mark.exhaustive
def test_at_zero_3_the_peak_is_at_most_six_tenths_of_ddps(tmp_path: Path) -> None:
    """103 million parameters, which with gradients and Adam's moments are 1.6 GB under DDP."""
    peaks = {}
    for stage in ("ddp", "3"):
        (tmp_path / stage).mkdir()
        run("tests/integrations/trainer_peak.py", stage, str(tmp_path / stage))
        peaks[stage] = int((tmp_path / stage / "peak").read_text())
    assert peaks["3"] <= 0.6 * peaks["ddp"], peaks
