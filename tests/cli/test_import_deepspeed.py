"""`fxzero import-deepspeed`: a line a key, the settings, how it ends."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from fxzero.cli.app import app
from tests.cli.test_cli import assert_sentence

EXAMPLE = Path(__file__).resolve().parents[2] / "examples/ds_config.json"


def call(*arguments: str) -> Result:
    """Run the command, wide enough not to wrap."""
    return CliRunner().invoke(app, ["import-deepspeed", *arguments], env={"COLUMNS": "200"})


def written(tmp_path: Path, **keys: Any) -> str:
    """A file with one configuration."""
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"train_batch_size": 8, "gradient_clipping": 1.0, **keys}))
    return str(file)


def test_the_table_and_the_settings() -> None:
    """What somebody would write who knew fxzero."""
    result = call(str(EXAMPLE), "--world-size", "2")
    assert result.exit_code == 0, result.output
    text = " ".join(result.output.split())
    for part in (
        "zero_optimization.reduce_bucket_size",
        "options bucket.cap_bytes=100000000, 2 bytes an element",
        "DeepSpeed's Adam is AdamW",
        "0 refused",
        "fxzero.shard(model, zero=2, param_dtype=torch.bfloat16, offload=True)",
        "clip_grad_norm=1, scheduler=scheduler, options=options)",
        "rows: 16 a step, 8 a rank, 4 a micro-batch",
    ):
        assert part in text, part


def test_json(tmp_path: Path) -> None:
    """Everything that is printed, and what is refused."""
    found = json.loads(call(str(EXAMPLE), "--json").output)
    assert found["settings"]["shard"]["zero"] == 2
    assert {line["verdict"] for line in found["lines"]} == {"mapped", "needless"}
    result = call(written(tmp_path, wandb={"enabled": True}), "--json")
    assert result.exit_code == 2
    found = json.loads(result.output)
    assert found["settings"] is None
    (line,) = [line for line in found["lines"] if line["verdict"] == "refused"]
    assert line["key"] == "wandb.enabled"
    assert call(written(tmp_path, wandb={}), "--leave-out", "wandb").exit_code == 0


def test_auto_and_versions(tmp_path: Path) -> None:
    """What the file leaves open is said on the command line."""
    file = tmp_path / "ds.json"
    optimizer = {"type": "AdamW", "params": {"lr": "auto"}}
    file.write_text(json.dumps({"train_batch_size": 8, "optimizer": optimizer}))
    assert call(str(file)).exit_code == 2
    result = call(
        *(str(file), "--auto", '{"learning_rate": 0.5}', "--deepspeed-version", "0.19.8", "--json")
    )
    settings = json.loads(result.output)["settings"]
    assert settings["optimizer"] == {"kind": "AdamW", "lr": 0.5, "weight_decay": 0.0}
    assert settings["clip_grad_norm"] == 1.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("no_such.json",), "there is no such file"),
        ((str(EXAMPLE), "--auto", "{"), "is no JSON"),
        ((str(EXAMPLE), "--auto", "[]"), "must be an object"),
        ((str(EXAMPLE), "--auto", '{"learning_rates": 1}'), "did you mean 'learning_rate'?"),
        ((str(EXAMPLE), "--deepspeed-version", "0.3"), "DeepSpeed 0.16 to 0.19"),
        ((str(EXAMPLE), "--leave-out", "wandb"), "leave_out names 'wandb'"),
        ((str(EXAMPLE), "--world-size", "0"), "Invalid value for '--world-size'"),
        ((), "Missing argument"),
    ],
)
def test_wrong_use(arguments: tuple[str, ...], message: str) -> None:
    """A sentence, and 2."""
    assert_sentence(call(*arguments), 2, message)
