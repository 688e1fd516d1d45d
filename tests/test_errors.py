"""One tree of errors, drawn in the module's docstring."""

from __future__ import annotations

import inspect
import re

import pytest

from fxzero import errors

_TREE = {
    "BatchError": ("FxZeroError", "ValueError"),
    "ConfigError": ("FxZeroError", "ValueError"),
    "NonFiniteGradientError": ("FxZeroError", "ArithmeticError"),
    "ShardingError": ("FxZeroError", "ValueError"),
    "KernelError": ("FxZeroError", "ValueError"),
    "CaptureError": ("FxZeroError", "RuntimeError"),
    "RanksDisagreeError": ("FxZeroError", "RuntimeError"),
    "RankLostError": ("FxZeroError", "RuntimeError"),
    "CheckpointError": ("FxZeroError", "RuntimeError"),
    "DiskError": ("FxZeroError", "OSError"),
    "HostMemoryError": ("FxZeroError", "MemoryError"),
    "PassError": ("FxZeroError", "RuntimeError"),
    "ContractError": ("PassError",),
    "VerificationError": ("FxZeroError", "RuntimeError"),
    "FxZeroError": ("Exception",),
    "FxZeroWarning": ("UserWarning",),
}


def test_the_tree() -> None:
    """Nothing more, nothing less, nothing elsewhere."""
    defined = {
        name: tuple(base.__name__ for base in kind.__bases__)
        for name, kind in vars(errors).items()
        if inspect.isclass(kind) and kind.__module__ == errors.__name__
    }
    assert defined == _TREE


def test_the_drawing_is_the_tree() -> None:
    """The docstring names each with the builtin that it can be caught as."""
    doc = inspect.getdoc(errors) or ""
    for name, bases in _TREE.items():
        assert name in doc
        for builtin in set(bases) & {
            "ValueError",
            "RuntimeError",
            "ArithmeticError",
            "MemoryError",
            "UserWarning",
        }:
            assert re.search(rf"{name} +\({builtin}\)", doc), name


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("buket", "did you mean 'bucket'? Known: bucket, prefetch"),
        ("zzz", "Known: bucket, prefetch"),
        ("", "Known: bucket, prefetch"),
    ],
)
def test_nearest(word: str, expected: str) -> None:
    """A guess only where there is a close one."""
    assert errors.nearest(word, ["prefetch", "bucket"]) == expected
