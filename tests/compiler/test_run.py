"""When the graph is verified: behind the last pass, or behind each one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest

from fxzero.compiler.run import run_passes
from fxzero.errors import ConfigError, VerificationError
from fxzero.graph import Role, StepGraph
from fxzero.passes import Bucket
from fxzero.passes.base import Context, Notes, Pass
from tests.tracing import chain, trace, up_to


@dataclass(frozen=True)
class Spoil(Pass):
    """Forget a stamp."""

    name: ClassVar[str] = "spoil"

    def run(self, graph: StepGraph, ctx: Context) -> Notes:
        """See the class."""
        next(graph.nodes(role=Role.WAIT)).meta = {}
        return Notes()


@dataclass(frozen=True)
class Nothing(Pass):
    """Leave the graph as it is."""

    name: ClassVar[str] = "nothing"

    def run(self, graph: StepGraph, ctx: Context) -> Notes:
        """See the class."""
        return Notes()


def spoiled() -> str:
    """What is said of a graph that a pass in the middle has broken."""
    passes = [*up_to("bucket", Bucket(min_bytes=0)), Spoil(), Nothing()]
    with pytest.raises(VerificationError) as caught:
        run_passes(passes, trace(chain(2), zero=3), Context())
    return str(caught.value)


def test_behind_the_last_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """The default: found all the same, and it is said how to find whose fault it is."""
    monkeypatch.delenv("FXZERO_VERIFY")
    message = spoiled()
    assert message.startswith("after pass 'nothing': ")
    assert message.endswith("This, or a pass before it: FXZERO_VERIFY=each names the one.")


def test_behind_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one is named."""
    monkeypatch.setenv("FXZERO_VERIFY", "each")
    message = spoiled()
    assert message.startswith("after pass 'spoil': ")
    assert "FXZERO_VERIFY" not in message


def test_another_word(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not taken for either."""
    monkeypatch.setenv("FXZERO_VERIFY", "never")
    with pytest.raises(ConfigError, match="FXZERO_VERIFY='never' must be 'each'"):
        run_passes([], trace(chain(2), zero=3), Context())
