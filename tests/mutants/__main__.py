"""Try every fault against its catcher: ``python -m tests.mutants [words] [--write]``.

    words     only faults in whose names one of these occurs
    --write   write docs/mutants.md, and try nothing

The functions of the imported modules get the fault, in this process and in every rank that a
test starts; the files stay as they are. A catcher that passes, or that never got as far as
failing, is told and makes the exit code 1. Without a fault the catchers are ordinary tests.
"""

from __future__ import annotations

import contextlib
import io
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from unittest import mock

import pytest

from tests.mutants.fault import ROOT, Fault
from tests.mutants.faults import FAULTS
from tests.mutants.table import DOCS, document
from tests.parity.harness import Pool

_in_this_rank: list[contextlib.AbstractContextManager[None]] = []
"""Entered, and left by nobody: a rank ends with its fault."""


@dataclass
class Outcomes:
    """A pytest plugin that counts what passed, and keeps what failed."""

    num_passed: int = 0
    failures: list[str] = field(default_factory=list)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A setup that fails is no catch."""
        if report.when == "call" and report.passed:
            self.num_passed += 1
        elif report.when == "call" and report.failed:
            self.failures.append(report.longreprtext)


def apply_in_rank(name: str) -> None:
    """Job: a fault, for as long as the rank lives."""
    (fault,) = (f for f in FAULTS if f.name == name)
    context = fault.in_process()
    context.__enter__()
    _in_this_rank.append(context)


@contextlib.contextmanager
def in_ranks(fault: Fault) -> Iterator[None]:
    """Let every pool of ranks begin with the fault."""
    start = Pool._start

    def start_with_fault(self: Pool) -> None:
        start(self)
        self.run(apply_in_rank, fault.name)

    with mock.patch.object(Pool, "_start", start_with_fault):
        yield


def test_of(fault: Fault) -> str:
    """The test that fails."""
    if fault.graph is not None:
        return f"tests/mutants/test_mutants.py::test_a_graph_without_fault[{fault.graph}]"
    return fault.caught_by


def try_fault(fault: Fault) -> tuple[bool, str]:
    """Whether a fault is caught, and what is said."""
    outcomes, printed = Outcomes(), io.StringIO()
    arguments = ["-q", "-x", "-n", "0", "-p", "no:cacheprovider", f"--rootdir={ROOT}"]
    with fault.in_process(), in_ranks(fault), contextlib.redirect_stdout(printed):
        pytest.main([*arguments, test_of(fault)], plugins=[outcomes])
    if not outcomes.failures:
        passed = "NOT CAUGHT: its catcher passes"
        return False, passed if outcomes.num_passed else printed.getvalue()
    said = outcomes.failures[0]
    if fault.graph is not None and "VerificationError" not in said:
        return False, f"verify says nothing:\n{said}"
    return True, reason(said)


def reason(said: str) -> str:
    """The lines of a failure that say why: the last error of a rank, or of this process."""
    lines = [line[1:].strip() for line in said.splitlines() if line.startswith("E ")]
    errors = [line for line in lines if "Error: " in line or line.startswith("assert ")]
    errors = [line for line in errors if "RanksFailedError" not in line]
    return errors[-1][:160] if errors else "".join(lines[:1])[:160]


def main(words: Sequence[str]) -> int:
    """Try the faults whose names hold one of the words; all without words."""
    chosen = [f for f in FAULTS if not words or any(word in f.name for word in words)]
    missed = 0
    for fault in chosen:
        start = time.perf_counter()
        caught, said = try_fault(fault)
        missed += not caught
        seconds = time.perf_counter() - start
        print(f"{'caught' if caught else 'MISSED'} {seconds:5.1f} s  {fault.name}\n    {said}")
        sys.stdout.flush()
    print(f"{len(chosen) - missed} of {len(chosen)} faults are caught")
    return 1 if missed else 0


if __name__ == "__main__":
    if "--write" in sys.argv[1:]:
        DOCS.parent.mkdir(exist_ok=True)
        DOCS.write_text(document(FAULTS))
        sys.exit()
    # The ranks find their jobs by this module's name.
    from tests.mutants import __main__ as module

    sys.exit(module.main(sys.argv[1:]))
