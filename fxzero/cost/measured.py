"""Costs that were measured: this model's regions, and this machine's collectives.

Every rank measures, so that cores and links are as busy as in training; all decide by rank 0's
figures, which travel through the process group's store. Figures stay on disk, by structure and
machine: ``FXZERO_CACHE_DIR``, or ``~/.cache/fxzero``.

    region       median of a few runs on random inputs, compiled as it will be
    collective   α from one of 4 KiB, β from several of 8 MiB in flight together: a burst that
                 buffers swallow says nothing of the link. The host's share is what a loop of
                 matrix products loses to those
    the rest     the analytic model
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx

from fxzero._compat import default_store, real_tensors, return_free_memory
from fxzero.cost.analytic import AnalyticCosts, work_of, work_of_piece
from fxzero.cost.model import TransferCost
from fxzero.errors import FxZeroError
from fxzero.graph.aliases import is_view
from fxzero.graph.pieces import Pieces
from fxzero.graph.structure import StructureKey
from fxzero.regions.cutout import Cutout, cut_out, is_lowerable, runs
from fxzero.regions.region import CACHE, Region
from fxzero.runtime import collectives
from fxzero.transfer import Transfer, TransferKind

LEAST_BYTES, MOST_BYTES = 1 << 12, 8 << 20
"""Full bytes of the collectives that show latency, and bandwidth."""
RUNS = 5
IN_FLIGHT = 4
"""Large collectives at a time."""
REGION_LIMIT_S = 0.5
MEETING_LIMIT_S = 600.0


class CostFile:
    """Figures on disk: one JSON file for each."""

    def __init__(self, folder: Path | None = None) -> None:
        default = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "fxzero"
        self.folder = folder or Path(os.environ.get("FXZERO_CACHE_DIR", default)) / "costs"

    def path(self, what: str) -> Path:
        """Where the figures of something are."""
        return self.folder / f"{hashlib.sha256(what.encode()).hexdigest()[:32]}.json"

    def read(self, what: str) -> list[float] | None:
        """Figures that were kept; None if there are none, or the file is damaged."""
        try:
            found = json.loads(self.path(what).read_text())
            return [float(value) for value in found["figures"]]
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def write(self, what: str, figures: Sequence[float]) -> None:
        """Keep figures; whoever reads meanwhile sees the old file or the new one."""
        path = self.path(what)
        text = json.dumps({"what": what, "figures": list(figures)})
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            draft = path.with_suffix(f".{os.getpid()}")
            draft.write_text(text)
            draft.replace(path)
        except OSError:
            return  # nothing is lost but the time to measure again


def machine() -> str:
    """What figures depend on beside what they are of."""
    if torch.cuda.is_available():
        device = torch.cuda.get_device_name()
    else:
        cpuinfo = Path("/proc/cpuinfo")
        lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
        device = next((line for line in lines if line.startswith("model name")), "")
    return f"{platform.machine()} {device} torch {torch.__version__} {torch.get_num_threads()}"


@dataclass
class MeasuredCosts:
    """See the module's docstring."""

    base: AnalyticCosts
    device_type: str
    fuses: bool
    """Whether regions are compiled."""
    fake_mode: Any
    identity: str
    """What the ranks agree to call this compilation."""
    file: CostFile = field(default_factory=CostFile)
    name: str = "measured"
    _figures: dict[str, list[float]] = field(default_factory=dict)
    _regions: dict[StructureKey, float] = field(default_factory=dict)
    _agreed: int = 0

    def __post_init__(self) -> None:
        self._pieces = Pieces(getattr(self.fake_mode, "shape_env", None))

    def compute_us(self, nodes: Sequence[fx.Node]) -> float:
        """See `CostModel`."""
        total = 0.0
        rest: list[fx.Node] = []
        for node in nodes:
            if isinstance(node.target, Region) and node.target.key in self._regions:
                total += self._regions[node.target.key]
            elif not is_lowerable(node) and not is_view(node):
                rest.append(node)
        for run in runs(nodes):
            cutout = cut_out(self._pieces, run, "measured")
            if cutout.outputs:
                total += self.region_us(cutout)
        return total + self.base.work_us(work_of(rest))

    def region_us(self, cutout: Cutout) -> float:
        """Microseconds of one run of a region."""
        if cutout.key not in self._regions:
            what = f"region {cutout.key.nodes} {cutout.key.outputs} {self.fuses} {machine()}"
            if cutout.key.environment is not None:  # symbolic sizes: nothing to run
                self._regions[cutout.key] = self.base.work_us(work_of_piece(cutout.piece))
            else:
                (us,) = self.agree(what, lambda: [self._time_region(cutout)])
                self._regions[cutout.key] = us
        return self._regions[cutout.key]

    def _time_region(self, cutout: Cutout) -> float:
        if self.fuses:
            run: Callable[[list[Any]], Any] = CACHE.get(
                cutout.key, cutout.module, self.fake_mode
            ).run
        else:
            module = cutout.module()
            run = lambda inputs: module(*inputs)  # noqa: E731
        values = [node.meta["val"] for node in cutout.inputs]
        with real_tensors(), torch.no_grad():
            # Each run has inputs of its own: in a step nothing is left in the caches either.
            sets = [[_random_like(value) for value in values] for _ in range(RUNS + 1)]
            made: list[Any] = []  # nor is the memory of the last run's results at hand
            return self._median_us(lambda: made.append(run(sets.pop())))

    def _median_us(self, call: Callable[[], Any]) -> float:
        """The median time of a few calls, after a first one."""
        call()
        times: list[float] = []
        begin = time.perf_counter()
        while len(times) < RUNS and (not times or time.perf_counter() - begin < REGION_LIMIT_S):
            self._synchronize()
            start = time.perf_counter()
            call()
            self._synchronize()
            times.append(time.perf_counter() - start)
        return median(times) * 1e6

    def _synchronize(self) -> None:
        if self.device_type == "cuda":
            torch.cuda.synchronize()

    def operator_us(self, node: fx.Node) -> float:
        """See `CostModel`: by the analytic model."""
        return self.base.operator_us(node)

    def update_us(self, update: fx.Node) -> float:
        """See `CostModel`: by the analytic model."""
        return self.base.update_us(update)

    def transfer(self, transfer: Transfer) -> TransferCost:
        """See `CostModel`."""
        if transfer.kind in (TransferKind.COPY, TransferKind.SEND, TransferKind.RECEIVE):
            return self.base.transfer(transfer)
        if transfer.size <= 1 or not dist.is_initialized():
            return TransferCost(0.0)
        if transfer.size != dist.get_world_size():
            return self.base.transfer(transfer)  # a part of the ranks: not measured
        local = os.environ.get("LOCAL_WORLD_SIZE", "")
        what = f"{transfer.kind} {transfer.size} ranks {local} a host {machine()}"
        if what not in self._figures:
            self._figures[what] = self.agree(what, lambda: self._time_collective(transfer.kind))
        latency_us, us_per_byte, host_us, host_us_per_byte = self._figures[what]
        return TransferCost(
            latency_us * transfer.num_tensors + us_per_byte * transfer.full_bytes,
            host_us * transfer.num_tensors + host_us_per_byte * transfer.full_bytes,
        )

    def _time_collective(self, kind: TransferKind) -> list[float]:
        """α and β in microseconds, and the same of what the host loses."""
        with real_tensors(), torch.no_grad():
            latency_us, launch_us = self._stream_us(kind, LEAST_BYTES, 1)
            stream_us, _ = self._stream_us(kind, MOST_BYTES, IN_FLIGHT)
            lost_us = self._lost_us(kind, stream_us)
        per_byte = max(stream_us - latency_us, 0.0) / (IN_FLIGHT * MOST_BYTES)
        return [latency_us, per_byte, launch_us, lost_us / (IN_FLIGHT * MOST_BYTES)]

    def _stream_us(self, kind: TransferKind, num_bytes: int, count: int) -> tuple[float, float]:
        """The time of some collectives in flight together, and of launching one."""
        start, finish = collective(kind, num_bytes, self.device_type)
        walls, launches = [], []
        for _ in range(1 + (RUNS if count > 1 else 10 * RUNS)):
            dist.barrier()
            self._synchronize()
            begin = time.perf_counter()
            flights = [start() for _ in range(count)]
            launches.append((time.perf_counter() - begin) / count)
            for flight in flights:
                finish(flight)
            self._synchronize()
            walls.append(time.perf_counter() - begin)
        return median(walls[1:]) * 1e6, median(launches[1:]) * 1e6

    def _lost_us(self, kind: TransferKind, stream_us: float) -> float:
        """What compute loses while a stream of collectives is in flight."""
        start, finish = collective(kind, MOST_BYTES, self.device_type)
        matrix = torch.randn(256, 256, device=self.device_type)
        one_us = self._median_us(lambda: matrix @ matrix)
        count = max(int(1.5 * stream_us / one_us), 1)

        def compute_us(num_flights: int) -> float:
            return_free_memory()  # a step's buffers are seldom those of the transfer before
            dist.barrier()
            self._synchronize()
            begin = time.perf_counter()
            flights = [start() for _ in range(num_flights)]
            for _ in range(count):
                matrix @ matrix
            self._synchronize()
            for flight in flights:
                finish(flight)
            return (time.perf_counter() - begin) * 1e6

        return max(median(compute_us(IN_FLIGHT) - compute_us(0) for _ in range(RUNS)), 0.0)

    def agree(self, what: str, measure: Callable[[], list[float]]) -> list[float]:
        """Rank 0's figures of something: kept ones, or what it measures now.

        Raises:
            FxZeroError: rank 0 does not compile the same thing.
        """
        store = default_store()
        if store is None:
            figures = self.file.read(what) or measure()
            self.file.write(what, figures)
            return figures
        self._agreed += 1
        key = f"fxzero/costs/{self.identity}/{self._agreed}"
        kept = self.file.read(what) if dist.get_rank() == 0 else None
        if dist.get_rank() == 0:
            store.set(f"{key}/kept", json.dumps(kept))
        kept = json.loads(_wait_for(store, f"{key}/kept", what))
        if kept is not None:
            return [float(value) for value in kept]
        self._meet(store, key, what)
        figures = measure()
        if dist.get_rank() == 0:
            self.file.write(what, figures)
            store.set(f"{key}/figures", json.dumps(figures))
        return [float(v) for v in json.loads(_wait_for(store, f"{key}/figures", what))]

    def _meet(self, store: Any, key: str, what: str) -> None:
        """Wait until all ranks are about to measure the same thing."""
        store.set(f"{key}/rank{dist.get_rank()}", "here")
        for rank in range(dist.get_world_size()):
            _wait_for(store, f"{key}/rank{rank}", what, rank)


def _wait_for(store: Any, key: str, what: str, rank: int = 0) -> str:
    try:
        store.wait([key], timedelta(seconds=MEETING_LIMIT_S))
    except dist.DistStoreError as error:
        raise FxZeroError(
            f"cost.model='measured' waited {MEETING_LIMIT_S:g} s for rank {rank} to measure "
            f"{what[:200]}. Costs are measured by all ranks together: has that rank failed, or "
            "does it compile another graph? cost.model='analytic' needs nobody."
        ) from error
    return str(store.get(key).decode())


def collective(
    kind: TransferKind, num_bytes: int, device_type: str
) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    """How to start and how to join one collective over all ranks, as the backend will run it."""
    group = dist.group.WORLD
    assert group is not None
    name, size = group.group_name, group.size()
    full = torch.ones(num_bytes // 4 // size * size, device=device_type)
    part = full.chunk(size)[group.rank()].clone()
    if device_type == "cpu":
        if kind is TransferKind.ALL_GATHER:
            return lambda: collectives.gather([part], size, name), collectives.join
        if kind is TransferKind.REDUCE_SCATTER:
            return (
                lambda: collectives.exchange([full], size, name, [False]),
                lambda flight: collectives.join_exchange(flight, size),
            )
        return (
            lambda: collectives.all_reduce([full], name, [True]),
            lambda flight: collectives.join_sum(flight, size),
        )
    functional = torch.ops._c10d_functional
    wait = functional.wait_tensor.default
    if kind is TransferKind.ALL_GATHER:
        return lambda: functional.all_gather_into_tensor(part, size, name), wait
    if kind is TransferKind.REDUCE_SCATTER:
        return lambda: functional.reduce_scatter_tensor(full, "avg", size, name), wait
    return lambda: functional.all_reduce(full, "avg", name), wait


def _random_like(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    like = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
    return like.normal_(std=0.02) if like.is_floating_point() else like.zero_()
