"""README.md against the code; `examples/check_readme.py` does what takes long."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_module
from typer.testing import CliRunner

import fxzero
from examples import check_readme, train
from examples.settings import Settings
from fxzero.cli.app import app
from tests.tiers import exhaustive
from tests.tracing import texts

README = check_readme.README.read_text(encoding="utf-8")
ROOT = check_readme.ROOT
COMMANDS = check_readme.commands(README)


def inspected(arguments: list[str]) -> str:
    """What a command prints."""
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    return str(result.stdout)


@texts
def test_the_excerpt_of_inspect_is_what_is_printed() -> None:
    """Line by line; only times may differ."""
    (block,) = check_readme.blocks(README, "console")
    prompt, _, excerpt = block.text.partition("\n")
    output = inspected(prompt.removeprefix("$ fxzero ").split())
    assert check_readme.unlike(excerpt, output) == []


INSPECTED = check_readme.inspect_arguments(README)[1:]
LONG = ("16x64", "1024")
"""Words of commands whose model or whose ranks are many."""
SHORT = [words for words in INSPECTED if not {*LONG} & {*words}]


@pytest.mark.parametrize(
    "arguments",
    [*SHORT[::3], *exhaustive(*(words for words in INSPECTED if words not in SHORT[::3]))],
    ids=lambda words: " ".join(words[1:]),
)
def test_every_command_of_inspect(arguments: list[str]) -> None:
    """As it is printed, with the target of the first one."""
    assert inspected(["inspect", *[w for w in arguments if w != "inspect"]])


@pytest.mark.parametrize("arguments", check_readme.questions(README), ids=lambda words: words[0])
def test_every_question(arguments: list[str]) -> None:
    """It ends with an answer, whatever that is."""
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})
    assert result.exit_code in (0, 1), result.output
    assert result.stdout.strip()


REPORTED = check_readme.report_arguments(README)


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        *exhaustive(*(words for words in REPORTED if words[0] != "…")),
        *(words for words in REPORTED if words[0] == "…"),
    ],
    ids=" ".join,
)
def test_every_command_of_report(arguments: list[str], tmp_path: Path) -> None:
    """A page is written, or what is compared with."""
    data = tmp_path / "other.json"
    if "FILE" in arguments:
        data.write_text(inspected(["report", "tests.targets:dict_inputs", "--json"]))
    names = {"FILE": str(data), "…": "tests.targets:dict_inputs"}
    words = [names.get(word, word) for word in arguments]
    where = [] if "--json" in words else ["-o", str(tmp_path / "report.html")]
    assert inspected(["report", *words, *where])


def test_what_inspect_prints_can_be_told_from_something_else() -> None:
    """A changed number, a lost line, an order that is another."""
    excerpt = "│ 0 │ bucket │ 47.9 │ 10 │ 8 │ gathers=4, … │\n│ …\nlast: 3"
    good = "│     0 │ bucket │ 1.2 │ 10 │ 8 │ gathers=4, reduces=3 │\nother\nlast: 3"
    assert check_readme.unlike(excerpt, good) == []
    for old, new in (("8 │", "9 │"), ("gathers=4", "gathers=5"), ("last: 3", "last: 4")):
        assert len(check_readme.unlike(excerpt, good.replace(old, new))) == 1
    assert check_readme.unlike("b\na", "a\nb") == ["a"]


TRAINING = list(check_readme.of_program(COMMANDS, "examples/train.py"))


@pytest.mark.parametrize("overrides", TRAINING, ids=" ".join)
def test_every_override_of_the_trainer(
    overrides: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """They are settings, of a run that could begin."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.txt").write_text("a text of one's own\n" * 1000)
    single = [word for word in overrides if word != "-m"]
    for choice in range(4 if "-m" in overrides else 1):
        chosen = [re.sub(r"=(\d(,\d)+)$", f"={choice}", word) for word in single]
        with initialize_config_module("examples.conf", version_base="1.3"):
            settings = Settings.of(compose("train", overrides=chosen))
        train.check(settings, 2)


def test_files_and_selections_exist() -> None:
    """Scripts, tests, and the words that pytest selects them by."""
    for words in COMMANDS:
        paths = [w for w in words if re.fullmatch(r"(examples|tests)/\S+", w)]
        assert all((ROOT / path).exists() for path in paths), words
        if words[0] == "pytest" and "-k" in words:
            selected = words[words.index("-k") + 1]
            folders = [ROOT / path for path in paths]
            texts = [f.name + f.read_text() for folder in folders for f in files(folder)]
            assert any(selected in text for text in texts), words


def files(place: Path) -> list[Path]:
    """A file, or the Python files of a folder."""
    return [place] if place.is_file() else list(place.rglob("*.py"))


def test_links_lead_somewhere() -> None:
    """Those into the repository."""
    targets = re.findall(r"\]\((?!https?:)([^)]+)\)", README)
    assert targets
    assert all((ROOT / target).exists() for target in targets), targets


PYTHON = check_readme.blocks(README, "python")


@pytest.mark.parametrize("block", PYTHON, ids=lambda block: f"line {block.line}")
def test_python_uses_what_there_is(block: check_readme.Block) -> None:
    """It parses; every name of fxzero is public, and every option can be set."""
    tree = ast.parse(block.text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "fxzero":
            assert node.attr in fxzero.__all__
        if isinstance(node, ast.keyword) and node.arg == "options":
            options = eval(compile(ast.Expression(node.value), "README.md", "eval"))
            assert fxzero.Config.from_options(options) != fxzero.Config()


def test_options_of_the_text_are_settings() -> None:
    """``cost.model=measured``, `lower_kernels.table`."""
    groups = "|".join(f for f in fxzero.Config.__dataclass_fields__)
    named = re.findall(rf"`((?:{groups})\.\w+)", README)
    assert named
    for name in named:
        group, field = name.split(".")
        settings: Any = getattr(fxzero.Config(), group)
        assert field in settings.__dataclass_fields__, name


def test_figures_are_those_of_the_files() -> None:
    """Every file of results that is linked can be read."""
    paths = re.findall(r"examples/benchmarks/results/\w+\.json", README)
    assert paths
    for path in paths:
        assert json.loads((ROOT / path).read_text())
