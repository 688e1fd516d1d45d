"""Run passes: check contracts before anything runs, time and record each, verify what they made.

The graph is verified behind the last pass, and with FXZERO_VERIFY=each behind every one, which
takes a tenth longer and names the pass that broke a rule.
"""

from __future__ import annotations

import difflib
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from fxzero.errors import ConfigError, ContractError, VerificationError
from fxzero.graph import StepGraph
from fxzero.graph.verify import verify
from fxzero.passes.base import Context, Fact, Notes, Pass
from fxzero.passes.decision import DecidingPass


@dataclass(frozen=True)
class PassRecord:
    """What one pass did to one graph."""

    name: str
    options: str
    notes: Notes
    time_ms: float
    nodes_before: int
    nodes_after: int
    before: str = ""
    """The graph's text before the pass; empty unless texts were asked for."""
    after: str = ""

    def diff(self) -> str:
        """A unified diff of the graph's text, before and after."""
        return unified(self.name, self.before, self.after)


def unified(name: str, before: str, after: str) -> str:
    """A unified diff of a graph's text, before and after a pass; empty if nothing changed."""
    lines = difflib.unified_diff(
        before.splitlines(),
        after.splitlines(),
        f"before {name}",
        f"after {name}",
        lineterm="",
        n=2,
    )
    return "\n".join(lines)


def check_contracts(passes: Sequence[Pass], given: Iterable[Fact] = ()) -> frozenset[Fact]:
    """Follow what each pass requires and provides.

    Returns:
        The facts that hold at the end.

    Raises:
        ContractError: a pass stands before the one that provides what it requires.
    """
    facts = set(given)
    for step in passes:
        missing = step.requires - facts
        if missing:
            words = ", ".join(sorted(fact.value for fact in missing))
            providers = [p.name for p in passes if p.provides & missing]
            hint = f"run it after {', '.join(providers)}" if providers else "nothing here does"
            raise ContractError(f"pass {step.name!r} requires a graph that is {words}: {hint}")
        facts |= step.provides
    return frozenset(facts)


def verifies_each() -> bool:
    """Whether somebody asks for a verified graph behind every pass.

    Raises:
        ConfigError: FXZERO_VERIFY is no word that is known.
    """
    asked = os.environ.get("FXZERO_VERIFY", "ends")
    if asked not in ("each", "ends"):
        raise ConfigError(
            f"FXZERO_VERIFY={asked!r} must be 'each', to verify the graph behind every pass, or "
            "'ends', the default: behind the last one."
        )
    return asked == "each"


def _verify_end(graph: StepGraph, facts: Iterable[Fact], after: str) -> None:
    try:
        verify(graph, facts, after=after)
    except VerificationError as error:
        raise VerificationError(
            f"{error}\n\nThis, or a pass before it: FXZERO_VERIFY=each names the one."
        ) from None


def run_passes(
    passes: Sequence[Pass],
    graph: StepGraph,
    ctx: Context,
    *,
    given: Iterable[Fact] = (),
    keep_text: bool = False,
    observe: Callable[[PassRecord], None] | None = None,
    look: Callable[[str, StepGraph], None] | None = None,
    of: Sequence[Pass] = (),
) -> list[PassRecord]:
    """Run passes in order on a graph, and verify what they made of it.

    Args:
        given: facts that hold already.
        keep_text: record the graph's text before and after, for diffs.
        observe: called with each record as soon as it exists.
        look: called with the graph behind each pass.
        of: where these are not all passes of their pipeline, all of them. The graph is verified
            behind the last.
    """
    check_contracts(passes, given)
    each = verifies_each()
    every = of or passes
    given_passes = (step for step in every if not isinstance(step, DecidingPass))
    ctx.decisions.setup = " ".join(map(str, given_passes))
    facts = set(given)
    records = []
    text = graph.text() if keep_text else ""
    for step in passes:
        nodes_before = len(graph.graph.nodes)
        start = time.perf_counter()
        notes = step.run(graph, ctx)
        elapsed_ms = (time.perf_counter() - start) * 1e3
        facts |= step.provides
        if each:
            verify(graph, facts, after=step.name)
        before, text = text, graph.text() if keep_text else ""
        record = PassRecord(
            name=step.name,
            options=str(step),
            notes=notes,
            time_ms=elapsed_ms,
            nodes_before=nodes_before,
            nodes_after=len(graph.graph.nodes),
            before=before,
            after=text,
        )
        records.append(record)
        if observe is not None:
            observe(record)
        if look is not None:
            look(step.name, graph)
    if passes and not each and passes[-1] is every[-1]:
        _verify_end(graph, facts, passes[-1].name)
    return records
