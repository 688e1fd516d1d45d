"""What the worked cases take at full size, by `fxzero estimate`, on machines that are not here.

    python examples/benchmarks/estimates.py                       all of them: some minutes each
    python examples/benchmarks/estimates.py --only minigpt-45b    one again
    python examples/benchmarks/estimates.py --table               what is in the file, for the docs

Figures are simulated, from the cluster's figures in `conf/cluster/`; nothing of them was measured.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).with_name("results") / "estimates.json"

_MINIGPT = "--world-size 64 --cluster dgx_a100"
_XL = "gpt2-1.5b --world-size 1 --batch 2 --cluster dgx2 --zero 3"
CASES = {
    "gpt-lite": "gpt-lite --world-size 8 --batch 8 --micro-batches 4 --cluster dgx2 "
    "--mesh pipeline=4,shard=2",
    "resnet-20": "examples.resnet_cifar:resnet20 --world-size 8 --batch 128 --cluster dgx2",
    "minigpt-1.7b": f"minigpt-1.7b {_MINIGPT} --batch 2",
    "minigpt-12.8b": f"minigpt-12.8b {_MINIGPT} --batch 1 --zero 2 --zero 3",
    "minigpt-45b": f"minigpt-45b {_MINIGPT} --batch 1 --zero 2 --zero 3",
    "gpt-xl": _XL,
    "gpt-xl, states_host": f"""{_XL} --options '{{"memory": "states_host"}}'""",
    "gpt-xl, all_host": f"""{_XL} --options '{{"memory": "all_host"}}'""",
    "gpt-xl, infinity": f"""{_XL} --options '{{"memory": "infinity"}}'""",
}
"""The arguments of `fxzero estimate`."""


def estimated(arguments: str) -> dict[str, Any]:
    """What `fxzero estimate` says; it ends with 1 where nothing fits, which is an answer too.

    Raises:
        SystemExit: it says nothing.
    """
    words = [sys.executable, "-m", "fxzero", "estimate", *shlex.split(arguments), "--json"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if not done.stdout:
        sys.exit(f"fxzero estimate {arguments} ended with {done.returncode}:\n{done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def table(results: dict[str, Any]) -> Iterator[str]:
    """Lines of Markdown: a row for each ZeRO stage of each case."""
    yield "| case | ranks | layout | peak a rank, GiB | host, GiB | disk, GiB | step, s | MFU |"
    yield "|---|---|---|---|---|---|---|---|"
    for name, result in results.items():
        found = result["estimate"]
        layouts = {"": found["stages"]}
        layouts |= {f"{mesh}, ": made["stages"] for mesh, made in found["meshes"].items()}
        for layout, stages in layouts.items():
            for zero, stage in stages.items():
                peak = f"{stage['peak_bytes'] / 2**30:.1f}"
                fits = (
                    ""
                    if stage["fits"]
                    else " (has " + (f"{found['device_memory_bytes'] / 2**30:.1f})")
                )
                yield (
                    f"| {name} | {found['world_size']} {found['cluster']} | {layout}ZeRO-{zero} "
                    f"| {peak}{fits} | {stage['host_bytes'] / 2**30:.1f} "
                    f"| {stage['disk_bytes'] / 2**30:.1f} "
                    f"| {stage['step_ms'] / 1e3:.3g} | {stage['mfu']:.0%} |"
                )


def main() -> None:
    """Estimate, and keep what was found."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", choices=CASES, action="append", help="some of the cases")
    parser.add_argument("--table", action="store_true", help="print what there is, as Markdown")
    chosen = parser.parse_args()
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    if chosen.table:
        print("\n".join(table(results)))
        return
    for name in chosen.only or CASES:
        found = estimated(CASES[name])
        results[name] = {"command": f"fxzero estimate {CASES[name]}", "estimate": found}
        ordered = {case: results[case] for case in CASES if case in results}
        RESULTS.write_text(json.dumps(ordered, indent=1) + "\n")
        print(f"{name}: done", file=sys.stderr)


if __name__ == "__main__":
    main()
