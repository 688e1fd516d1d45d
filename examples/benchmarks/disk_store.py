"""Read and write what is on disk, against fio.

    python examples/benchmarks/disk_store.py --json disk_store.json

1 GiB by `fxzero.disk`, as a step reads and writes it (in chunks of the run's size, as many on their
way as `disk.depth`, each with its checksum), and by fio (Debian's package ``fio``) with direct I/O,
the same block size and depth on the same file system, in turns. Both write over what is there.
"""

from __future__ import annotations

import json as jsons
import shutil
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # examples is not installed

from examples.benchmarks.report import machine, table, write_json
from fxzero.disk.scratch import DiskSettings, pages
from fxzero.disk.store import DiskStore, Piece

NUM_BYTES = 1 << 30
RATES = ("bytes_per_s", "fio_bytes_per_s")


def by_store(store: DiskStore, start: Callable[[Piece, memoryview], Future[None]]) -> float:
    """Bytes a second of all pieces, by as many buffers as may be on their way."""
    depth, chunk_bytes = store.settings.depth, store.settings.chunk_bytes
    memory = pages(depth * chunk_bytes)
    memory[:] = bytes(range(256)) * (len(memory) // 256)
    free = deque(memory[i * chunk_bytes :][:chunk_bytes] for i in range(depth))
    going: deque[tuple[Future[None], memoryview]] = deque()
    begin = time.perf_counter()
    for piece in store.pieces:
        if not free:
            done, buffer = going.popleft()
            done.result()
            free.append(buffer)
        buffer = free.popleft()
        going.append((start(piece, buffer), buffer))
    for done, _ in going:
        done.result()
    return store.num_bytes / (time.perf_counter() - begin)


def by_fio(folder: Path, what: str, settings: DiskSettings) -> float:
    """Bytes a second."""
    command = ["fio", "--name=fxzero", f"--filename={folder / 'fio.bin'}", f"--rw={what}"]
    command += [f"--bs={settings.chunk_bytes}", f"--iodepth={settings.depth}", "--direct=1"]
    command += ["--ioengine=libaio", f"--size={NUM_BYTES}", "--output-format=json"]
    found = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return float(jsons.loads(found)["jobs"][0][what]["bw_bytes"])


def main(
    folder: Annotated[Path | None, typer.Option(help="Where; a temporary one.")] = None,
    chunk_bytes: Annotated[int, typer.Option(help="See disk.chunk_bytes.")] = 8 << 20,
    depth: Annotated[int, typer.Option(help="See disk.depth.")] = 4,
    repeats: Annotated[int, typer.Option(help="Runs of each, in turns.")] = 7,
    json: Annotated[Path | None, typer.Option(help="Write the figures to this file.")] = None,
) -> None:
    """Time reads and writes of 1 GiB, in turns."""
    if shutil.which("fio") is None:
        raise typer.BadParameter("fio is not installed: apt-get install fio")
    facts = machine("disk_store.py", "cpu")
    with tempfile.TemporaryDirectory(dir=folder) as own:
        settings = DiskSettings((own,), chunk_bytes, depth)
        store = DiskStore([("benchmark", NUM_BYTES)], settings)
        rates: dict[str, list[float]] = {}
        for repeat in range(-1, repeats):  # the first one fills the files
            found = {
                "fio write": by_fio(Path(own), "write", settings),
                "fxzero write": by_store(store, store.start_writing),
                "fio read": by_fio(Path(own), "read", settings),
                "fxzero read": by_store(store, store.start_reading),
            }
            for name, rate in found.items() if repeat >= 0 else ():
                rates.setdefault(name, []).append(rate)
        is_direct = store.files[0].is_direct
    rows: list[dict[str, Any]] = []
    for what in ("read", "write"):
        pairs = list(zip(rates[f"fxzero {what}"], rates[f"fio {what}"], strict=True))
        rows.append(
            {
                "what": what,
                "bytes_per_s": median(mine for mine, _ in pairs),
                "fio_bytes_per_s": median(theirs for _, theirs in pairs),
                "ratio": median(mine / theirs for mine, theirs in pairs),
                "every_bytes_per_s": pairs,
            }
        )
    shown = [
        [row["what"], *(f"{row[key] / 1e9:.2f}" for key in RATES), f"{row['ratio']:.3f}"]
        for row in rows
    ]
    print(table(["1 GiB", "GB/s", "fio GB/s", "ratio"], shown))
    if json is not None:
        about = {"chunk_bytes": chunk_bytes, "depth": depth, "direct": is_direct}
        write_json(json, {**facts, **about}, rows)


if __name__ == "__main__":
    typer.run(main)
