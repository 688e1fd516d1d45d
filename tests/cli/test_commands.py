"""Commands that explain, compare, trace and bisect, and inspect of parts and dumps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner, Result

from fxzero.cli.app import app
from fxzero.inspect import capture

TARGET = "tests.cli.test_commands:build"
ON = ("--cluster", "dgx_h100")
EAGER = '{"lower_regions": {"backend": "eager"}}'


class Net(nn.Module):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 32)
        self.second = nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        """(B, 16) → scalar."""
        return self.second(torch.relu(self.first(x))).sum()


def build() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A net and its batch."""
    return Net(), (torch.randn(4, 16),)


def call(*arguments: str) -> Result:
    """Run a command, wide enough not to wrap."""
    return CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})


def said(*arguments: str) -> Any:
    """What a command prints as JSON."""
    result = call(*arguments)
    assert result.exit_code in (0, 1), result.output
    return json.loads(result.stdout)


@pytest.fixture(scope="module")
def dump(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of a capture: nothing was measured."""
    folder = tmp_path_factory.mktemp("cli") / "dump"
    capture(build, zero=3, world_size=8, options={"dump": str(folder)})
    return str(folder)


def test_explain(dump: str) -> None:
    """Questions, answers, options; of a model and of a dump alike."""
    for target, options in ((TARGET, ON), (dump, ())):
        result = call("explain", target, "first.weight", *options)
        assert result.exit_code == 0, result.output
        assert "parameter first.weight" in result.output
        assert "Why gather in forward?" in result.output
        assert "bucket.cap_bytes" in result.output


def test_explain_as_json() -> None:
    """As docs/explain.md says."""
    (found,) = said("explain", TARGET, "gather.forward.0", *ON, "--json")
    assert set(found) == {"kind", "name", "graph", "title", "answers", "settings"}
    assert all(set(a) == {"question", "text", "numbers"} for a in found["answers"])
    assert all(set(s) == {"option", "now", "effect"} for s in found["settings"])
    page = (Path(__file__).parents[2] / "docs" / "explain.md").read_text()
    for key in (*found, *found["answers"][0], *found["settings"][0]):
        assert f"`{key}`" in page


def test_inspect_as_json() -> None:
    """As docs/inspect.md says."""
    found = said(
        "inspect", TARGET, *ON, "--memory", "--lanes", "--diff", "bucket", "--code", "--json"
    )
    page = (Path(__file__).parents[2] / "docs" / "inspect.md").read_text()
    rows = [found["passes"][0], found["transfers"][0], found["schedules"][0], found["states"]]
    for row in (found, *rows, found["details"][0], found["totals"]):
        for key in row:
            assert f"`{key}`" in page or key == "graph", key


def test_diff(dump: str) -> None:
    """0 for equal, 1 for different."""
    result = call("diff", TARGET, *ON, "--other-options", '{"bucket": {"min_bytes": 0}}')
    assert result.exit_code == 1, result.output
    assert "bucket.min_bytes" in result.output
    assert "step" in result.output
    equal = call("diff", dump, dump + "/.")
    assert equal.exit_code == 0, equal.output
    assert "no setting and no decision differs" in equal.output


def test_diff_as_json() -> None:
    """As docs/diff.md says."""
    found = said("diff", TARGET, *ON, "--other-zero", "1", "--json")
    assert set(found) == {"figures", "differences"}
    assert all(set(row) == {"name", "before", "after"} for row in found["figures"])
    assert all(set(row) == {"where", "what", "before", "after"} for row in found["differences"])
    page = (Path(__file__).parents[2] / "docs" / "diff.md").read_text()
    for key in (*found, "name", "where", "what", "before", "after"):
        assert f"`{key}`" in page
    for row in found["figures"]:
        assert f"`{row['name']}`" in page


def test_trace(dump: str, tmp_path: Path) -> None:
    """A file for Perfetto, and what it holds."""
    for target, options in ((TARGET, ON), (dump, ())):
        result = call("trace", target, *options, "-o", str(tmp_path / "t.json"))
        assert result.exit_code == 0, result.output
        assert "events" in result.output
        assert json.loads((tmp_path / "t.json").read_text())["traceEvents"]


def test_trace_as_json(tmp_path: Path) -> None:
    """What was written; the documentation names all of it."""
    file = tmp_path / "t.json"
    found = said("trace", TARGET, *ON, "-o", str(file), "--json")
    events = json.loads(file.read_text())["traceEvents"]
    assert found == {
        "output": str(file),
        "num_events": len(events),
        "num_bytes": file.stat().st_size,
        "processes": ["graph 0"],
    }
    page = (Path(__file__).parents[2] / "docs" / "trace.md").read_text()
    assert [key for key in found if f"`{key}`" not in page] == []


def test_a_file_that_was_printed(tmp_path: Path) -> None:
    """It is read in the place of a model; what is not in it is refused."""
    file = tmp_path / "analysis.json"
    file.write_text(call("report", TARGET, *ON, "--json").stdout)
    for words in (("explain", "first.weight"), ("trace", "-o", str(tmp_path / "t.json"))):
        result = call(words[0], str(file), *words[1:])
        assert result.exit_code == 0, result.output
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert call("inspect", str(file), "--lanes").exit_code == 0
    refused = call("inspect", str(file), "--code")
    assert refused.exit_code == 2
    assert "--code has a meaning only with a model" in refused.output


def test_bisect() -> None:
    """A row a graph, and 0 where nothing is found."""
    result = call("bisect", TARGET, "--options", EAGER)
    assert result.exit_code == 0, result.output
    assert "no pass changes a result" in result.output
    for name in ("capture", "bucket", "prefetch", "lower_transfers"):
        assert name in result.output


def test_bisect_as_json(monkeypatch: pytest.MonkeyPatch) -> None:
    """As docs/bisect.md says; 1 where a pass is found."""
    from fxzero.passes import ShardGrads

    run = ShardGrads.run

    def sums(self: Any, graph: Any, ctx: Any) -> Any:
        notes = run(self, graph, ctx)
        for node in graph.graph.nodes:
            if "reduce_scatter" in str(node.target):
                node.args = (node.args[0], "sum", *node.args[2:])
        return notes

    monkeypatch.setattr(ShardGrads, "run", sums)
    monkeypatch.setattr("fxzero.compiler.run.verify", lambda *_, **__: None)
    result = call("bisect", TARGET, "--options", EAGER, "--json")
    assert result.exit_code == 1, result.output
    found = json.loads(result.stdout)
    assert found["culprit"]["behind"] == "shard_grads"
    assert found["culprit"]["difference"] == pytest.approx(1.0)
    page = (Path(__file__).parents[2] / "docs" / "bisect.md").read_text()
    for key in (*found, *found["culprit"]):
        assert f"`{key}`" in page


def test_inspect_a_dump(dump: str) -> None:
    """The tables, one pass's diff, and the program."""
    result = call("inspect", dump)
    assert result.exit_code == 0, result.output
    assert "ZeRO-3, 8 ranks" in result.output
    diff = call("inspect", dump, "--diff", "shard_params")
    assert "+++ after shard_params" in diff.output
    code = call("inspect", dump, "--code")
    assert "def forward(self" in code.output
    assert call("inspect", dump, "--memory").exit_code == 0


def test_inspect_parts() -> None:
    """Around a node, of a module, by lane."""
    result = call("inspect", TARGET, *ON, "--around", "relu", "--module", "first", "--lanes")
    assert result.exit_code == 0, result.output
    assert "→" in result.output
    assert "graph 0, first: " in result.output
    assert "compute" in result.output
    data = said("inspect", TARGET, *ON, "--lanes", "--json")
    assert data["details"][0]["nodes"]
    assert "details" not in said("inspect", TARGET, *ON, "--json")


WRONG = [
    (("explain", TARGET, "frist.weight", *ON), "did you mean"),
    (("explain", TARGET, "first.weight", "--rank", "9"), "rank 9 is not in a world of 8"),
    (("explain", "nowhere:build", "x"), "nowhere"),
    (("explain", "{dump}", "first.weight", "--zero", "2"), "--zero: {dump} is a dump"),
    (("explain", "{dump}", "first.weight", "--rank", "3"), "holds ranks 0, and not 3"),
    (("inspect", "{dump}", "--plan", "p.json"), "--plan"),
    (("inspect", "{dump}", "--diff", "nothing"), "no pass 'nothing' ran"),
    (("inspect", TARGET, *ON, "--around", "rellu"), "no node is called 'rellu'"),
    (("inspect", TARGET, *ON, "--module", "third"), "no module fits 'third'"),
    (("diff", TARGET), "both sides are the same"),
    (("diff", "{dump}", "{folder}"), "is a folder, and no dump"),
    (("diff", TARGET, "--other-options", "{{"), "--other-options='{{' is no JSON"),
    (
        ("diff", TARGET, "--other-options", '{{"prefetch": {{"distance": -1}}}}'),
        "--other-options: prefetch.distance=-1 must be 0 or more",
    ),
    (
        ("diff", TARGET, "--options", '{{"strict": 3}}', "--other-zero", "2"),
        "--options: options.strict=3 must be",
    ),
    (("diff", TARGET, "--other-cluster", "lapto"), "--other-cluster: cost.cluster='lapto'"),
    (
        ("diff", TARGET, *ON, "--other-options", '{{"cost": {{"cluster": "dgx2"}}}}'),
        "--other-cluster dgx_h100 and --other-options' cost.cluster='dgx2' differ",
    ),
    (("bisect", TARGET, "--options", '{{"memory_budget": "1KiB"}}'), "is the least that was found"),
    (("bisect", "tests.cli.test_commands:frozen"), "Net has no parameter that requires a gradient"),
    (("bisect", "tests.cli.test_commands:frozen", "--step"), "are what bisect compares"),
    (("inspect", "tests.cli.test_commands:coloured"), r"raised ValueError at"),
    (("trace", TARGET, "--profile"), "--profile has a meaning only with a dump"),
    (("trace", "{dump}", "--profile"), "has no profile"),
    (("trace", "{dump}", "-o", "{folder}/none/t.json"), "there is no folder"),
    (("bisect", "{dump}"), "it has shapes, and no values"),
    (("bisect", TARGET, "--micro-batches", "2"), "--micro-batches has a meaning only with --step"),
    (("bisect", TARGET, "--step", "--micro-batches", "64"), "Take 5 or fewer"),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG)
def test_wrong_use(arguments: tuple[str, ...], message: str, dump: str, tmp_path: Path) -> None:
    """One sentence, exit code 2, no traceback."""
    words = [word.format(dump=dump, folder=tmp_path) for word in arguments]
    result = call(*words)
    assert result.exit_code == 2, result.output
    text = " ".join(result.output.split())
    assert message.format(dump=dump) in text, text
    assert "Traceback" not in result.output


def test_names_are_no_markup() -> None:
    """What a user calls a module is text."""
    result = call("explain", "tests.cli.test_commands:marked", "[red]x[/red].weight", *ON)
    assert result.exit_code == 0, result.output
    assert "[red]x[/red].weight" in result.output


def frozen() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A net of which nothing is trained."""
    net, batch = build()
    return net.requires_grad_(False), batch


def coloured() -> nn.Module:
    """A factory that would change a terminal's colours."""
    raise ValueError("\x1b[31mred\x1b[0m\a")


def written() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A net with a name that does."""
    net = nn.Sequential()
    net.add_module("x\x1b[31m", nn.Linear(16, 16))
    return net, (torch.randn(4, 16),)


def test_nothing_controls_the_terminal() -> None:
    """Names and messages are shown as Python writes them."""
    result = call("inspect", "tests.cli.test_commands:coloured")
    assert r"\x1b[31mred\x1b[0m\x07" in result.output
    explained = call("explain", "tests.cli.test_commands:written", "x\x1b[31m.weight", *ON)
    assert explained.exit_code == 0, explained.output
    assert r"parameter x\x1b[31m.weight" in explained.output
    shown = call("inspect", "tests.cli.test_commands:written", *ON, "--code")
    assert "\x1b" not in result.output + explained.output + shown.output


def test_a_module_with_brackets() -> None:
    """By its name, which is a pattern of another one too."""
    for command in (("explain", "m.a[0]"), ("inspect", "--module", "m.a[0]")):
        result = call(command[0], "tests.cli.test_commands:bracketed", *command[1:], *ON)
        assert result.exit_code == 0, result.output
        assert "m.a[0]" in result.output


class Bracketed(nn.Module):
    """Modules whose names are no identifiers."""

    def __init__(self) -> None:
        super().__init__()
        self.m = nn.ModuleDict({"a[0]": nn.Linear(16, 16), "a0": nn.Linear(16, 16)})

    def forward(self, x: Tensor) -> Tensor:
        """(B, 16) → scalar."""
        for layer in self.m.values():
            x = layer(x)
        return x.sum()


def bracketed() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Such a net and its batch."""
    return Bracketed(), (torch.randn(4, 16),)


def marked() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A net with a name that rich would colour."""
    net = nn.Sequential()
    net.add_module("[red]x[/red]", nn.Linear(16, 16))
    return net, (torch.randn(4, 16),)
