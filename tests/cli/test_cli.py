"""The command line, as a shell would call it."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from typer.testing import CliRunner, Result

import fxzero
from fxzero import Config
from fxzero.cli.app import app
from tests.tracing import chain

ROOT = Path(__file__).resolve().parents[2]
TARGET = "tests.cli.test_cli:model"
model = chain(2)

BY_LAYER = ("--options", '{"bucket": {"min_bytes": 0}, "prefetch": {"distance": 1}}')


def call(*arguments: str) -> Result:
    """Run the command, wide enough not to wrap."""
    return CliRunner().invoke(app, ["inspect", *arguments], env={"COLUMNS": "200"})


def test_the_table() -> None:
    """Passes, buckets, and the sum in units of P."""
    result = call(TARGET, "--zero", "3", "--world-size", "8", *BY_LAYER)
    assert result.exit_code == 0, result.output
    assert "ZeRO-3, 8 ranks, 128 parameters, 1 graph(s)" in result.output
    for name in ("stamp", "recompute", "shard_params", "bucket", "prefetch", "lower_regions"):
        assert name in result.output
    assert "gather.forward.0" in result.output
    assert "384 elements on the wire = 3.000 P" in result.output


def test_shards_on_the_host() -> None:
    """Copies are transfers like others, and the host's memory is told apart."""
    result = call(TARGET, "--zero", "3", "--world-size", "8", "--offload", *BY_LAYER)
    assert result.exit_code == 0, result.output
    assert "upload.0" in result.output
    assert re.search(r"own: \S+ \S+ copied to the device, \S+ \S+ to the host", result.output)
    assert "in the host's memory:" in result.output


def test_a_diff() -> None:
    """What one pass changed."""
    result = call(TARGET, "--diff", "shard_params")
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert lines[:2] == ["--- before shard_params", "+++ after shard_params"]
    assert any(line.startswith("-unshard: ") for line in lines)
    assert any(line.startswith("+layers_0_weight: ") for line in lines)


def test_code_is_python() -> None:
    """The schedule can be pasted: pieces as functions, then the step that calls them, in order."""
    result = call(TARGET, "--code", *BY_LAYER)
    assert result.exit_code == 0, result.output
    compile(result.output, "schedule", "exec")
    *pieces, step = [n for n in ast.parse(result.output).body if isinstance(n, ast.FunctionDef)]
    assert step.name == "forward"
    called = [
        n.func.id
        for n in ast.walk(step)
        if isinstance(n, ast.Call) and isinstance(n.func, ast.Name) and "pieces" in n.func.id
    ]
    assert pieces
    assert {piece.name for piece in pieces} == set(called)
    assert any("torch.ops.aten.mm" in ast.unparse(piece) for piece in pieces)
    text = ast.unparse(step)
    assert text.index("gather_layers_0") < text.index(called[0])


def test_json_with_code_and_diff() -> None:
    """What is asked for is there."""
    result = call(TARGET, "--json", "--code", "--diff", "bucket")
    data = json.loads(result.stdout)
    assert data["code"][0].startswith("# graph 0")
    assert data["diffs"][0].startswith("--- before bucket")


def test_code_and_diff() -> None:
    """Both are printed."""
    result = call(TARGET, "--code", "--diff", "bucket")
    assert "--- before bucket" in result.stdout
    assert "def forward(self" in result.stdout


def test_json() -> None:
    """For other programs: nothing but JSON on the standard output."""
    result = call(TARGET, "--json", "--zero", "2")
    data = json.loads(result.stdout)
    assert (data["zero"], data["world_size"], data["num_parameters"]) == (2, 8, 128)
    assert data["totals"]["wire_elements"] == 2 * 128


def test_options_reach_the_backend() -> None:
    """As JSON."""
    result = call(TARGET, "--json", "--options", '{"prefetch": {"distance": 2}}')
    (row,) = [r for r in json.loads(result.stdout)["passes"] if r["name"] == "prefetch"]
    assert row["options"].startswith("Prefetch(distance=2, ")


def test_dtypes() -> None:
    """Half the bytes for the same elements."""
    full = json.loads(call(TARGET, "--json").stdout)["totals"]
    half = json.loads(call(TARGET, "--json", "--param-dtype", "bfloat16").stdout)["totals"]
    assert half["gathered_bytes"] * 2 == full["gathered_bytes"]
    assert half["gathered_elements"] == full["gathered_elements"]


def test_inference() -> None:
    """A forward alone."""
    result = call(TARGET, "--json", "--inference")
    assert {r["phase"] for r in json.loads(result.stdout)["transfers"]} == {"forward"}


def test_the_settings_are_those_of_hydras_group() -> None:
    """`fxzero options` writes the file; a setting that is new or changed is written anew."""
    result = CliRunner().invoke(app, ["options"])
    assert result.exit_code == 0
    assert result.stdout == (ROOT / "conf/fxzero/default.yaml").read_text()


def test_every_setting_says_what_it_is() -> None:
    """A line of comment stands over each."""
    lines = (ROOT / "conf/fxzero/default.yaml").read_text().splitlines()
    for before, line in pairwise(lines):
        assert line.lstrip().startswith("#") or before.lstrip().startswith("#"), line


def test_the_yaml_is_the_default_config() -> None:
    """Read back, it is what no options are."""
    values = OmegaConf.to_container(OmegaConf.load(ROOT / "conf/fxzero/default.yaml"))
    assert Config.from_options(values) == Config()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "target",
    ["dict_inputs", "tensor_input", "both_inputs", "dict_batches", "Nets.small", "list_inputs"],
)
def test_what_a_factory_may_return(target: str) -> None:
    """Inputs as a tensor, a tuple, a dict, a tuple and a dict; a batch as a dict."""
    result = call(f"tests.targets:{target}", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["num_parameters"] == 64


def test_a_file_may_be_named(tmp_path: Path) -> None:
    """As python itself runs it: with its own folder to import from."""
    (tmp_path / "beside.py").write_text("WIDTH = 8\n")
    (tmp_path / "my model.py").write_text(
        "import torch\nfrom torch import nn\nfrom beside import WIDTH\n"
        "def tiny():\n    return nn.Linear(WIDTH, WIDTH), torch.ones(4, WIDTH)\n"
    )
    result = call(f"{tmp_path}/my model.py:tiny", "--step", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["num_parameters"] == 72


@pytest.mark.parametrize(
    "arguments",
    [
        ("--param-dtype", "float16"),
        ("--micro-batches", "4"),
        ("--micro-batches", "3", "--batch-size", "6", "--param-dtype", "bfloat16"),
    ],
    ids=" ".join,
)
def test_whole_steps(arguments: tuple[str, ...]) -> None:
    """With a loss scale, and in parts: by default, two rows for each."""
    result = call("tests.targets:dict_batches", "--step", "--json", *arguments)
    assert result.exit_code == 0, result.output
    names = [row["name"] for row in json.loads(result.stdout)["passes"]]
    assert names[-1] == "lower_regions"


def test_a_setting_without_effect_is_a_sentence() -> None:
    """Not a line of Python's, with a file of ours; under strict it ends the command."""
    options = {"prefetch": {"reduce_distance": 2}}
    result = call(TARGET, "--options", json.dumps(options))
    assert result.exit_code == 0, result.output
    assert result.stderr.startswith("warning: prefetch.reduce_distance=2 has no effect")
    assert ".py" not in result.stderr
    strict = call(TARGET, "--options", json.dumps({**options, "strict": True}))
    assert strict.exit_code == 2
    assert "an error because strict=True" in strict.stderr


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("wrong_shapes", "same reduction dim"),
        ("breaks", "this model says no"),
        ("nothing_to_train", "depends on no parameter that requires a gradient"),
        ("whole_numbers", "the model returned torch.int64: no tensor to train by"),
        ("words", "the model returned str: no tensor to train by"),
        ("nothing", "the model returned NoneType"),
        ("empty", "the model returned dict"),
    ],
)
def test_a_model_that_cannot_be_compiled_ends_with_2(target: str, message: str) -> None:
    """What it says itself, and where."""
    result = call(f"tests.targets:{target}")
    assert_sentence(result, 2, message)
    loud = call(f"tests.targets:{target}", "--debug")
    assert loud.exception is not None
    assert not isinstance(loud.exception, SystemExit)


def assert_sentence(result: Result, code: int, message: str) -> None:
    """An exit code and a sentence on the standard error; no traceback, nothing else."""
    assert result.exit_code == code, result.output
    assert isinstance(result.exception, SystemExit), result.exception
    assert message in " ".join(result.stderr.replace("│", " ").split()), result.stderr
    assert "Traceback" not in result.output
    assert result.stdout == ""


@pytest.mark.slow
def test_torchs_log_of_an_error_is_not_shown_beside_it() -> None:
    """It writes a traceback past everything, and then raises; `python -m` starts the command."""
    words = [sys.executable, "-m", "fxzero", "inspect", "tests/targets.py:wrong_shapes"]
    result = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert result.returncode == 2
    assert "same reduction dim" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.exhaustive
@pytest.mark.slow
def test_the_installed_command() -> None:
    """`python -m` is not needed: the entry point starts, which pip makes a script of."""
    code = "import sys; sys.argv = ['fxzero', '--version']; from fxzero.cli import main; main()"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300
    )
    assert result.stdout == f"fxzero {fxzero.__version__}, torch {torch.__version__}\n"
    assert result.returncode == 0


def test_its_help_names_the_commands() -> None:
    """Without any of them."""
    result = CliRunner().invoke(app, ["--help"])
    assert result.exit_code == 0
    assert "inspect" in result.stdout
