"""Versions against pyproject.toml."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from fxzero.doctor import software
from fxzero.doctor.software import LIBRARIES, TORCH, TRITON, Wanted
from fxzero.doctor.verdicts import Verdict

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_nothing_that_is_needed_is_left_out() -> None:
    """Of what pip installs with it."""
    names = [re.split(r"[><=;]", line)[0] for line in PROJECT["dependencies"]]
    assert set(names) <= {wanted.name for wanted in (TORCH, TRITON, *LIBRARIES)}


@pytest.mark.parametrize("wanted", [TORCH, TRITON, *LIBRARIES], ids=lambda wanted: wanted.name)
def test_ranges_are_those_of_the_project(wanted: Wanted) -> None:
    """Said in both places, as a checkout has no metadata."""
    extras = PROJECT["optional-dependencies"]
    asked = extras[wanted.extra] if wanted.extra else PROJECT["dependencies"]
    (line,) = [text for text in asked if re.match(rf"{wanted.name}\b", text)]
    assert line.partition(";")[0].strip() == wanted.requirement


def test_pythons_is_too() -> None:
    """At least."""
    assert PROJECT["requires-python"] == ">=" + ".".join(map(str, software.LEAST_PYTHON))


@pytest.mark.parametrize(
    ("version", "holds"),
    [
        ("2.11.0", True),
        ("2.13.0+cpu", True),
        ("2.13.1a0+git1234567", True),
        ("2.10.9", False),
        ("2.14.0", False),
        ("3.0", False),
        ("2.9", False),
    ],
)
def test_ranges(version: str, holds: bool) -> None:
    """By numbers, not by letters: 2.9 is before 2.11."""
    assert TORCH.holds(version) is holds


def test_a_torch_that_fxzero_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    """Is a failure, with the command that mends it."""
    monkeypatch.setattr("torch.__version__", "2.9.1")
    checked = software.check_torch()
    assert checked.verdict is Verdict.FAIL
    assert "pip install 'torch>=2.11,<2.14'" in checked.advice


def test_missing_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is needed fails, what some commands need warns."""
    found = {"hydra-core": None, "transformers": None, "numpy": "1.20.0"}
    real = software.version_of
    monkeypatch.setattr(software, "version_of", lambda name: found.get(name, real(name)))
    transformers, libraries = software.check_libraries()
    assert (transformers.verdict, libraries.verdict) == (Verdict.WARN, Verdict.FAIL)
    assert "pip install 'fxzero[hf]'" in transformers.advice
    assert libraries.found == "hydra-core missing, numpy 1.20.0"
