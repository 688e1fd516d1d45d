"""A machine's figures: all ranks measure at once, and go by those of rank 0.

What cannot be measured is that of the cluster which would be guessed, and the file says so. A
measurement that fails on one rank is given up by all: none waits for another.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

import torch

from fxzero.cost.cluster import (
    ClusterSpec,
    DeviceSpec,
    DiskSpec,
    HostSpec,
    LinkSpec,
    guess_cluster,
)
from fxzero.cost.resources import cores
from fxzero.doctor.compilers import Chain
from fxzero.doctor.compute import (
    CHAIN_SHAPES,
    COPIED_BYTES,
    measure_device,
    settle,
    update_bytes_per_s,
)
from fxzero.doctor.copies import Scratch, host_spec, measure_ways
from fxzero.doctor.links import Links, measure_links
from fxzero.doctor.verdicts import Checked, fail, ok, reason, warn
from fxzero.doctor.world import World

HOST = torch.device("cpu")
Result = TypeVar("Result")
HOW_TO_MEASURE_LINKS = (
    "Links need ranks: torchrun --nproc-per-node 2 -m fxzero doctor --write FILE, on several hosts "
    "with --nnodes too."
)
SETTLE_S = 2.0
"""Of computing before anything is measured: clocks rise, and what lasts for a moment is over."""
MIB = 1 << 20


@dataclass
class Measuring:
    """The ranks at it, and what there is to say so far."""

    world: World
    device: torch.device
    disk: Path
    """The folder whose disk is measured."""
    checks: list[Checked] = field(default_factory=list)
    sources: dict[str, str] = field(default_factory=dict)

    def attempt(self, what: str, call: Callable[[], Result], advice: str) -> Result | None:
        """Let all ranks do something at once: its result, or None and a failed check where it
        raises on one of them."""
        self.world.meet()
        result: Result | None = None
        error = ""
        try:
            result = call()
        except Exception as raised:
            error = reason(raised)
        errors = self.world.all_of(error)
        if not any(errors):
            return result
        rank, said = next((rank, said) for rank, said in enumerate(errors) if said)
        where = f" (rank {rank})" if self.world.size > 1 else ""
        self.checks.append(fail(what, f"{said}{where}", advice))
        return None

    def measured(self, part: str, text: str) -> None:
        """A part of the file is this machine's."""
        self.sources[part] = f"measured: {text}"

    def device_spec(self, run: Chain | None) -> DeviceSpec:
        """What the rank's device computes."""
        settle(self.device, SETTLE_S)
        found = measure_device(self.device, run, self.world.meet)
        shape = "x".join(map(str, CHAIN_SHAPES[self.device.type]))
        chain = f"a sum, norm, ReLU and its gradient of {shape}, compiled, and " if run else ""
        self.measured(
            "device",
            "square matrix products of growing width; torch copy_ of "
            f"{COPIED_BYTES[self.device.type] // MIB} MiB, bytes read and written; "
            f"{chain}torch's fused AdamW, against the copy",
        )
        rate = found.peak_flops["fp32"] * found.flops_efficiency
        text = f"fp32 products {rate / 1e9:,.3g} GFLOP/s, memory {_rate(found.memory_bytes_per_s)}"
        self.checks.append(ok("compute", f"{text}, {found.launch_us:.3g} us a launch"))
        return found

    def host_spec(self, guess: ClusterSpec) -> HostSpec:
        """The ways to the host, and updates there."""
        ways = self.attempt("copies", lambda: measure_ways(self.device), "See pinned memory.")
        updates = self.attempt(
            "updates", lambda: update_bytes_per_s(HOST), "Torch's fused AdamW must run."
        )
        if ways is None or updates is None:
            self.sources["host"] = f"not measured: as in {guess.name}"
            return guess.host
        text = f"{_rate(ways.up_bytes_per_s)} to the device, {_rate(ways.down_bytes_per_s)} from it"
        self.checks.append(ok("copies", f"{text}; updates on the host {_rate(updates)}"))
        self.measured(
            "host", "64 MiB each way; torch's fused AdamW of 8 M parameters, 32 B of each"
        )
        return host_spec(ways, updates)

    def disk_spec(self, guess: ClusterSpec) -> DiskSpec:
        """The disk of a folder."""
        advice = f"Name another folder by --disk; that of a step is disk.paths. Not {self.disk}."
        scratch = self.attempt("disk", lambda: Scratch(self.disk, self.world.per_node), advice)
        figures: list[float] = []
        if scratch is not None:
            for time_it in (
                scratch.write_bytes_per_s,
                scratch.read_bytes_per_s,
                scratch.latency_us,
            ):
                figure = self.attempt("disk", time_it, advice)
                if figure is None:
                    break
                figures.append(figure)
        if scratch is None or len(figures) < 3:
            self.sources["disk"] = f"not measured: as in {guess.name}"
            return guess.disk
        write, read, latency_us = figures
        found = (
            f"{_rate(read)} read, {_rate(write)} written, {latency_us:.0f} us a request, "
            f"{scratch.num_bytes / 2**30:,.0f} GiB free for each rank ({self.disk})"
        )
        if scratch.is_direct:
            self.checks.append(ok("disk", found))
        else:
            cached = "The file system refuses direct I/O: these are figures of the page cache, and "
            advice = cached + "memory='infinity' takes memory there. Name a folder on a disk."
            self.checks.append(warn("disk", found, advice))
        how = "past the page cache" if scratch.is_direct else "through the page cache"
        self.measured("disk", f"a scratch file in chunks of 8 MiB, 4 on their way, {how}")
        return DiskSpec(read, write, latency_us, scratch.num_bytes)

    def links(self, guess: ClusterSpec) -> Links:
        """What is between the ranks."""
        found = measure_links(self.device, self.world.per_node, self.world.num_nodes)
        texts = []
        for name, link in (("intra", found.intra), ("inter", found.inter)):
            if link is None:
                self.sources[name] = f"not measured: as in {guess.name}"
                continue
            self.measured(
                name,
                "gathers and reduce-scatters of 4 KiB, of 16 such tensors, and of 8 MiB, "
                f"{self.world.size} ranks on {self.world.num_nodes} host(s)",
            )
            texts.append(f"{name} {_of_link(link)}")
        if texts:
            self.checks.append(ok("links", "; ".join(texts)))
        else:
            what = f"not measured by one rank: the file has those of {guess.name}"
            self.checks.append(warn("links", what, HOW_TO_MEASURE_LINKS))
        return found


def measure(
    world: World, device: torch.device, run: Chain | None, disk: Path
) -> tuple[ClusterSpec, list[Checked]]:
    """The cluster that this machine is a node of, and what there is to say about its figures.

    Args:
        run: what was compiled; None where compilers do not work.
        disk: the folder whose disk is measured.
    """
    measuring = Measuring(world, device, disk)
    guess = guess_cluster(device.type, world.size)
    spec = measuring.device_spec(run)
    host = measuring.host_spec(guess)
    on_disk = measuring.disk_spec(guess)
    links = measuring.links(guess)
    cluster = ClusterSpec(
        name="measured",
        device=spec,
        intra=links.intra or guess.intra,
        inter=links.inter or guess.inter,
        devices_per_node=_per_node(world, device),
        num_nodes=world.num_nodes,
        host=host,
        disk=on_disk,
        sources={**measuring.sources, "conditions": _conditions(world)},
    )
    return world.first_of_all(cluster), measuring.checks


def _per_node(world: World, device: torch.device) -> int:
    """Ranks of a host; alone, as many as it has GPUs, or cores for their threads."""
    if world.size > 1:
        return world.per_node
    if device.type == "cuda":
        return torch.cuda.device_count()
    return max(cores() // torch.get_num_threads(), 1)


def _conditions(world: World) -> str:
    today = datetime.now(UTC).date().isoformat()
    threads = torch.get_num_threads()
    how = f"{world.size} rank(s) at once, {world.per_node} on each host, {threads} thread(s) each"
    alone = "; devices_per_node is what this host has room for" if world.size == 1 else ""
    return f"fxzero doctor, {today}, torch {torch.__version__}, {how}{alone}"


def _rate(bytes_per_s: float) -> str:
    """``1.23 GB/s``."""
    return f"{bytes_per_s / 1e9:,.3g} GB/s"


def _of_link(link: LinkSpec) -> str:
    host = (
        f", {link.host_s_per_byte * 1e9:.2g} ns of compute a byte" if link.host_s_per_byte else ""
    )
    further = f", {link.tensor_us:.0f} us a further tensor" if link.tensor_us else ""
    return f"{_rate(link.bytes_per_s)}, {link.latency_us:.0f} us{host}{further}"
