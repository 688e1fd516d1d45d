"""What a compilation does to the garbage collector, and gives back."""

from __future__ import annotations

import contextlib
import gc

import pytest
import torch

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


def test_dynamo_traces_with_what_was_there_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it calls a backend: the callback is registered once, and again after a reset."""
    calls: list[str] = []
    monkeypatch.setattr(gc, "get_freeze_count", lambda: 0)
    monkeypatch.setattr(gc, "freeze", lambda: calls.append("freeze"))
    monkeypatch.setattr(gc, "unfreeze", lambda: calls.append("unfreeze"))

    def backend(module: object, inputs: object) -> object:
        with _compat.collecting_only_new_objects():
            calls.append("compile")
        return module

    for _ in range(2):
        torch._dynamo.reset()
        calls.clear()
        _compat.collect_only_new_objects_in_dynamo()
        _compat.collect_only_new_objects_in_dynamo()
        torch.compile(torch.sin, backend=backend)(torch.ones(2))
        assert calls == ["freeze", "compile", "unfreeze"]


def test_the_collector_comes_as_often_as_before_afterwards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever is raised inside; where somebody has switched it off, or slowed it, so it stays."""
    monkeypatch.setattr(gc, "get_freeze_count", lambda: 0)
    monkeypatch.setattr(gc, "freeze", lambda: None)
    monkeypatch.setattr(gc, "unfreeze", lambda: None)
    before = gc.get_threshold()
    try:
        for outside, inside in ((700, 10_000), (0, 0), (20_000, 20_000)):
            gc.set_threshold(outside, 9, 8)
            with contextlib.suppress(KeyError), _compat.collecting_only_new_objects():
                assert gc.get_threshold() == (inside, 9, 8)
                raise KeyError
            assert gc.get_threshold() == (outside, 9, 8)
    finally:
        gc.set_threshold(*before)


def test_what_is_frozen_is_not_walked_through() -> None:
    """And something is said to be."""
    garbage.freeze()
    assert len(gc.get_objects()) < 1000
    assert gc.get_freeze_count() > 0
