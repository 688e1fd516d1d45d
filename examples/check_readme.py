"""See that README.md says what is so: every command runs, every excerpt is what is printed.

    python examples/check_readme.py          # what a release runs: some fifteen minutes
    python examples/check_readme.py --list   # the commands that were found

The test suite calls what is quick of this (`tests/test_readme.py`). Here the trainer's commands are
run for real, the first one to its end and compared with the excerpt below it; the others for two
steps. Benchmarks take hours: their options are looked up in their ``--help``.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
SHORT = ("trainer.steps=2", "trainer.val_batches=1", "trainer.sample_length=2")
"""What makes a run of the trainer short, and leaves the rest of its command as it stands."""


@dataclass(frozen=True)
class Block:
    """A fenced block."""

    kind: str
    """The word after the fence: ``sh``, ``python``, ``text``, ``console``."""
    text: str
    line: int
    """Of its first line, from 1."""


def blocks(readme: str, *kinds: str) -> list[Block]:
    """The fenced blocks of some kinds, in order."""
    fence = re.compile(r"^```(\w+)\n(.*?)^```$", re.M | re.S)
    return [
        Block(found[1], found[2], readme.count("\n", 0, found.start()) + 2)
        for found in fence.finditer(readme)
        if found[1] in kinds
    ]


def commands(readme: str) -> list[list[str]]:
    """Every command: of shell blocks, of prompts, and of tables and sentences."""
    lines = [line for block in blocks(readme, "sh") for line in block.text.splitlines()]
    lines += [
        line.removeprefix("$ ")
        for block in blocks(readme, "console")
        for line in block.text.splitlines()
        if line.startswith("$ ")
    ]
    prose = re.sub(r"^```.*?^```$", "", readme, flags=re.M | re.S)
    lines += re.findall(r"`((?:pytest|python|fxzero|torchrun|pip) [^`]+)`", prose)
    found: list[list[str]] = []
    for line in lines:
        words = shlex.split(line, comments=True)
        while "&&" in words:
            found.append(words[: words.index("&&")])
            words = words[words.index("&&") + 1 :]
        found.append(words)
    return [words for words in found if words]


def of_program(found: Sequence[list[str]], script: str) -> Iterator[list[str]]:
    """The arguments of each command that runs a program or script."""
    for words in found:
        if script in words:
            yield words[words.index(script) + 1 :]


def inspect_arguments(readme: str) -> list[list[str]]:
    """What `fxzero inspect` is called with: whole commands, and the options that the text names."""
    called = of_program(commands(readme), "fxzero")
    found = [words[1:] for words in called if words[0] == "inspect" and words[1:]]
    target = next(words for words in found if words[0] != "…")
    named = re.findall(r"`(--[a-z-]+(?: [^`]+)?)`", readme)
    paths = {"FILE": os.devnull, "PASS": "bucket"}
    whole = [target[:1] + words[1:] if words[0] == "…" else words for words in found]
    options = [[target[0], *shlex.split(text)] for text in named]
    return [[paths.get(word, word) for word in words] for words in (*whole, *options)]


def questions(readme: str) -> list[list[str]]:
    """The other commands that ask something of a model, but for those that take a minute."""
    quick = ("explain", "diff", "trace")
    found = [words for words in of_program(commands(readme), "fxzero") if words[0] in quick]
    return [[os.devnull if word == "step.json" else word for word in words] for words in found]


def report_arguments(readme: str) -> list[list[str]]:
    """What `fxzero report` is called with, each once."""
    every = of_program(commands(readme), "fxzero")
    found = [words[1:] for words in every if words[:1] == ["report"] and words[1:]]
    return [words for i, words in enumerate(found) if words not in found[:i]]


def unlike(excerpt: str, output: str) -> list[str]:
    """The lines of an excerpt that the output does not have, in this order.

    ``…`` stands for anything, a line of its own for any lines. Times that were measured are not
    compared: the milliseconds of a pass, tokens per second, the process's peak.
    """
    lines = iter([_comparable(line) for line in output.splitlines()])
    missing = []
    for line in excerpt.splitlines():
        wanted = _comparable(line)
        if wanted.strip(" …") == "" or set(line) <= set("┏┳━┓┡╇┩└┴─┘"):
            continue
        pattern = re.compile(".*".join(map(re.escape, wanted.split("…"))))
        if not any(pattern.fullmatch(other) for other in lines):
            missing.append(line)
            lines = iter([_comparable(other) for other in output.splitlines()])
    return missing


def _comparable(line: str) -> str:
    """A line without borders, padding, and what a clock said."""
    line = " ".join(re.sub("[│┃]", " ", line).split())
    line = re.sub(r"^(\d+ \w+) [\d.]+ (\d+ \d+ )", r"\1 \2", line)  # graph, pass, ms, nodes
    line = re.sub(r"\b(in|after) [\d.]+ s\b", "", line)
    return re.sub(r"[\d,]+ tokens/s peak [\d.]+ MiB", "", line)


def run(words: Sequence[str], folder: Path) -> str:
    """Run a command in the checkout; returns what it prints.

    Raises:
        SystemExit: it fails.
    """
    print("+", shlex.join(words), flush=True)
    environment = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    done = subprocess.run(
        words, cwd=folder, env=environment, text=True, stdout=subprocess.PIPE, check=False
    )
    if done.returncode:
        sys.exit(f"{shlex.join(words)} ended with {done.returncode}:\n{done.stdout}")
    return done.stdout


def check_training(readme: str, folder: Path) -> None:
    """Run the trainer's commands: the first to its end, against its excerpt."""
    (folder / "my.txt").write_text((ROOT / "README.md").read_text() * 4)
    first = True
    for words in commands(readme):
        if "examples/train.py" not in words or "…" in words:
            continue
        command = [str(ROOT / w) if w == "examples/train.py" else w for w in words]
        if first:
            output = run(command, folder)
            (excerpt,) = (b.text for b in blocks(readme, "text") if "final loss" in b.text)
            if missing := unlike(excerpt, output):
                sys.exit("README.md shows what was not printed:\n" + "\n".join(missing))
            first = False
        elif "8" in command or "model=gpt_lite" in command:
            run([*command, "--cfg", "job"], folder)  # eight ranks need a larger machine
        else:
            run([*command, *SHORT], folder)


def check_tests(readme: str) -> None:
    """See that each test command selects tests."""
    for words in commands(readme):
        if words[0] == "pytest" and len(words) > 1:
            run([sys.executable, "-m", "pytest", "--collect-only", "-q", *words[1:]], ROOT)


def check_benchmarks(readme: str) -> None:
    """See that each benchmark has the options that it is called with."""
    for words in commands(readme):
        scripts = [w for w in words if w.startswith("examples/benchmarks/")]
        if not scripts:
            continue
        shown = run([sys.executable, scripts[0], "--help"], ROOT)
        for option in (w for w in words if w.startswith("--")):
            if option not in shown:
                sys.exit(f"{scripts[0]} has no option {option}, which README.md names")


def main() -> None:
    """Check all that takes long; the test suite checks the rest."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--list", action="store_true", help="print the commands and stop")
    chosen = parser.parse_args()
    readme = README.read_text(encoding="utf-8")
    if chosen.list:
        for words in commands(readme):
            print(shlex.join(words))
        return
    run([sys.executable, "-m", "pytest", "-q", "tests/test_readme.py"], ROOT)
    check_tests(readme)
    check_benchmarks(readme)
    with tempfile.TemporaryDirectory() as folder:
        check_training(readme, Path(folder))
    print("README.md says what is so")


if __name__ == "__main__":
    main()
