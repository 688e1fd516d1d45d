"""The command line, as a shell would call it."""

from __future__ import annotations

import ast
import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner, Result

from fxzero.cli.app import app
from tests.tracing import chain

TARGET = "tests.test_cli:model"
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


def test_a_diff() -> None:
    """What one pass changed."""
    result = call(TARGET, "--diff", "shard_params")
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert lines[:2] == ["--- before shard_params", "+++ after shard_params"]
    assert any(line.startswith("-unshard: ") for line in lines)
    assert any(line.startswith("+layers_0_weight: ") for line in lines)


def test_the_diff_of_an_unknown_pass() -> None:
    """The nearest one is named."""
    result = call(TARGET, "--diff", "shard_parms")
    assert result.exit_code == 1
    assert "no pass 'shard_parms' ran: did you mean 'shard_params'?" in result.stderr


def test_code_is_python() -> None:
    """The schedule can be pasted: one function, in launch order."""
    result = call(TARGET, "--code", *BY_LAYER)
    assert result.exit_code == 0, result.output
    compile(result.output, "schedule", "exec")
    (function,) = [n for n in ast.parse(result.output).body if isinstance(n, ast.FunctionDef)]
    assert function.name == "forward"
    assert result.output.index("gather_layers_0") < result.output.index("torch.ops.aten.mm")


def test_json_with_code_and_diff() -> None:
    """What is asked for is there; an unknown pass is an error here too."""
    result = call(TARGET, "--json", "--code", "--diff", "bucket")
    data = json.loads(result.stdout)
    assert data["code"][0].startswith("# graph 0")
    assert data["diffs"][0].startswith("--- before bucket")
    assert call(TARGET, "--json", "--diff", "nope").exit_code == 1


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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("tests.test_cli",), "'tests.test_cli' names no factory. Write package.module:factory."),
        (("tests.no_such_module:f",), "cannot import 'tests.no_such_module'"),
        (("tests.test_cli:modle",), "has no function 'modle': did you mean 'model'?"),
        ((TARGET, "--options", "{"), "--options='{' is no JSON"),
        ((TARGET, "--options", "[1]"), "--options='[1]' must be a JSON object"),
        ((TARGET, "--options", '{"prefech": {}}'), "did you mean 'prefetch'?"),
        ((TARGET, "--rank", "8"), "rank 8 is not in a world of 8 ranks"),
    ],
)
def test_mistakes_exit_with_1(arguments: tuple[str, ...], message: str) -> None:
    """A sentence on the standard error, no traceback."""
    result = call(*arguments)
    assert result.exit_code == 1
    assert message in " ".join(result.stderr.split())
    assert "Error" in result.stderr
    assert "Traceback" not in result.output
    assert result.stdout == ""


def test_usage_errors_exit_with_2() -> None:
    """As every command's."""
    assert call(TARGET, "--zero", "4").exit_code == 2
    assert call().exit_code == 2


@pytest.mark.slow
def test_the_installed_command() -> None:
    """`python -m` is not needed: the entry point starts."""
    code = "import sys; sys.argv = ['fxzero', '--help']; from fxzero.cli import main; main()"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0
    assert "inspect" in result.stdout
