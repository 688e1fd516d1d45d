"""The faults of `tests.mutants.faults`: those that `verify` catches are tried here and now.

The others need processes: ``python -m tests.mutants`` tries them all.
"""

from __future__ import annotations

import ast
from typing import Any

import pytest

from fxzero.errors import VerificationError
from fxzero.graph.verify import verify
from tests.mutants.fault import ROOT, Fault
from tests.mutants.faults import FAULTS
from tests.mutants.graphs import GRAPHS
from tests.mutants.table import DOCS, document

VERIFIED = {fault.name: fault for fault in FAULTS if fault.graph is not None}


@pytest.mark.parametrize("name", GRAPHS)
def test_a_graph_without_fault(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rule holds, after every pass."""
    verified: list[str] = []

    def noting(*arguments: Any, after: str) -> None:
        verify(*arguments, after=after)
        verified.append(after)

    monkeypatch.setattr("fxzero.compiler.run.verify", noting)
    GRAPHS[name]()
    assert verified


@pytest.mark.parametrize("name", VERIFIED)
def test_verify_catches(name: str) -> None:
    """Before anything runs."""
    fault = VERIFIED[name]
    assert fault.graph is not None
    assert fault.says, "say by which rule"
    with fault.in_process(), pytest.raises(VerificationError, match=fault.says):
        GRAPHS[fault.graph]()


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_is_where_it_says(fault: Fault) -> None:
    """The line is there, once; with the fault it is Python still, and another program."""
    mine, theirs = ast.parse(fault.changed()), ast.parse((ROOT / fault.file).read_text())
    assert ast.dump(mine) != ast.dump(theirs)


@pytest.fixture(scope="module")
def tests_of_every_run(request: pytest.FixtureRequest) -> frozenset[str]:
    """Ids of the tests in the files of all catchers, with their cases and without; those that only
    an exhaustive run takes are not among them."""
    files = {fault.caught_by.partition("::")[0] for fault in FAULTS if fault.graph is None}
    found: set[str] = set()
    for file in sorted(files):
        collector = pytest.Module.from_parent(request.session, path=ROOT / file)
        for item in request.session.genitems(collector):
            if item.get_closest_marker("exhaustive") is None:
                found |= {item.nodeid, item.nodeid.partition("[")[0]}
    return frozenset(found)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_catcher_is_there(fault: Fault, tests_of_every_run: frozenset[str]) -> None:
    """A graph, or a test by its id that every run takes."""
    if fault.graph is not None:
        assert fault.graph in GRAPHS
    else:
        assert fault.caught_by in tests_of_every_run


def test_the_faults_are_many_and_differ() -> None:
    """No name and no change twice."""
    assert len(FAULTS) >= 30
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
    assert len({(fault.file, fault.before, fault.after) for fault in FAULTS}) == len(FAULTS)


def test_the_table_of_the_documentation() -> None:
    """``python -m tests.mutants --write`` writes it anew."""
    assert DOCS.read_text() == document(FAULTS)
