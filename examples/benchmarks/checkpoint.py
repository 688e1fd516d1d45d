"""What saving holds training up for, how long it takes, how large it is, and how fast it loads.

    torchrun --standalone --nproc-per-node 2 examples/benchmarks/checkpoint.py --json FILE

A GPT in fp32 with AdamW's state, sharded by ZeRO-3, no step in between: 3.8 GB, unless asked
otherwise. Of less it is told mostly what does not depend on it, 0.1 s of a load. In turns:

    copy         this rank's state to memory that is there: what no asynchronous save can beat
    fxzero       `fxzero.checkpoint.save`: the call, and until it is on disk, hashed and renamed
    dcp async    `torch.distributed.checkpoint.async_save`, as it comes
    dcp          `torch.distributed.checkpoint.save`, as it comes
    torch.save   each rank's tensors in a file of its own
    deepspeed    `engine.save_checkpoint` of the same model at its ZeRO-3, with `--deepspeed`; what
                 it leaves in the system's memory is then brought to the disk, as the others' is
    read         the files of fxzero's checkpoint, from the disk (what is in memory is dropped)
    read, kept   the same into memory for all of it, as a load needs that changes nothing before it
                 has read everything; no hash is compared
    load         `fxzero.checkpoint.load` of them, hashes compared
    dcp load     `torch.distributed.checkpoint.load` of the same files

Every rank tells its time, and the longest counts.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import typer
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # examples is not installed

import fxzero
from examples.benchmarks.report import machine, table, write_json
from examples.models import gpt_bench
from fxzero import checkpoint
from fxzero.checkpoint import large_pages
from fxzero.checkpoint.staging import local_part
from fxzero.checkpoint.state import flat

READ_BYTES = 8 << 20


def longest(action: Callable[[], object]) -> float:
    """Seconds that an action takes on the slowest rank. A collective."""
    dist.barrier()
    began = time.perf_counter()
    action()
    seconds = torch.tensor(time.perf_counter() - began)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return seconds.item()


def files_on_disk(folder: Path) -> Iterator[int]:
    """The files of a folder, each open, once they are on the disk."""
    for path in folder.rglob("*"):
        if path.is_file():
            handle = os.open(path, os.O_RDONLY)
            os.fsync(handle)
            yield handle
            os.close(handle)


def forget(folder: Path) -> None:
    """Let the system forget what it has of some files in memory."""
    dist.barrier()
    for handle in files_on_disk(folder):
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    dist.barrier()


def deepspeed_engine(layers: int, hidden: int) -> Any:
    """The same model and optimizer under DeepSpeed's ZeRO-3, behind a step."""
    import deepspeed

    torch.manual_seed(0)
    model = gpt_bench(num_layers=layers, hidden=hidden, num_heads=8)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 1 << 30,
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    engine.backward(engine(*model.example_inputs(1)))
    engine.step()
    return engine


def read_own(folder: Path) -> None:
    """Read this rank's file, and nothing else."""
    buffer = bytearray(READ_BYTES)
    for path in sorted(folder.glob(f"__{dist.get_rank()}_*.distcp")):
        with open(path, "rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def size_of(folder: Path) -> int:
    """Bytes of all files in a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def read_and_keep(folder: Path) -> None:
    """Read this rank's file into memory of its own, in large pages as a load has them."""
    for path in sorted(folder.glob(f"__{dist.get_rank()}_*.distcp")):
        form = torch.Size((path.stat().st_size,)), torch.uint8
        into = memoryview(large_pages.empty({"file": form})["file"].numpy())
        with open(path, "rb", buffering=0) as file:
            at = 0
            while count := file.readinto(into[at : at + READ_BYTES]):
                at += count


class Contenders:
    """The ways to save and load one state."""

    def __init__(self, state: fxzero.TrainState, folder: Path, engine: Any = None) -> None:
        self.state = state
        self.engine = engine
        """DeepSpeed's; None without it."""
        self.folder = folder
        self.parts = {name: local_part(t) for name, t in flat(state.look()[0]).items()}
        self.copies = {name: torch.empty_like(part) for name, part in self.parts.items()}
        self.times: dict[str, list[float]] = {}
        self.group = dist.new_group(backend="gloo")
        """Of DCP's thread: beside it this benchmark's own barriers run."""
        self.step = 0

    def time(self, name: str, action: Callable[[], object]) -> None:
        """Time one of them."""
        self.times.setdefault(name, []).append(longest(action))

    def copy(self) -> None:
        """Copy this rank's state."""
        for name, part in self.parts.items():
            self.copies[name].copy_(part)

    def for_dcp(self) -> dict[str, Any]:
        """What users of DCP save."""
        assert self.state.optimizer is not None
        return {
            "model": get_model_state_dict(self.state.model),
            "optimizer": get_optimizer_state_dict(self.state.model, self.state.optimizer),
        }

    def round(self) -> None:
        """All of them once."""
        rank = dist.get_rank()
        self.step += 1
        self.time("copy", self.copy)
        saving: list[checkpoint.Saving] = []
        ours = self.folder / "fxzero"
        self.time(
            "fxzero",
            lambda: saving.append(checkpoint.save(self.state, ours, step=self.step, keep=1)),
        )
        self.time("fxzero, until on disk", lambda: saving[0].wait())
        theirs = self.folder / "async"
        futures: list[Any] = []
        self.time(
            "dcp async",
            lambda: futures.append(
                dcp.async_save(self.for_dcp(), checkpoint_id=theirs, process_group=self.group)
            ),
        )
        self.time("dcp async, until on disk", lambda: futures[0].result())
        self.time("dcp", lambda: dcp.save(self.for_dcp(), checkpoint_id=self.folder / "dcp"))
        plain = self.folder / f"plain{rank}.pt"

        def save_plain() -> None:
            with open(plain, "wb") as file:
                torch.save(self.parts, file)
                os.fsync(file.fileno())

        self.time("torch.save", save_plain)
        if self.engine is not None:
            parts = self.folder / "deepspeed"
            self.time("deepspeed", lambda: self.engine.save_checkpoint(str(parts), tag="only"))
            self.time("deepspeed, until on disk", lambda: list(files_on_disk(parts)))
        newest = checkpoint.folder.published(ours)[-1].path
        forget(self.folder)
        self.time("read", lambda: read_own(newest))
        forget(self.folder)
        self.time("read, kept", lambda: read_and_keep(newest))
        forget(self.folder)
        self.time("load", lambda: checkpoint.load(self.state, ours))
        forget(self.folder)
        self.time("dcp load", lambda: dcp.load(self.for_dcp(), checkpoint_id=newest))
        dist.barrier()
        if rank == 0:
            self.sizes = {
                "fxzero": size_of(newest),
                "dcp": size_of(self.folder / "dcp"),
                "torch.save": sum(p.stat().st_size for p in self.folder.glob("plain*.pt")),
            }
            if self.engine is not None:
                self.sizes["deepspeed"] = size_of(self.folder / "deepspeed")
            for name in ("async", "dcp", "deepspeed"):
                shutil.rmtree(self.folder / name, ignore_errors=True)
        dist.barrier()


def main(
    layers: int = 16,
    hidden: int = 1280,
    repeats: int = 9,
    folder: Annotated[Path, typer.Option(help="On the disk to measure.")] = Path("checkpoints"),
    deepspeed: Annotated[bool, typer.Option(help="With DeepSpeed's save, if installed.")] = False,
    json: Path | None = None,
) -> None:
    """Save and load, in turns."""
    fxzero.init_distributed()
    facts = machine("checkpoint.py", "cpu")
    torch.manual_seed(0)
    model = fxzero.shard(gpt_bench(num_layers=layers, hidden=hidden, num_heads=8), zero=3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    state = fxzero.TrainState(model, optimizer)
    tensor_bytes = sum(tensor.nbytes for tensor in flat(state.look()[0]).values())
    ours = folder / "run"
    engine = deepspeed_engine(layers, hidden) if deepspeed else None
    contenders = Contenders(state, ours, engine)
    ours.mkdir(parents=True, exist_ok=True)
    for _ in range(repeats + 1):
        contenders.round()
    if dist.get_rank() == 0:
        shutil.rmtree(ours)
        # The first of each makes its buffers.
        times = {name: median(values[1:]) for name, values in contenders.times.items()}
        bounds = dict.fromkeys(("fxzero", "dcp async"), "copy")
        bounds |= dict.fromkeys(("read, kept", "load", "dcp load"), "read")
        if deepspeed:
            bounds["deepspeed"] = "copy"
        rows: list[dict[str, Any]] = [
            {
                "name": name,
                "median_s": seconds,
                "first_s": contenders.times[name][0],
                "all_s": contenders.times[name][1:],
                "bytes_per_s": tensor_bytes / seconds,
                "ratio": seconds / times[bounds[name]] if name in bounds else None,
                "file_bytes": contenders.sizes.get(name),
            }
            for name, seconds in times.items()
        ]
        print(
            table(
                ["", "s", "first", "GB/s", "of its bound", "files/tensors"],
                [
                    [
                        row["name"],
                        f"{row['median_s']:.3f}",
                        f"{row['first_s']:.3f}",
                        f"{row['bytes_per_s'] / 1e9:.2f}",
                        "" if row["ratio"] is None else f"{row['ratio']:.2f}",
                        ""
                        if row["file_bytes"] is None
                        else f"{row['file_bytes'] / tensor_bytes:.4f}",
                    ]
                    for row in rows
                ],
            )
        )
        if json is not None:
            start = f"torchrun --standalone --nproc-per-node {dist.get_world_size()}"
            facts["command"] = facts["command"].replace("python", start, 1)
            shape = {"num_layers": layers, "hidden": hidden, "ranks": dist.get_world_size()}
            write_json(json, {**facts, **shape, "tensor_bytes": tensor_bytes}, rows)


if __name__ == "__main__":
    typer.run(main)
