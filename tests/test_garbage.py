"""What a compilation does to the garbage collector, and gives back."""

from __future__ import annotations

import gc

import pytest

from fxzero import _compat
from tests import garbage


def test_a_compilation_freezes_what_was_there_and_thaws_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All other tests run with frozen objects, where it does neither."""
    calls: list[str] = []
    monkeypatch.setattr(gc, "freeze", lambda: calls.append("freeze"))
    monkeypatch.setattr(gc, "unfreeze", lambda: calls.append("unfreeze"))
    monkeypatch.setattr(gc, "get_freeze_count", lambda: 0)
    with _compat.collecting_only_new_objects():
        assert calls == ["freeze"]
    assert calls == ["freeze", "unfreeze"]
    monkeypatch.setattr(gc, "get_freeze_count", lambda: 3)
    with _compat.collecting_only_new_objects():
        pass
    assert calls == ["freeze", "unfreeze"]


def test_what_is_frozen_is_not_walked_through() -> None:
    """And something is said to be."""
    garbage.freeze()
    assert len(gc.get_objects()) < 1000
    assert gc.get_freeze_count() > 0
