"""Costs that were measured: this model's regions, and this machine's collectives.

Every rank measures, so that cores and links are as busy as in training; all decide by rank 0's
figures, which travel through the process group's store. Figures stay on disk, by structure and
machine: ``FXZERO_CACHE_DIR``, or ``~/.cache/fxzero``.

    region       median of a few runs on random inputs, compiled as it will be
    collective   see `fxzero.cost.links`
    the rest     the analytic model
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx

from fxzero._compat import default_store, real_tensors
from fxzero.cost.analytic import AnalyticCosts, work_of, work_of_piece
from fxzero.cost.links import time_collective
from fxzero.cost.model import TransferCost
from fxzero.cost.timing import RUNS, median_us
from fxzero.errors import FxZeroError
from fxzero.graph.aliases import is_view
from fxzero.graph.pieces import Pieces
from fxzero.graph.structure import StructureKey
from fxzero.regions.cutout import Cutout, cut_out, is_lowerable, runs
from fxzero.regions.region import CACHE, Region
from fxzero.transfer import Transfer, TransferKind

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
            return median_us(lambda: made.append(run(sets.pop())), self.device_type)

    def operator_us(self, node: fx.Node) -> float:
        """See `CostModel`: by the analytic model."""
        return self.base.operator_us(node)

    def stream_us(self, num_bytes: int) -> float:
        """See `CostModel`: by the analytic model."""
        return self.base.stream_us(num_bytes)

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
        """Its figures as a file holds them."""
        return list(astuple(time_collective(kind, self.device_type)))

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


def _random_like(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    like = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
    return like.normal_(std=0.02) if like.is_floating_point() else like.zero_()
