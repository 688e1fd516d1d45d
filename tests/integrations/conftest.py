"""What tests of other tools leave behind, and must not."""

from __future__ import annotations

import os
from collections.abc import Iterator
from unittest import mock

import pytest


@pytest.fixture(autouse=True)
def _keep_environment() -> Iterator[None]:
    """Until 5.0 transformers writes the precision of a run's arguments into the environment, where
    those of the next run, and its ranks, find it."""
    with mock.patch.dict(os.environ):
        yield
