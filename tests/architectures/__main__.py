"""Train every architecture, print a table, write JSON.

    python -m tests.architectures [--only gpt2 --only vit] [--json FILE]

Two gloo ranks, stages 0 and 3, both doors. What takes longer than `--limit` is a hang.
Exit code 1 if anything is wrong, crashes or hangs.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path

from tests.architectures.models import ARCHITECTURES
from tests.architectures.run import DOORS, Verdict, judge
from tests.parity.harness import Pool, RanksFailedError

STAGES = (0, 3)
WORLD_SIZE = 2


def main() -> int:
    """Run what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", action="append", choices=sorted(ARCHITECTURES))
    parser.add_argument("--zero", action="append", type=int, choices=STAGES)
    parser.add_argument("--door", action="append", choices=DOORS)
    parser.add_argument("--json", type=Path, help="write what was found here")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds for one training")
    parser.add_argument("--verbose", action="store_true", help="print causes in full")
    arguments = parser.parse_args()
    pool = Pool(WORLD_SIZE, timeout_s=arguments.limit)
    found: list[Verdict] = []
    try:
        for name in arguments.only or ARCHITECTURES:
            for zero in arguments.zero or STAGES:
                for door in arguments.door or DOORS:
                    verdict = attempt(pool, name, zero, door)
                    found.append(verdict)
                    print(line(verdict, arguments.verbose), flush=True)
                    if arguments.json:
                        rows = [dataclasses.asdict(v) for v in found]
                        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")
    finally:
        pool.close()
    outcomes = [v.outcome for v in found]
    counts = {o: outcomes.count(o) for o in dict.fromkeys(outcomes)}
    print(f"{len({v.name for v in found})} architectures: {counts}")
    return 0 if set(outcomes) <= {"right", "refused"} else 1


def attempt(pool: Pool, name: str, zero: int, door: str) -> Verdict:
    """The first rank's verdict; a crash or a hang is one too."""
    try:
        verdicts = pool.run(judge, name, zero, door)
    except RanksFailedError as error:
        kind = ARCHITECTURES[name].kind
        outcome = "hung" if "gave no answer" in str(error) else "crashed"
        return Verdict(name, kind, zero, door, outcome, str(error), 0, "", 0.0, 0.0)
    return next((v for v in verdicts if v.outcome != "right"), verdicts[0])


def line(verdict: Verdict, verbose: bool) -> str:
    """A row of the table."""
    why = verdict.why if verbose else (verdict.why.strip().splitlines() or [""])[-1][:100]
    return (
        f"{verdict.name:20.20} {verdict.kind:15} {verdict.zero} {verdict.door:13} "
        f"{verdict.outcome:8} {verdict.graphs} graphs {verdict.seconds:5.1f} s "
        f"{verdict.reference:11} {verdict.eager_differs:7.1e}  {why}"
    )


if __name__ == "__main__":
    sys.exit(main())
