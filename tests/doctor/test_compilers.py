"""Compilers that work, and what is left behind."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from fxzero.doctor import compilers
from fxzero.doctor.verdicts import Verdict


def test_caches_are_empty_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """And those of before come back, also after an error."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/before")
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)

    def fails() -> None:
        with compilers.empty_caches():
            folder = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
            assert folder.is_dir()
            assert os.environ["TRITON_CACHE_DIR"] == str(folder)
            seen.append(folder)
            raise OSError("said")

    seen: list[Path] = []
    with pytest.raises(OSError, match="said"):
        fails()
    assert not seen[0].exists()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "/before"
    assert "TRITON_CACHE_DIR" not in os.environ


def test_wrong_values_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler that compiles something else does not work."""

    def compile(function: object, **_: object) -> compilers.Chain:
        return lambda x, y, g: (x, y, g)

    monkeypatch.setattr(torch, "compile", compile)
    monkeypatch.setattr(compilers, "probe_vector_instructions", lambda: None)  # takes seconds
    compiled = compilers.compile_chain(8, 16, torch.device("cpu"))
    assert compiled.checked.verdict is Verdict.FAIL
    assert "other values" in compiled.checked.found
    assert compiled.run is None


@pytest.mark.parametrize(("version", "verdict"), [(None, "warn"), ("3.5.1", "warn"), ("3.7", "ok")])
def test_triton(monkeypatch: pytest.MonkeyPatch, version: str | None, verdict: str) -> None:
    """Without a GPU nothing needs it."""
    if torch.cuda.is_available():
        pytest.skip("there is a GPU, which does")
    monkeypatch.setattr(compilers, "version_of", lambda name: version)
    checked = compilers.check_triton()
    assert checked.verdict == verdict
    assert bool(checked.advice) is (verdict == "warn")
