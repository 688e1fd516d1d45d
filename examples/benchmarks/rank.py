"""What each rank process does: read a job, measure it, write `rank<N>.json`.

    torchrun ... -m examples.benchmarks.rank JOB_FILE RESULT_FOLDER

One process measures one contender once, so nothing is warm and nobody else's memory counts.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.elastic.multiprocessing.errors import record

from examples.benchmarks.contenders import CONTENDERS, Training, build, load_imports
from examples.benchmarks.measure import (
    PeakMeter,
    allocated_peak_bytes,
    held_bytes,
    peak_meter,
    release_free_memory,
    timed_s,
)
from examples.benchmarks.workload import Job
from fxzero.compiler.compilation import observers

RANK = int(os.environ.get("RANK", "0"))
RANKS = int(os.environ.get("WORLD_SIZE", "1"))
MESSAGE_BYTES = 8 << 20
"""Of the messages that measure the link: a bucket's size."""


def start(meter: PeakMeter) -> int:
    """Return the bytes in use before there is a model."""
    release_free_memory()
    meter.reset()
    return meter.now_bytes()


def measure_steps(job: Job, meter: PeakMeter) -> dict[str, Any]:
    """Time whole training steps; the first one compiles, the last warm-up one settles memory."""
    baseline_bytes = start(meter)
    compilations = observe() if job.simulate else []
    training = build(job)
    seconds, losses, waited_s = [], [], []
    compile_peak_bytes = 0
    for step in range(job.warmup + job.steps):
        if step == job.warmup - 1:
            release_free_memory()
        if step == job.warmup:
            compile_peak_bytes = meter.peak_bytes()
            meter.reset()
        batch = job.sample(step, RANK, RANKS)
        meet()  # a rank that comes early must not time its wait for the others
        loss, step_s = timed_s(job.workload.device, lambda batch=batch: training.step(*batch))
        seconds.append(step_s)
        losses.append(loss.item())
        waited_s.append(getattr(training.step, "waited_s", [0.0])[0])
    steady_peak_bytes = meter.peak_bytes()
    in_tensors = tensor_peak_bytes(training, batch) if job.counts_tensors else {}
    return {
        "first_step_s": seconds[0],
        "step_ms": [step_s * 1e3 for step_s in seconds[job.warmup :]],
        "losses": losses,
        "busy_ms": [
            (step_s - wait_s) * 1e3 for step_s, wait_s in zip(seconds, waited_s, strict=True)
        ][job.warmup :],
        "peak_bytes": steady_peak_bytes - baseline_bytes,
        "peak_with_compile_bytes": max(compile_peak_bytes, steady_peak_bytes) - baseline_bytes,
        **in_tensors,
        **traffic(training.model, job),
        **(simulated(compilations) if compilations else {}),
    }


def tensor_peak_bytes(training: Training, batch: Sequence[Tensor]) -> dict[str, Any]:
    """The most that tensors take in a step, those of before it included: what a resident size holds
    beside it is Python's, the compiler's and the heap's."""
    gc.collect()
    before_bytes = held_bytes()
    return {
        "tensor_peak_bytes": before_bytes + allocated_peak_bytes(lambda: training.step(*batch)),
    }


def observe() -> list[Any]:
    """Collect fxzero's compilations from here on, graphs included."""

    found: list[Any] = []

    def keep(compilation: Any) -> None:
        compilation.keep_graphs = True
        found.append(compilation)

    observers.append(keep)
    return found


def simulated(compilations: list[Any]) -> dict[str, Any]:
    """What the simulators say of a whole step, by the costs that it was scheduled with."""
    from fxzero.schedule.simulate import simulate, simulate_memory

    (compilation,) = [c for c in compilations if c.joint is not None]
    found = simulate(compilation.joint, compilation.context.costs, fuses=True)
    memory = simulate_memory(compilation.joint, fuses=True)
    return {
        "simulated_ms": found.makespan_us / 1e3,
        "simulated_exposed_ms": found.exposed_us / 1e3,
        "simulated_peak_bytes": memory.peak_bytes,
        "costs": compilation.context.costs.name,
    }


def traffic(model: nn.Module, job: Job) -> dict[str, Any]:
    """Bytes that fxzero says each rank sent in a step: its part of what was moved."""
    if not job.contender.startswith("fxzero"):
        return {}
    import fxzero

    found = fxzero.report(model)
    others = 1 - 1 / dist.get_world_size()
    moved = (found.gathered_bytes + found.reduced_bytes) * others
    return {"sent_bytes_per_step": moved / (job.warmup + job.steps)}


def measure_first_backward(job: Job, meter: PeakMeter) -> dict[str, Any]:
    """Time the first forward and backward, which compile; of a compiled step the first step."""
    baseline_bytes = start(meter)
    training = build(job)
    batch = job.sample(0, RANK, RANKS)

    def first() -> None:
        if job.contender == "fxzero-step":
            training.step(*batch)
        else:
            training.model(*batch).backward()

    meet()
    cpu_s = time.process_time()
    _, first_s = timed_s(job.workload.device, first)
    compiled_cpu_s = time.process_time()
    peak_bytes = meter.peak_bytes() - baseline_bytes
    first()
    return {
        "first_backward_s": first_s,
        "cpu_s": compiled_cpu_s - cpu_s,
        "again_cpu_s": time.process_time() - compiled_cpu_s,
        "peak_with_compile_bytes": peak_bytes,
    }


def measure_traffic(job: Job, meter: PeakMeter) -> dict[str, Any]:
    """Time messages between each rank and its neighbours: both ways at once, many in flight."""
    world_size = dist.get_world_size()
    after, before = (RANK + 1) % world_size, (RANK - 1) % world_size
    out, into = ([torch.zeros(MESSAGE_BYTES, dtype=torch.uint8) for _ in range(8)] for _ in "oi")

    def exchange() -> None:
        requests = []
        for sent, received in zip(out, into, strict=True):
            requests += [dist.irecv(received, before), dist.isend(sent, after)]
        for request in requests:
            request.wait()

    seconds = []
    for _ in range(job.warmup + job.steps):
        meet()
        seconds.append(timed_s(job.workload.device, exchange)[1])
    num_bytes = len(out) * MESSAGE_BYTES
    return {"bytes_per_s": [num_bytes / s for s in seconds[job.warmup :]]}


def measure_machine(job: Job, meter: PeakMeter) -> dict[str, Any]:
    """Let `fxzero doctor` look at the ranks: a cluster's file."""
    from fxzero import __version__
    from fxzero.doctor import examine
    from fxzero.doctor.cluster_file import text_of

    found = examine(__version__, disk=Path(gettempdir()))
    if found.cluster is None:
        said = "; ".join(f"{c.name}: {c.found}" for c in found.checks if c.verdict == "fail")
        raise RuntimeError(f"fxzero doctor could not measure this machine: {said}")
    return {"cluster": text_of(found.cluster)}


MEASURES = {
    "steps": measure_steps,
    "first_backward": measure_first_backward,
    "traffic": measure_traffic,
    "machine": measure_machine,
}


def meet() -> None:
    """Wait for the other ranks, if there is a group of them."""
    if dist.is_initialized():
        dist.barrier()


def start_process_group(device: str) -> None:
    """Join the other ranks over gloo on CPU, NCCL on CUDA."""
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")


@record
def main() -> None:
    """Measure one job in this process."""
    job, folder = Job.read(Path(sys.argv[1])), Path(sys.argv[2])
    faulthandler.dump_traceback_later(0.7 * job.timeout_s)  # shows where a hang is
    torch.set_num_threads(job.threads)
    load_imports(job)
    if CONTENDERS[job.contender].communicates or job.measure == "traffic":
        start_process_group(job.workload.device)
    else:
        for name in ("RANK", "WORLD_SIZE"):  # nobody may find the other processes
            del os.environ[name]
    meter = peak_meter(job.workload.device)
    result = {"memory_method": meter.method, **MEASURES[job.measure](job, meter)}
    (folder / f"rank{RANK}.json").write_text(json.dumps(result))
    meet()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # gloo's threads can abort the interpreter's own way out


if __name__ == "__main__":
    main()
