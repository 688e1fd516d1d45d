"""Watch one callable run: node by node in its third call, as a whole in the five after it.

    calls 1, 2   nothing: regions compile, allocators and caches warm up
    call 3       under torch.profiler, each node a range ``fxzero::NAME``: slower, and seen whole
    calls 4 – 8  the wall clock

The profile is a file for ui.perfetto.dev. From it come when each node ran, and how much tensors
held: what was handed in, and the most that was allocated on top of it meanwhile. Where several
ranks talk over gloo there is no profile, and nodes are timed by the clock alone: a process whose
gloo threads were profiled may crash when it ends.
"""

from __future__ import annotations

import gzip
import json
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx
from torch.profiler import ProfilerActivity, profile, record_function

from fxzero._compat import arguments_of, gloo_groups, is_fake, is_profiling
from fxzero.graph import Lane, StepGraph
from fxzero.graph.stamps import Stamp, has_stamp, stamp_of

log = logging.getLogger("fxzero")

WARM_CALLS = 2
TIMED_CALLS = 5
PREFIX = "fxzero::"
"""Of a range's name; a node's follows."""


@dataclass(frozen=True)
class NodeTime:
    """When one node ran, from the begin of the call."""

    node: str
    lane: str
    layer: str
    start_us: float
    us: float


class NodeTimes:
    """What was measured of one callable.

    Args:
        path: where the profile is written, gzipped.
        done: called when something new is known: behind the third call and behind the eighth.
    """

    def __init__(self, path: Path, done: Callable[[], None]) -> None:
        self.path = path
        self.done = done
        self.nodes: tuple[NodeTime, ...] = ()
        self.calls_us: list[float] = []
        self.peak_bytes: int | None = None
        """Of tensors, in the call that was watched."""
        self.device = ""
        self._stamps: dict[str, Stamp] = {}
        """By node; a node without one runs in code of a loop."""
        self._calls = 0
        self._watching = False
        self._clock: list[tuple[str, float, float]] = []

    def generated(
        self, make: Callable[[StepGraph, fx.Graph], Callable[..., Any]]
    ) -> Callable[[StepGraph, fx.Graph], Callable[..., Any]]:
        """What makes code of a part of a graph, and runs its nodes one by one while it watches."""

        def made(graph: StepGraph, part: fx.Graph) -> Callable[..., Any]:
            code = make(graph, part)
            self.device = graph.device.type
            self._stamps |= {node.name: stamp_of(node) for node in part.nodes if has_stamp(node)}
            module = fx.GraphModule(graph.module, part)

            def run(attributes: Any, *inputs: Any) -> Any:
                if self._watching:
                    return _Ranges(module, self._clock).run(*inputs)
                return code(attributes, *inputs)

            return run

        return made

    def around(self, call: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
        """A callable whose runs are measured. Calls on fake tensors are not counted."""

        def measured(inputs: list[Any]) -> Any:
            if self._calls >= WARM_CALLS + 1 + TIMED_CALLS or any(map(is_fake, inputs)):
                return call(inputs)
            if self._calls < WARM_CALLS:
                results = call(inputs)
            elif self._calls == WARM_CALLS:
                results = self._watch(call, inputs)
            else:
                results = self._time(call, inputs)
            self._calls += 1  # a call that raised is tried again
            return results

        measured._boxed_call = True  # type: ignore[attr-defined]
        return measured

    def _time(self, call: Callable[[list[Any]], Any], inputs: list[Any]) -> Any:
        _synchronize()
        start = time.perf_counter()
        results = call(inputs)
        _synchronize()
        self.calls_us.append((time.perf_counter() - start) * 1e6)
        self.done()
        return results

    def _watch(self, call: Callable[[list[Any]], Any], inputs: list[Any]) -> Any:
        handed_in = _storage_bytes(inputs)
        self._watching, self._clock = True, []
        try:
            if is_profiling() or _talks_over_gloo():
                results = call(inputs)
                _synchronize()
                self._take(self._clock)
            else:
                with profile(activities=_activities(), profile_memory=True) as profiler:
                    results = call(inputs)
                    _synchronize()
                self._export(profiler, handed_in)
        finally:
            self._watching = False
        self.done()
        return results

    def _export(self, profiler: profile, handed_in: int) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(self.path))
            self._read(handed_in)
        except OSError as error:
            log.warning("what was measured cannot be written: %s", error)

    def _take(self, ranges: Sequence[tuple[str, float, float]]) -> None:
        """Keep when nodes ran: name, start and duration in microseconds, in order."""
        begin = min((start for _, start, _ in ranges), default=0.0)
        nodes = []
        for name, start, us in ranges:
            stamp = self._stamps.get(name)
            lane, layer = (stamp.lane, stamp.layer) if stamp is not None else (Lane.COMPUTE, "")
            nodes.append(NodeTime(name, lane.value, layer, round(start - begin, 3), round(us, 3)))
        self.nodes = tuple(nodes)

    def _read(self, handed_in: int) -> None:
        with gzip.open(self.path, "rt") as file:
            events = json.load(file)["traceEvents"]
        device = "gpu_user_annotation"  # what ran on the GPU between a range's ends
        category = device if any(e.get("cat") == device for e in events) else "user_annotation"
        ranges = [
            event
            for event in events
            if event.get("cat") == category and event["name"].startswith(PREFIX)
        ]
        ranges.sort(key=lambda event: event["ts"])
        self._take([(e["name"].removeprefix(PREFIX), e["ts"], e["dur"]) for e in ranges])
        on_gpu = self.device == "cuda"
        held = most = 0
        for event in sorted(
            (e for e in events if e.get("name") == "[memory]"), key=lambda event: event["ts"]
        ):
            if (event["args"]["Device Type"] != 0) is on_gpu:
                held += event["args"]["Bytes"]
                most = max(most, held)
        self.peak_bytes = handed_in + most


class _Ranges(fx.Interpreter):
    """Runs nodes one by one, each within a range of its name, and frees each value behind its last
    use, as the generated code does.

    Args:
        clock: gets each node's name, start and duration in microseconds.
    """

    def __init__(self, module: fx.GraphModule, clock: list[tuple[str, float, float]]) -> None:
        super().__init__(module)
        self.clock = clock

    def run_node(self, n: fx.Node) -> Any:
        if n.op != "call_function":
            return super().run_node(n)
        start = time.perf_counter()
        with record_function(PREFIX + n.name):
            value = super().run_node(n)
        self.clock.append((n.name, start * 1e6, (time.perf_counter() - start) * 1e6))
        return value

    def fetch_args_kwargs_from_env(self, n: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return arguments_of(n, self.env.__getitem__)


def _activities() -> list[ProfilerActivity]:
    on_gpu = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
    return [ProfilerActivity.CPU, *on_gpu]


def _talks_over_gloo() -> bool:
    return any(group.size() > 1 for group in gloo_groups())


def _storage_bytes(values: Sequence[Any]) -> int:
    """What some tensors take, each storage once."""
    storages = {
        value.untyped_storage().data_ptr(): value.untyped_storage().nbytes()
        for value in values
        if isinstance(value, Tensor)
    }
    return sum(storages.values())


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
