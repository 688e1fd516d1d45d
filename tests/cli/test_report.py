"""``fxzero report``, as a shell would call it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from fxzero.cli.app import app
from fxzero.inspect import Analysis
from fxzero.inspect.report import data_of
from tests.cli.test_wrong_command_lines import assert_sentence

TARGET = "tests.targets:dict_inputs"


def call(*arguments: str) -> Result:
    """Run the command, wide enough not to wrap."""
    return CliRunner().invoke(app, ["report", *arguments], env={"COLUMNS": "200"})


def test_a_page_is_written(tmp_path: Path) -> None:
    """One line says where, and how large."""
    path = tmp_path / "step.html"
    result = call(TARGET, "-o", str(path), "--zero", "2", "--world-size", "16")
    assert result.exit_code == 0, result.output
    found = re.fullmatch(rf"wrote {re.escape(str(path))} \((\S+) KiB\): .*\n", result.stdout)
    assert found is not None
    assert float(found[1]) == pytest.approx(path.stat().st_size / 1024, abs=0.1)
    data = data_of(path.read_text(encoding="utf-8"))
    assert data["title"] == TARGET
    assert (data["about"]["zero"], data["about"]["world_size"]) == (2, 16)
    assert data["graphs"][0]["detail"]["diffs"]
    assert data["against"] is None


def test_settings_reach_the_compiler(tmp_path: Path) -> None:
    """The whole step, of half as many ranks, for another machine."""
    path = tmp_path / "step.html"
    options = '{"prefetch": {"distance": 2}}'
    arguments = ("--step", "--micro-batches", "2", "--cluster", "dgx_h100", "--options", options)
    result = call(TARGET, "-o", str(path), *arguments)
    assert result.exit_code == 0, result.output
    data = data_of(path.read_text(encoding="utf-8"))
    assert data["settings"] == {"prefetch.distance": 2, "cost.cluster": "dgx_h100"}
    assert data["graphs"][0]["schedule"]["costs"] == "analytic, dgx_h100"
    assert "accumulate" in [row["name"] for row in data["passes"]]


def test_without_an_output_it_is_beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``report.html`` where one stands."""
    monkeypatch.syspath_prepend(Path.cwd())
    monkeypatch.chdir(tmp_path)
    assert call(TARGET).exit_code == 0
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]


def test_json_is_read_back(tmp_path: Path) -> None:
    """As what is shown, and as what is compared with."""
    two = call(TARGET, "--zero", "2", "--json")
    assert two.exit_code == 0, two.output
    written = tmp_path / "two.json"
    written.write_text(two.stdout)
    assert Analysis.from_json(json.loads(two.stdout), "it").zero == 2
    path = tmp_path / "step.html"
    assert call(TARGET, "--against", str(written), "-o", str(path)).exit_code == 0
    against = data_of(path.read_text(encoding="utf-8"))["against"]
    assert (against["title"], against["about"]["zero"]) == (str(written), 2)
    assert call(str(written), "-o", str(path)).exit_code == 0
    assert data_of(path.read_text(encoding="utf-8"))["about"]["zero"] == 2


def test_what_inspect_wrote_is_read_too(tmp_path: Path) -> None:
    """Without details, and with what it writes beside an analysis."""
    result = CliRunner().invoke(app, ["inspect", TARGET, "--json", "--diff", "bucket", "--code"])
    written = tmp_path / "inspect.json"
    written.write_text(result.stdout)
    path = tmp_path / "step.html"
    assert call(str(written), "-o", str(path)).exit_code == 0
    assert data_of(path.read_text(encoding="utf-8"))["graphs"][0]["detail"] is None


def test_against_another_target(tmp_path: Path) -> None:
    """Captured with the same options."""
    path = tmp_path / "step.html"
    result = call(TARGET, "--against", "tests.targets:tensor_input", "-o", str(path))
    assert result.exit_code == 0, result.output
    assert data_of(path.read_text(encoding="utf-8"))["against"]["title"].endswith("tensor_input")


NO_ANSWER = [
    (("nowhere",), "'nowhere' names no factory"),
    ((TARGET, "-o", "no/such/folder/page.html"), "there is no folder 'no/such/folder'"),
    ((TARGET, "-o", "tests"), "--output tests is a folder"),
    ((TARGET, "--against", "no.json"), "no.json: No such file or directory. Name a file"),
    (("no.json",), "no.json: No such file or directory. Name a file"),
    ((TARGET, "--against", "tests.targets:nothing_there"), "nothing_there"),
    ((TARGET, "--against", TARGET, "--json"), "--against has a meaning only with no --json"),
    ((TARGET, "-o", "page.html", "--json"), "--output has a meaning only with no --json"),
    ((TARGET, "--rank", "8"), "rank 8 is not in a world of 8 ranks"),
    ((TARGET, "--micro-batches", "2"), "--micro-batches has a meaning only with --step"),
    ((TARGET, "--step", "--inference"), "--inference has a meaning only with no --step"),
    ((TARGET, "--options", "{"), "is no JSON"),
    ((TARGET, "--cluster", "dgx_h10"), "did you mean 'dgx_h100'?"),
]


@pytest.mark.parametrize(("arguments", "message"), NO_ANSWER, ids=lambda value: str(value)[:60])
def test_wrong_use_ends_with_2(
    arguments: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sentence, before anything is captured."""

    def never(*args: object, **kwargs: object) -> None:
        raise AssertionError("captured")

    monkeypatch.setattr("fxzero.cli.subject.capture", never)
    assert_sentence(call(*arguments), 2, message)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is no JSON"),
        ("{", "is no JSON"),
        ("[]", "holds no analysis"),
        ("{}", "holds no analysis"),
        ("[" * 100_000, "is no JSON"),
        ('{"schedules": []}', "lacks 'zero'"),
        ('{"schedules": 3, "zero": 1}', "schedules=3 must be"),
        ('{"schedules": [], "zero": "one"}', "zero='one' must be a whole number"),
        ('{"schedules": [], "new": 1}', "has no setting 'new'"),
        ('{"schedules": [], "flops": NaN}', "is no JSON: NaN is no number"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_files_that_hold_no_analysis_end_with_2(tmp_path: Path, content: str, message: str) -> None:
    """Nor is there a page."""
    path, page = tmp_path / "mine.json", tmp_path / "page.html"
    path.write_text(content)
    assert_sentence(call(str(path), "-o", str(page)), 2, message)
    assert not page.exists()


def test_columns_that_do_not_fit_end_with_2(tmp_path: Path) -> None:
    """Somebody has changed a file by hand."""
    data = json.loads(call(TARGET, "--json").stdout)
    data["details"][0]["kinds"].append("more")
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(data))
    assert_sentence(call(str(path)), 2, "graph 0 holds memory of other than")


def test_no_text_ends_with_2(tmp_path: Path) -> None:
    """Bytes that are no UTF-8."""
    path = tmp_path / "mine.json"
    path.write_bytes(b"\xff\xfe\x00")
    assert_sentence(call(str(path)), 2, "is no JSON")


def test_a_model_that_cannot_be_compiled_ends_with_2(tmp_path: Path) -> None:
    """And leaves no page."""
    path = tmp_path / "page.html"
    result = call("tests.targets:breaks", "-o", str(path))
    assert result.exit_code == 2
    assert "this model says no" in result.stderr
    assert not path.exists()
