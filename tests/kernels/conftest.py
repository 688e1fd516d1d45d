"""Where kernels run in these tests: on the GPU if there is one, else in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.checking import DEVICE


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """On a GPU these are GPU tests."""
    for item in items:
        if DEVICE == "cuda" and "tests/kernels" in item.path.as_posix():
            item.add_marker(pytest.mark.gpu)


@pytest.fixture(autouse=True)
def _interpret(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU tensors go to the Triton kernels here, and only here."""
    if DEVICE == "cpu":
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    torch.manual_seed(0)
